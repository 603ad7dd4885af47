"""The target's features of every batch, scaled per dimension, kept in memory where they fit.

Residual streams have a few massive dimensions (SmolLM2: norms of 25,000 beside 400). Adam moves
every weight by about the learning rate, so on raw features the weights behind such a dimension
would jump and the others hardly move. Training therefore sees `features / scale` with
`fc * scale`, which is the same function, and a drafter is exported with `fc / scale`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from reanchor_jax.drafter import Drafter
from reanchor_jax.target import Target, forward_text
from reanchor_jax.training.blocks import Batch

SCALE_BATCHES = 4
"""Batches that the scale is measured on."""


@partial(jax.jit, static_argnames=("tap_ids", "dtype"))
def scaled_features(
    target: Target, tokens: jax.Array, scale: jax.Array, *, tap_ids: tuple[int, ...], dtype: str
) -> jax.Array:
    """The target's features [R, T, C*D] of texts [R, T], divided by the scale [C*D]."""
    features = jax.vmap(lambda row: forward_text(target, row, tap_ids).features)(tokens)
    return (features / scale[None, None]).astype(dtype)


class FeatureSource:
    """Features of the batches of one run: the target forward, remembered up to a budget.

    Remembered or computed again, the features of a batch are the same bits.
    """

    def __init__(self, target: Target, tap_ids: tuple[int, ...], dtype: str, budget_bytes: int):
        self._target, self._tap_ids, self._dtype = target, tap_ids, dtype
        self._left = budget_bytes
        self._kept: dict[int, np.ndarray] = {}
        width = len(tap_ids) * target.config.layer.hidden_size
        self.scale = jnp.ones(width, jnp.float32)

    def measure_scale(self, batches: Sequence[Batch]) -> None:
        """Sets the scale to each dimension's root mean square over some batches."""
        total, count = np.zeros(self.scale.shape[0]), 0
        for batch in batches[:: -(-len(batches) // SCALE_BATCHES)]:
            rows = np.asarray(self._compute(batch, "float32"), np.float64)
            real = np.arange(rows.shape[1])[None, :] < batch.lengths[:, None]
            total += np.sum(np.where(real[..., None], rows**2, 0.0), axis=(0, 1))
            count += int(real.sum())
        self.scale = jnp.asarray(np.sqrt(total / max(count, 1)) + 1e-6, jnp.float32)

    def __call__(self, index: int | None, batch: Batch) -> Any:
        """Scaled features [R, T, C*D] of batch `index` (None: do not remember)."""
        if index is not None and index in self._kept:
            return self._kept[index]
        features = np.asarray(self._compute(batch, self._dtype))
        if index is not None and features.nbytes <= self._left:
            self._left -= features.nbytes
            self._kept[index] = features
        return features

    def _compute(self, batch: Batch, dtype: str) -> jax.Array:
        return scaled_features(self._target, batch.tokens, self.scale, tap_ids=self._tap_ids, dtype=dtype)


def fold_scale(drafter: Drafter, scale: jax.Array) -> Drafter:
    """The same drafter with `fc * scale`: as training sees it (or back, with `1 / scale`)."""
    folded = jax.tree.map(lambda x: jnp.array(x, copy=True), drafter)
    folded.fc = nnx.Param(drafter.fc[...] * scale[None, :])
    return folded
