"""Position-decayed cross entropy of training blocks under the target's frozen LM head."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from reanchor_jax.drafter import Drafter
from reanchor_jax.target import Target
from reanchor_jax.training.blocks import Batch, random_blocks

CHUNK_ROWS = 512
"""Rows whose logits exist at the same time: 512 x 49,152 float32 are 100 MB."""


class Head(NamedTuple):
    """The rows of the LM head that training scores, most often the most frequent tokens alone."""

    rows: jax.Array  # [V', D]
    index: jax.Array  # [V] int32: token -> its row, -1 where it has none


def make_head(target: Target, token_ids: np.ndarray | None) -> Head:
    """The LM head restricted to `token_ids` [V'] (None: the whole vocabulary)."""
    weights = (target.embedding if target.lm_head is None else target.lm_head)[...]
    if token_ids is None:
        return Head(weights, jnp.arange(target.config.vocab_size, dtype=jnp.int32))
    index = np.full(target.config.vocab_size, -1, np.int32)
    index[token_ids] = np.arange(len(token_ids))
    return Head(weights[jnp.asarray(token_ids)], jnp.asarray(index))


@jax.custom_vjp
def head_cross_entropy(hidden: jax.Array, rows: jax.Array, labels: jax.Array) -> jax.Array:
    """-log softmax(hidden @ rows.T)[label], [n] float32; the head is a constant.

    The gradient is formed chunk by chunk beside the loss, since both need the same logits: at no
    time do the logits of all rows exist, and none are computed twice.

    Args:
      hidden: [n, D] drafter features.
      rows: [V', D] head.
      labels: [n] int32 in 0 .. V'-1.
    """
    return in_chunks(_chunk_loss, hidden, rows, labels)


def _forward(hidden: jax.Array, rows: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    return in_chunks(_chunk_loss_and_gradient, hidden, rows, labels)


def _backward(gradient: jax.Array, cotangent: jax.Array) -> tuple[jax.Array, None, None]:
    return (gradient * cotangent[:, None]).astype(gradient.dtype), None, None


head_cross_entropy.defvjp(_forward, _backward)


def _chunk_loss(hidden: jax.Array, rows: jax.Array, labels: jax.Array) -> jax.Array:
    logits = jnp.einsum("nd,vd->nv", hidden, rows, preferred_element_type=jnp.float32)
    return jax.nn.logsumexp(logits, axis=-1) - jnp.take_along_axis(logits, labels[:, None], axis=1)[:, 0]


def _chunk_loss_and_gradient(hidden: jax.Array, rows: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    logits = jnp.einsum("nd,vd->nv", hidden, rows, preferred_element_type=jnp.float32)
    log_total = jax.nn.logsumexp(logits, axis=-1)
    at_label = jnp.take_along_axis(logits, labels[:, None], axis=1)[:, 0]
    # d loss / d hidden = sum_v p_v rows_v - rows_label
    probs = jnp.exp(logits - log_total[:, None]).astype(rows.dtype)
    gradient = jnp.einsum("nv,vd->nd", probs, rows) - rows[labels]
    return log_total - at_label, gradient.astype(hidden.dtype)


def in_chunks(run: Any, hidden: jax.Array, rows: jax.Array, labels: jax.Array) -> Any:
    """`run(hidden, rows, labels)`, which works row by row, over `CHUNK_ROWS` rows at a time.

    Example: 1,200 rows become three chunks of 512, the last one padded; the padding's results are dropped.
    """
    count = hidden.shape[0]
    if count <= CHUNK_ROWS:
        return run(hidden, rows, labels)
    chunks = -(-count // CHUNK_ROWS)
    padding = chunks * CHUNK_ROWS - count
    hidden = jnp.pad(hidden, ((0, padding), (0, 0))).reshape(chunks, CHUNK_ROWS, -1)
    labels = jnp.pad(labels, (0, padding)).reshape(chunks, CHUNK_ROWS)
    out = jax.lax.map(lambda chunk: run(chunk[0], rows, chunk[1]), (hidden, labels))
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:count], out)


def position_weights(block_size: int, gamma: float) -> jax.Array:
    """Weights exp(-(k - 1) / gamma) of drafts k = 1 .. B-1, [B-1] float32.

    A draft counts only where all drafts before it are right, so early ones matter more.
    """
    return jnp.exp(-jnp.arange(block_size - 1, dtype=jnp.float32) / gamma)


def block_loss(
    drafter: Drafter,
    target: Target,
    head: Head,
    batch: Batch,
    features: jax.Array,
    key: jax.Array,
    *,
    num_anchors: int,
    gamma: float,
) -> jax.Array:
    """Weighted mean cross entropy over random blocks of a batch, () float32.

    Labels without a row in `head`, and those behind the text's end, have weight 0.

    Args:
      drafter: the network in training; the only argument that a gradient is wanted for.
      target: frozen.
      head: LM head of training.
      batch: R texts.
      features: [R, T, C*D] the target's features of the texts; a constant.
      key: PRNG key of the anchors.
      num_anchors: K anchors a text (static).
      gamma: decay of the weights (static).
    """
    hidden, labels, valid = random_blocks(target, drafter, batch, features, key, num_anchors)
    labels = head.index[labels]  # [R, K, B-1]
    weights = position_weights(drafter.config.block_size, gamma)[None, None]
    weights = jnp.where(valid & (labels >= 0), weights, 0.0)
    losses = head_cross_entropy(
        hidden.reshape(-1, hidden.shape[-1]), head.rows, jnp.maximum(labels, 0).reshape(-1)
    ).reshape(weights.shape)
    return jnp.sum(losses * weights) / jnp.maximum(jnp.sum(weights), 1e-6)
