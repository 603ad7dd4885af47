"""The target: a Llama, Qwen3 or Gemma 4 decoder that reads a cache and writes nothing."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from reanchor_jax.cache import KVCache, init_target_cache, slot_positions
from reanchor_jax.config import LayerConfig, TargetConfig
from reanchor_jax.layers import Segment, rms_norm, stack_layers
from reanchor_jax.rope import make_rope
from reanchor_jax.windows import window_mask


class TargetOutput(NamedTuple):
    """What one forward over T tokens returns."""

    hidden: jax.Array  # [T, D] after the final norm; `Target.logits` turns rows into logits
    features: jax.Array  # [T, C*D] hidden states after the tapped layers, side by side
    kv: tuple[KVCache, ...]  # [R, K, T, H] the tokens' own keys and values, for each layer of the pattern


class Target(nnx.Module):
    """Decoder whose layers are stacked and scanned: compile time does not grow with depth.

    `layers` has one entry for each layer of the pattern, stacked over its R repeats on axis 0:
    layer n of the decoder is row n // len(pattern) of entry n % len(pattern).
    """

    def __init__(self, config: TargetConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.config = config
        shape = (config.vocab_size, config.layer.hidden_size)
        repeats = config.num_layers // len(config.pattern)
        self.embedding = nnx.Param(jax.random.normal(rngs(), shape, dtype) * 0.02)
        self.layers = nnx.List([stack_layers(layer, repeats, dtype=dtype, rngs=rngs) for layer in config.pattern])
        self.final_norm = nnx.Param(jnp.ones(config.layer.hidden_size, dtype))
        # No head of its own means: the embedding, so that tied weights are stored once.
        self.lm_head = (
            None
            if config.tie_word_embeddings
            else nnx.Param(jax.random.normal(rngs(), shape, dtype) * shape[1] ** -0.5)
        )

    @property
    def dtype(self) -> jnp.dtype:
        """dtype of parameters and activations."""
        return self.embedding[...].dtype

    def embed(self, tokens: jax.Array) -> jax.Array:
        """Embeddings [..., D] of tokens [...] int32."""
        return scale_embedding(self.embedding[...][tokens], self.config.scaled_embedding)

    @property
    def head_rows(self) -> jax.Array:
        """The LM head [V, D]."""
        return (self.embedding if self.lm_head is None else self.lm_head)[...]

    def logits(self, hidden: jax.Array) -> jax.Array:
        """float32 logits [..., V] of normed hidden states [..., D]."""
        logits = jnp.einsum("...d,vd->...v", hidden, self.head_rows, preferred_element_type=jnp.float32)
        return softcap(logits, self.config.logit_softcap)

    def __call__(
        self,
        tokens: jax.Array,
        positions: jax.Array,
        cache: tuple[KVCache, ...],
        cache_len: jax.Array,
        self_mask: jax.Array,
        tap_ids: tuple[int, ...] = (),
    ) -> TargetOutput:
        """One forward over T tokens behind the first `cache_len` positions of the cache.

        Args:
          tokens: [T] int32.
          positions: [T] int32 absolute positions (for a trie: anchor position + depth).
          cache: committed keys and values for each layer of the pattern, read only.
          cache_len: () int32, number of committed positions.
          self_mask: [T, T] bool, which of the T tokens see which (causal, or trie ancestors).
          tap_ids: static layer ids whose outputs become `features`, in this order. The last
            layer's entry is taken after the final norm, as Hugging Face's hidden states are.
        """
        config = self.config
        kinds = dict(zip(config.pattern, cache, strict=True))  # equal layers have caches of one shape
        ropes = {layer: make_rope(layer.rope, layer.head_dim, positions) for layer in kinds}
        masks = {layer: _masks(layer, positions, kv, cache_len, self_mask) for layer, kv in kinds.items()}
        # Layer n writes its output to slot tap_slots[n]; len(tap_ids) is out of range and dropped.
        # tap_ids (1, 4) of 6 layers in a pattern of 3: tap_slots = [[2, 0, 2], [2, 1, 2]].
        slots = [tap_ids.index(n) if n in tap_ids else len(tap_ids) for n in range(config.num_layers)]
        tap_slots = jnp.array(slots, jnp.int32).reshape(-1, len(config.pattern))

        def run_pattern(carry, layers_and_cache):
            x, taps = carry
            layers, cache, slots = layers_and_cache
            kv = []
            for n, layer in enumerate(layers):
                cache_mask, own_mask = masks[layer.config]
                x, k, v = layer(x, ropes[layer.config], [Segment(cache[n].k, cache[n].v, cache_mask)], own_mask)
                kv.append(KVCache(k, v))
                if tap_ids:
                    taps = taps.at[slots[n]].set(x, mode="drop")
            return (x, taps), tuple(kv)

        x = self.embed(tokens)
        taps = jnp.zeros((len(tap_ids), *x.shape), x.dtype)  # [C, T, D]
        (x, taps), kv = jax.lax.scan(run_pattern, (x, taps), (tuple(self.layers), cache, tap_slots))
        hidden = rms_norm(x, self.final_norm[...], config.layer)
        if config.num_layers - 1 in tap_ids:
            taps = taps.at[tap_ids.index(config.num_layers - 1)].set(hidden)
        features = taps.transpose(1, 0, 2).reshape(tokens.shape[0], -1)
        return TargetOutput(hidden, features, kv)


def forward_text(target: Target, tokens: jax.Array, tap_ids: tuple[int, ...] = ()) -> TargetOutput:
    """The target's causal forward over one whole text [T]."""
    size = tokens.shape[0]
    no_cache = init_target_cache(target.config, 0, target.dtype)
    causal = jnp.tril(jnp.ones((size, size), bool))
    return target(tokens, jnp.arange(size), no_cache, jnp.int32(0), causal, tap_ids)


def scale_embedding(x: jax.Array, scaled: bool) -> jax.Array:
    """Embeddings [..., D], times sqrt(D) where they are scaled; that number is rounded to their dtype."""
    return x * jnp.asarray(x.shape[-1] ** 0.5, x.dtype) if scaled else x


def softcap(logits: jax.Array, cap: float | None) -> jax.Array:
    """float32 logits [..., V], squashed into -cap .. cap."""
    return logits if cap is None else jnp.tanh(logits / cap) * cap


def _masks(
    layer: LayerConfig, positions: jax.Array, cache: KVCache, cache_len: jax.Array, self_mask: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Which slots of the cache [T, S] and which of the T tokens [T, T] each token sees in a layer."""
    at = slot_positions(cache, cache_len)
    committed = jnp.broadcast_to((at >= 0) & (at < cache_len), (positions.shape[0], cache.num_slots))
    if layer.sliding_window is None:
        return committed, self_mask
    near = [window_mask(positions, key_pos, layer.sliding_window, "causal") for key_pos in (at, positions)]
    return committed & near[0], self_mask & near[1]
