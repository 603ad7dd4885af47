"""The target's features of every batch, scaled per dimension, kept in memory where they fit.

Residual streams have a few massive dimensions (SmolLM2: norms of 25,000 beside 400). Adam moves
every weight by about the learning rate, so on raw features the weights behind such a dimension
would jump and the others hardly move. Training therefore sees `features / scale` with
`fc * scale`, which is the same function, and a drafter is exported with `fc / scale`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx

from reanchor_jax.drafter import Drafter
from reanchor_jax.target import Target
from reanchor_jax.training.blocks import text_features
from reanchor_jax.training.loss import Batch

SCALE_BATCHES = 4
"""Batches that the scale is measured on."""


class FeatureSource:
    """Features of the batches of one run: the target forward, remembered up to a budget.

    Remembered or computed again, the features of a batch are the same bits.
    """

    def __init__(self, target: Target, tap_ids: tuple[int, ...], dtype: str, budget_bytes: int):
        self._target = target
        self._dtype: Any = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float32
        self._left = budget_bytes
        self._kept: dict[int, np.ndarray] = {}
        self._raw = jax.jit(lambda target, tokens: jax.vmap(lambda row: text_features(target, row, tap_ids))(tokens))
        self._scaled = jax.jit(
            lambda target, tokens, scale: (
                jax.vmap(lambda row: text_features(target, row, tap_ids))(tokens) / scale[None, None]
            ).astype(self._dtype)
        )
        width = len(tap_ids) * target.config.layer.hidden_size
        self.scale = jnp.ones(width, jnp.float32)

    def measure_scale(self, batches: Sequence[Batch]) -> None:
        """Sets the scale to each dimension's root mean square over some batches."""
        total, count = np.zeros(self.scale.shape[0]), 0
        for batch in batches[:: -(-len(batches) // SCALE_BATCHES)]:
            rows = np.asarray(self._raw(self._target, batch.tokens), np.float64)
            real = np.arange(rows.shape[1])[None, :] < batch.lengths[:, None]
            total += np.sum(np.where(real[..., None], rows**2, 0.0), axis=(0, 1))
            count += int(real.sum())
        self.scale = jnp.asarray(np.sqrt(total / max(count, 1)) + 1e-6, jnp.float32)

    def __call__(self, index: int | None, batch: Batch) -> Any:
        """Scaled features [R, T, C*D] of batch `index` (None: do not remember)."""
        if index is not None and index in self._kept:
            return self._kept[index]
        features = np.asarray(self._scaled(self._target, batch.tokens, self.scale))
        if index is not None and features.nbytes <= self._left:
            self._left -= features.nbytes
            self._kept[index] = features
        return features


def fold_scale(drafter: Drafter, scale: jax.Array) -> Drafter:
    """The same drafter with `fc * scale`: as training sees it (or back, with `1 / scale`)."""
    folded = jax.tree.map(lambda x: jnp.array(x, copy=True), drafter)
    folded.fc = nnx.Param(drafter.fc[...] * scale[None, :])
    return folded
