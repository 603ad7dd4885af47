"""The drafter: one forward turns an anchor and B-1 masks into features, of which a head drafts.

Its context is not its own past but the target's features: `fc` and `hidden_norm` (the paper's
Pi) project them, and every layer turns the projected features into keys and values with the
same matrices as its block tokens. Those keys and values are cached, never the features.
"""

from __future__ import annotations

import copy
import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from reanchor_jax.cache import KVCache
from reanchor_jax.config import DrafterConfig, LMHeadConfig
from reanchor_jax.errors import ReanchorError
from reanchor_jax.heads import make_head
from reanchor_jax.layers import Segment, rms_norm, stack_layers
from reanchor_jax.rope import make_rope
from reanchor_jax.windows import window_mask


class Drafter(nnx.Module):
    """DFlash's backbone, with a head on top; embedding and LM head are the target's."""

    def __init__(self, config: DrafterConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.config = config
        width = config.layer.hidden_size
        num_features = len(config.target_layer_ids) * width
        self.fc = nnx.Param(jax.random.normal(rngs(), (width, num_features), dtype) * num_features**-0.5)
        self.hidden_norm = nnx.Param(jnp.ones(width, dtype))
        self.layers = stack_layers(config.layer, config.num_layers, dtype=dtype, rngs=rngs)
        self.norm = nnx.Param(jnp.ones(width, dtype))
        self.head = make_head(config, dtype=dtype, rngs=rngs)

    def context(self, features: jax.Array, positions: jax.Array) -> KVCache:
        """Keys and values [L, K, T, H] that target features [T, C*D] give in every layer.

        Args:
          features: concatenated target hidden states of T positions.
          positions: [T] int32 absolute positions.
        """
        projected = jnp.einsum("tc,dc->td", features, self.fc[...])
        projected = rms_norm(projected, self.hidden_norm[...], self.config.layer)
        rope = make_rope(self.config.layer.rope, self.config.layer.head_dim, positions)
        _, (k, v) = jax.lax.scan(lambda carry, layer: (carry, layer.keys_values(projected, rope)), None, self.layers)
        return KVCache(k, v)

    def __call__(
        self,
        x: jax.Array,
        positions: jax.Array,
        cache: KVCache,
        cache_len: jax.Array,
        suffix: KVCache,
        suffix_len: jax.Array,
    ) -> jax.Array:
        """Features [T, D] of one block, bidirectional inside the block (but for sliding layers).

        Args:
          x: [T, D] target embeddings of the block: anchor, then mask tokens.
          positions: [T] int32 absolute positions.
          cache: context of committed positions; slot j holds position j.
          cache_len: () int32, how many of its slots the block sees.
          suffix: context of the retained suffix (0 slots where there is none); slot s holds
            position cache_len + s.
          suffix_len: () int32, how many of its slots the block sees: the offset d.
        """
        rope = make_rope(self.config.layer.rope, self.config.layer.head_dim, positions)

        def visible(num_slots: int, length: jax.Array) -> jax.Array:
            return jnp.broadcast_to(jnp.arange(num_slots)[None, :] < length, (x.shape[0], num_slots))

        masks = [
            visible(cache.num_slots, cache_len),
            visible(suffix.num_slots, suffix_len),
            jnp.ones((x.shape[0], x.shape[0]), bool),
        ]
        slides, windows = None, []
        if self.config.sliding_window is not None and self.config.sliding_attention != "ignored":
            key_pos = (jnp.arange(cache.num_slots), cache_len + jnp.arange(suffix.num_slots), positions)
            kind, window = self.config.sliding_attention, self.config.sliding_window
            windows = [window_mask(positions, at, window, kind) for at in key_pos]
            slides = jnp.array(self.config.sliding_layers)  # [L] bool, scanned with the layers

        def run_layer(x, layer_and_context):
            layer, slides, cache_k, cache_v, suffix_k, suffix_v = layer_and_context
            seen = masks if slides is None else [m & (w | ~slides) for m, w in zip(masks, windows, strict=True)]
            segments = [Segment(cache_k, cache_v, seen[0]), Segment(suffix_k, suffix_v, seen[1])]
            x, _, _ = layer(x, rope, segments, seen[2])
            return x, None

        x, _ = jax.lax.scan(run_layer, x, (self.layers, slides, cache.k, cache.v, suffix.k, suffix.v))
        return rms_norm(x, self.norm[...], self.config.layer)


def with_block_size(drafter: Drafter, block_size: int) -> Drafter:
    """The same weights with longer or shorter blocks: only the number of masks changes.

    Raises:
      ReanchorError: a head that is not an LM head, whose calibration may belong to a block size.
    """
    if not isinstance(drafter.config.head, LMHeadConfig):
        raise ReanchorError("the block size of DFlash drafters alone can be changed; expected one")
    other = copy.copy(drafter)
    other.config = dataclasses.replace(drafter.config, block_size=block_size)
    return other
