"""Position-wise calibration of a confidence: one temperature for each draft of the block.

A schedule multiplies confidences, so what they claim should be what happens. Division of the logits
by a temperature, fitted on held-out texts under greedy drafting, takes over- and underconfidence away
and keeps the order of drafts; a confidence that is wrong in its sign it cannot mend.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from reanchor_jax.config import DSparkConfig
from reanchor_jax.drafter import Drafter
from reanchor_jax.target import Target
from reanchor_jax.training.blocks import Batch, random_blocks
from reanchor_jax.training.loss import Vocab, make_factors, nothing_wrong_before, score
from reanchor_jax.training.trainable import computing

CANDIDATES = np.geomspace(0.1, 10.0, 201)
"""Temperatures that are tried."""
LEAST_DRAFTS = 50
"""Drafts of a position below which its temperature stays 1."""


class Outcomes(NamedTuple):
    """Drafts of n blocks: what the confidence said and what happened."""

    logits: Any  # [n, B-1] f32
    right: Any  # [n, B-1] bool
    asked: Any  # [n, B-1] bool: the draft exists and all before it are right


@partial(jax.jit, static_argnames="num_anchors")
def outcomes(
    drafter: Drafter, target: Target, vocab: Vocab, batch: Batch, features: jax.Array, key: jax.Array,
    *, num_anchors: int,
) -> Outcomes:  # fmt: skip
    """Outcomes of random blocks; arguments as in `block_loss`, `vocab` being the whole one."""
    drafter = computing(drafter, target.dtype)
    forced, labels, valid, _ = random_blocks(target, drafter, batch, features, key, num_anchors)
    assert forced.confidence is not None
    right = score(make_factors(forced, vocab), labels.reshape(-1)).right.reshape(labels.shape) & valid
    return Outcomes(forced.confidence, right, valid & (nothing_wrong_before(right.astype(jnp.int32)) > 0))


def fit_temperatures(seen: Outcomes) -> tuple[float, ...]:
    """For each draft the temperature of least cross entropy, [B-1]; 1 where too few were asked for."""
    temperatures = []
    for logits, right, asked in zip(*(np.asarray(x).T for x in seen), strict=True):
        scaled = logits[asked][None, :].astype(float) / CANDIDATES[:, None]
        losses = np.mean(np.logaddexp(0, scaled) - right[asked][None, :] * scaled, axis=1) if asked.any() else [0.0]
        enough = asked.sum() >= LEAST_DRAFTS
        temperatures.append(float(np.round(CANDIDATES[np.argmin(losses)], 4)) if enough else 1.0)
    return tuple(temperatures)


def with_temperatures(drafter: Drafter, temperatures: tuple[float, ...]) -> Drafter:
    """The same weights under a calibrated confidence."""
    assert isinstance(drafter.config.head, DSparkConfig)
    head = dataclasses.replace(drafter.config.head, confidence_temperatures=temperatures)
    config = dataclasses.replace(drafter.config, head=head)
    like = jax.eval_shape(lambda: Drafter(config, dtype=jnp.float32, rngs=nnx.Rngs(0)))
    return jax.tree.unflatten(jax.tree.structure(like), jax.tree.leaves(drafter))
