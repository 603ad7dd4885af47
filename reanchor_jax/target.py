"""The target: a Llama or Qwen3 decoder that reads a cache and writes nothing."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from reanchor_jax.cache import KVCache, init_cache
from reanchor_jax.config import TargetConfig
from reanchor_jax.layers import Segment, rms_norm, stack_layers
from reanchor_jax.rope import make_rope


class TargetOutput(NamedTuple):
    """What one forward over T tokens returns."""

    hidden: jax.Array  # [T, D] after the final norm; `Target.logits` turns rows into logits
    features: jax.Array  # [T, C*D] hidden states after the tapped layers, side by side
    k: jax.Array  # [L, K, T, H] the tokens' own keys
    v: jax.Array  # [L, K, T, H] and values


class Target(nnx.Module):
    """Decoder with layers stacked on axis 0 and scanned: compile time does not grow with depth."""

    def __init__(self, config: TargetConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.config = config
        shape = (config.vocab_size, config.layer.hidden_size)
        self.embedding = nnx.Param(jax.random.normal(rngs(), shape, dtype) * 0.02)
        self.layers = stack_layers(config.layer, config.num_layers, dtype=dtype, rngs=rngs)
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
        return self.embedding[...][tokens]

    @property
    def head_rows(self) -> jax.Array:
        """The LM head [V, D]."""
        return (self.embedding if self.lm_head is None else self.lm_head)[...]

    def logits(self, hidden: jax.Array) -> jax.Array:
        """float32 logits [..., V] of normed hidden states [..., D]."""
        return jnp.einsum("...d,vd->...v", hidden, self.head_rows, preferred_element_type=jnp.float32)

    def __call__(
        self,
        tokens: jax.Array,
        positions: jax.Array,
        cache: KVCache,
        cache_len: jax.Array,
        self_mask: jax.Array,
        tap_ids: tuple[int, ...] = (),
    ) -> TargetOutput:
        """One forward over T tokens behind the first `cache_len` slots of the cache.

        Args:
          tokens: [T] int32.
          positions: [T] int32 absolute positions (for a trie: anchor position + depth).
          cache: committed keys and values, read only.
          cache_len: () int32, number of valid slots.
          self_mask: [T, T] bool, which of the T tokens see which (causal, or trie ancestors).
          tap_ids: static layer ids whose outputs become `features`, in this order. The last
            layer's entry is taken after the final norm, as Hugging Face's hidden states are.
        """
        num_layers, num_tokens = self.config.num_layers, tokens.shape[0]
        rope = make_rope(self.config.rope, self.config.layer.head_dim, positions)
        cache_mask = jnp.broadcast_to(jnp.arange(cache.num_slots)[None, :] < cache_len, (num_tokens, cache.num_slots))
        # Layer l writes its output to slot tap_slots[l]; len(tap_ids) is out of range and dropped.
        # tap_ids (1, 4) of 6 layers: tap_slots = [2, 0, 2, 2, 1, 2].
        tap_slots = jnp.array(
            [tap_ids.index(l) if l in tap_ids else len(tap_ids) for l in range(num_layers)], jnp.int32
        )

        def run_layer(carry, layer_and_cache):
            x, taps = carry
            layer, cache_k, cache_v, slot = layer_and_cache
            x, k, v = layer(x, rope, [Segment(cache_k, cache_v, cache_mask)], self_mask)
            if tap_ids:
                taps = taps.at[slot].set(x, mode="drop")
            return (x, taps), (k, v)

        x = self.embed(tokens)
        taps = jnp.zeros((len(tap_ids), *x.shape), x.dtype)  # [C, T, D]
        (x, taps), (k, v) = jax.lax.scan(run_layer, (x, taps), (self.layers, cache.k, cache.v, tap_slots))
        hidden = rms_norm(x, self.final_norm[...], self.config.layer.rms_norm_eps)
        if num_layers - 1 in tap_ids:
            taps = taps.at[tap_ids.index(num_layers - 1)].set(hidden)
        features = taps.transpose(1, 0, 2).reshape(num_tokens, -1)
        return TargetOutput(hidden, features, k, v)


def forward_text(target: Target, tokens: jax.Array, tap_ids: tuple[int, ...] = ()) -> TargetOutput:
    """The target's causal forward over one whole text [T]."""
    size = tokens.shape[0]
    no_cache = init_cache(target.config.layer, target.config.num_layers, 0, target.dtype)
    causal = jnp.tril(jnp.ones((size, size), bool))
    return target(tokens, jnp.arange(size), no_cache, jnp.int32(0), causal, tap_ids)
