"""Norm and the decoder layer that targets and drafters share.

Attention runs over *segments*: read-only keys and values that already exist (committed cache,
retained suffix), each with its own mask, followed by the layer's own tokens. Scores of all
segments meet in one softmax, so no cache is ever concatenated or copied.

float32 in exactly four places: norms, rotary angles, softmax, logits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from reanchor_jax.config import Activation, LayerConfig
from reanchor_jax.rope import Rope

NEG_INF = -1e30
"""Score of a masked key: finite, so that a fully masked row gives no NaN."""


ACTIVATIONS: dict[Activation, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
}


class Segment(NamedTuple):
    """Keys and values that exist already, and which queries may see them."""

    k: jax.Array  # [K, S, H] after norm and rotary embedding
    v: jax.Array  # [K, S, H]
    mask: jax.Array  # [T, S] bool, True = attend


def rms_norm(x: jax.Array, weight: jax.Array | None, config: LayerConfig) -> jax.Array:
    """Root-mean-square norm over the last axis, in float32; times the weight, if there is one."""
    x32 = x.astype(jnp.float32)
    x32 = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + config.rms_norm_eps)
    if weight is None:
        return x32.astype(x.dtype)
    weight = jnp.reshape(weight, (1,) * (x.ndim - 1) + (-1,))
    if config.float32_norms:
        return (weight.astype(jnp.float32) * x32).astype(x.dtype)
    return weight * x32.astype(x.dtype)


def apply_rope(x: jax.Array, rope: Rope) -> jax.Array:
    """Rotates x [T, heads, H]; pair i is (x_i, x_{i + H/2})."""
    x32 = x.astype(jnp.float32)
    low, high = jnp.split(x32, 2, axis=-1)
    rotated = jnp.concatenate([-high, low], axis=-1)
    return (x32 * rope.cos[:, None, :] + rotated * rope.sin[:, None, :]).astype(x.dtype)


def attend(q: jax.Array, segments: list[Segment], scale: float) -> jax.Array:
    """Grouped-query attention of q [T, Q, H] over the segments; returns [T, Q, H].

    One softmax in float32 over the keys of all segments together, of scores times `scale`.
    """
    num_kv_heads = segments[0].k.shape[0]
    q = q.reshape(q.shape[0], num_kv_heads, -1, q.shape[-1])  # [T, K, G, H]
    scores = []
    for segment in segments:
        s = jnp.einsum("tkgh,ksh->kgts", q, segment.k, preferred_element_type=jnp.float32) * scale
        scores.append(jnp.where(segment.mask[None, None], s, NEG_INF))
    top = jnp.max(jnp.stack([jnp.max(s, axis=-1, initial=NEG_INF) for s in scores]), axis=0)  # [K, G, T]
    weights = [jnp.exp(s - top[..., None]) for s in scores]
    total = jnp.sum(jnp.stack([jnp.sum(w, axis=-1) for w in weights]), axis=0)
    out = jnp.zeros((*q.shape[1:3], q.shape[0], q.shape[3]), jnp.float32)  # [K, G, T, H]
    for w, segment in zip(weights, segments, strict=True):
        w = (w / total[..., None]).astype(segment.v.dtype)
        out = out + jnp.einsum("kgts,ksh->kgth", w, segment.v, preferred_element_type=jnp.float32)
    return out.transpose(2, 0, 1, 3).reshape(q.shape[0], -1, q.shape[3]).astype(q.dtype)


class DecoderLayer(nnx.Module):
    """Pre-norm attention and gated MLP. Weights keep the checkpoint's [out, in] orientation."""

    def __init__(self, config: LayerConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.config = config
        width, heads = config.hidden_size, config.num_heads * config.head_dim
        kv_heads = config.num_kv_heads * config.head_dim

        def matrix(rows: int, cols: int) -> nnx.Param:
            return nnx.Param(jax.random.normal(rngs(), (rows, cols), dtype) * cols**-0.5)

        def ones(size: int, exists: bool = True) -> nnx.Param | None:
            return nnx.Param(jnp.ones(size, dtype)) if exists else None

        def zeros(size: int) -> nnx.Param | None:
            return nnx.Param(jnp.zeros(size, dtype)) if config.attention_bias else None

        self.input_norm = ones(width)
        self.q_proj = matrix(heads, width)
        self.k_proj = matrix(kv_heads, width)
        self.v_proj = None if config.shared_kv else matrix(kv_heads, width)
        self.o_proj = matrix(width, heads)
        self.q_bias = zeros(heads)
        self.k_bias = zeros(kv_heads)
        self.v_bias = None if config.shared_kv else zeros(kv_heads)
        self.o_bias = zeros(width)
        self.q_norm = ones(config.head_dim, config.qk_norm)
        self.k_norm = ones(config.head_dim, config.qk_norm)
        self.post_attention_norm = ones(width, config.sandwich_norms)
        self.pre_mlp_norm = ones(width)
        self.gate_proj = matrix(config.intermediate_size, width)
        self.up_proj = matrix(config.intermediate_size, width)
        self.down_proj = matrix(width, config.intermediate_size)
        self.post_mlp_norm = ones(width, config.sandwich_norms)
        self.layer_scalar = ones(1, config.layer_scalar)

    def queries(self, x: jax.Array, rope: Rope) -> jax.Array:
        """Normed and rotated queries [T, Q, H] of x [T, D]."""
        q = _linear(x, self.q_proj, self.q_bias).reshape(-1, self.config.num_heads, self.config.head_dim)
        return apply_rope(self._norm(q, self.q_norm), rope)

    def keys_values(self, x: jax.Array, rope: Rope) -> tuple[jax.Array, jax.Array]:
        """Normed and rotated keys, and values, each [K, T, H], of x [T, D]."""
        k = v = _linear(x, self.k_proj, self.k_bias).reshape(-1, self.config.num_kv_heads, self.config.head_dim)
        if self.v_proj is not None:
            v = _linear(x, self.v_proj, self.v_bias).reshape(k.shape)
        if self.config.v_norm:
            v = rms_norm(v, None, self.config)
        return apply_rope(self._norm(k, self.k_norm), rope).transpose(1, 0, 2), v.transpose(1, 0, 2)

    def __call__(
        self, x: jax.Array, rope: Rope, segments: list[Segment], self_mask: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """One layer over T tokens.

        Args:
          x: [T, D] residual stream.
          rope: tables of the T positions.
          segments: earlier keys and values.
          self_mask: [T, T] bool, which of the T tokens see which.

        Returns:
          x [T, D], and the tokens' own keys and values, each [K, T, H].
        """
        scale = self.config.attention_scale
        scale = self.config.head_dim**-0.5 if scale is None else scale
        with jax.named_scope("attention"):
            normed = self._norm(x, self.input_norm)
            k, v = self.keys_values(normed, rope)
            out = attend(self.queries(normed, rope), [*segments, Segment(k, v, self_mask)], scale)
            out = _linear(out.reshape(x.shape[0], -1), self.o_proj, self.o_bias)
            x = x + self._norm(out, self.post_attention_norm)
        with jax.named_scope("mlp"):
            normed = self._norm(x, self.pre_mlp_norm)
            gated = ACTIVATIONS[self.config.activation](_linear(normed, self.gate_proj)) * _linear(normed, self.up_proj)
            x = x + self._norm(_linear(gated, self.down_proj), self.post_mlp_norm)
        if self.layer_scalar is not None:
            x = x * self.layer_scalar[...][None]
        return x, k, v

    def _norm(self, x: jax.Array, weight: nnx.Param | None) -> jax.Array:
        """x where the layer has no such norm."""
        return x if weight is None else rms_norm(x, weight[...], self.config)


def stack_layers(config: LayerConfig, num_layers: int, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> DecoderLayer:
    """`num_layers` layers as one module whose parameters have a leading axis [L]."""
    keys = jax.random.split(rngs(), num_layers)
    return jax.vmap(lambda key: DecoderLayer(config, dtype=dtype, rngs=nnx.Rngs(key)))(keys)


def _linear(x: jax.Array, weight: nnx.Param, bias: nnx.Param | None = None) -> jax.Array:
    y = jnp.einsum("td,fd->tf", x, weight[...])
    return y if bias is None else y + bias[...][None]
