"""Position-decayed cross entropy of training blocks; a confidence learns which drafts are right.

What a draft should be is the text's token, or in part the target's distribution there
(distillation): in between, a share `distill` of the label belongs to the target's top tokens.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from reanchor_jax.drafter import Drafter
from reanchor_jax.heads import Forced
from reanchor_jax.target import Target, softcap
from reanchor_jax.training.blocks import Batch, random_blocks
from reanchor_jax.training.features import TextFeatures, TopTokens
from reanchor_jax.training.mesh import num_data_parts
from reanchor_jax.training.trainable import computing, freeze

CHUNK_ROWS = 512
"""Drafts whose logits exist at the same time: 512 x 49,152 float32 are 100 MB."""


class Vocab(NamedTuple):
    """The tokens that training scores, most often the most frequent ones alone."""

    ids: jax.Array | None  # [V'] int32; None: all
    index: jax.Array  # [V] int32: token -> its place in `ids`, -1 where it has none


def make_vocab(vocab_size: int, token_ids: np.ndarray | None) -> Vocab:
    """The vocabulary restricted to `token_ids` [V'] (None: all of it)."""
    if token_ids is None:
        return Vocab(None, jnp.arange(vocab_size, dtype=jnp.int32))
    index = np.full(vocab_size, -1, np.int32)
    index[token_ids] = np.arange(len(token_ids))
    return Vocab(jnp.asarray(token_ids, jnp.int32), jnp.asarray(index))


class Factors(NamedTuple):
    """n drafts whose logits over V' tokens are `softcap(hidden @ rows.T) + extra @ extra_rows.T`."""

    hidden: jax.Array  # [n, D]
    rows: jax.Array  # [V', D] a constant
    extra: jax.Array  # [n, E]
    extra_rows: jax.Array  # [V', E]
    cap: Any = None  # of the softcap, a number; None: there is none


def make_factors(forced: Forced, vocab: Vocab) -> Factors:
    """All drafts of some blocks in one row, scored on the vocabulary of training."""

    def kept(rows: jax.Array) -> jax.Array:
        return rows if vocab.ids is None else rows[vocab.ids]

    rows, extra_rows = kept(forced.rows), kept(forced.extra_rows)
    return Factors(_flat(forced.hidden), rows, _flat(forced.extra), extra_rows, forced.cap)


def draft_logits(factors: Factors, hidden: jax.Array, extra: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Float32 logits [n, V'] of some drafts, [n, D] and [n, E]; and the part that is under the softcap."""
    base = jnp.einsum("nd,vd->nv", hidden, factors.rows, preferred_element_type=jnp.float32)
    base = softcap(base, factors.cap)
    if not extra.shape[1]:
        return base, base
    return base + jnp.einsum("ne,ve->nv", extra, factors.extra_rows, preferred_element_type=jnp.float32), base


class Labels(NamedTuple):
    """What n drafts should be: shares of 1 over m tokens. The first token is the text's."""

    ids: jax.Array  # [n, m] int32 in 0 .. V'-1
    shares: jax.Array  # [n, m] f32


def hard_labels(ids: jax.Array) -> Labels:
    """The text's tokens [n] alone."""
    return Labels(ids[:, None], jnp.ones((ids.shape[0], 1), jnp.float32))


def soft_labels(ids: jax.Array, top: TopTokens, distill: float) -> Labels:
    """The text's tokens [n], and a share `distill` for the target's k top ones, [n, k] each.

    Top tokens outside the vocabulary of training (id -1) are left out, the others' probabilities are
    raised to sum to 1. Example, half of the label being the target's: text 5, top tokens 5, 9, -1
    with 0.6, 0.2, 0.1: shares 0.5 of token 5, and again 0.375 of 5 and 0.125 of 9. Where no top
    token is left, all is the text's.
    """
    probs = jnp.where(top.ids >= 0, top.probs, 0.0)
    total = jnp.sum(probs, axis=1, keepdims=True)
    soft = distill * probs / jnp.maximum(total, 1e-6)
    shares = jnp.concatenate([1.0 - jnp.sum(soft, axis=1, keepdims=True), soft], axis=1)
    return Labels(jnp.concatenate([ids[:, None], jnp.maximum(top.ids, 0)], axis=1), shares)


class Scores(NamedTuple):
    """How well n drafts are predicted."""

    losses: jax.Array  # [n] f32 -log softmax(logits)[label]
    right: jax.Array  # [n] bool, whether the label has the highest logit


def score(factors: Factors, labels: jax.Array) -> Scores:
    """Scores of labels [n] in 0 .. V'-1, a chunk of drafts at a time."""
    chunks, count = in_chunks(factors.hidden, factors.extra, labels)

    def score_chunk(chunk):
        hidden, extra, labels = chunk
        _, _, log_total, at_labels, right = _score_chunk(factors, hidden, extra, hard_labels(labels))
        return log_total - at_labels, right

    return Scores(*(from_chunks(x, count) for x in jax.lax.map(score_chunk, chunks)))


@jax.custom_vjp
def cross_entropy(factors: Factors, labels: Labels, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Sum of weights x losses, () f32, and which of the texts' tokens have the highest logit, [n] f32 0 or 1.

    Its gradient is formed chunk by chunk beside the loss, since both need the same logits: at no
    time do the logits of all drafts exist, and none are computed twice. That is why the weights
    come in here. Only the sum has a gradient, and `rows` gets none.

    Args:
      factors: n drafts.
      labels: what each should be; constants.
      weights: [n] f32; constants.
    """
    return _forward(factors, labels, weights)[0]


def _forward(factors: Factors, labels: Labels, weights: jax.Array):
    chunks, count = in_chunks(factors.hidden, factors.extra, *labels, weights)

    def score_chunk(carry, chunk):
        total, extra_rows_gradient = carry
        hidden, extra, ids, shares, weights = chunk
        logits, base, log_total, at_labels, right = _score_chunk(factors, hidden, extra, Labels(ids, shares))
        # d loss / d logits = weight (softmax - shares of the labels).
        gradient = jnp.exp(logits - log_total[:, None]).at[jnp.arange(ids.shape[0])[:, None], ids].add(-shares)
        gradient = gradient * weights[:, None]
        # A softcap passes on 1 - tanh^2 of it.
        slope = 1.0 if factors.cap is None else 1 - (base / factors.cap) ** 2
        hidden_gradient = jnp.einsum("nv,vd->nd", (gradient * slope).astype(hidden.dtype), factors.rows)
        gradient = gradient.astype(extra.dtype)
        extra_gradient = jnp.einsum("nv,ve->ne", gradient, factors.extra_rows)
        extra_rows_gradient += jnp.einsum("nv,ne->ve", gradient, extra, preferred_element_type=jnp.float32)
        total += jnp.sum((log_total - at_labels) * weights)
        return (total, extra_rows_gradient), (hidden_gradient, extra_gradient, right)

    start = (jnp.float32(0), jnp.zeros(factors.extra_rows.shape, jnp.float32))  # summed over chunks: float32
    (total, extra_rows_gradient), per_draft = jax.lax.scan(score_chunk, start, chunks)
    hidden_gradient, extra_gradient, right = (from_chunks(x, count) for x in per_draft)
    extra_rows_gradient = extra_rows_gradient.astype(factors.extra_rows.dtype)
    return (total, right.astype(jnp.float32)), (hidden_gradient, extra_gradient, extra_rows_gradient)


def _backward(gradients: tuple[jax.Array, jax.Array, jax.Array], cotangents: tuple[jax.Array, jax.Array]):
    hidden, extra, extra_rows = (gradient * cotangents[0].astype(gradient.dtype) for gradient in gradients)
    return Factors(hidden, None, extra, extra_rows, None), None, None  # pyright: ignore[reportArgumentType]


cross_entropy.defvjp(_forward, _backward)


def _score_chunk(factors: Factors, hidden: jax.Array, extra: jax.Array, labels: Labels):
    """`draft_logits` of a chunk, their log-sum-exp, their mean over the labels' shares, and `Scores.right`."""
    logits, base = draft_logits(factors, hidden, extra)
    at_labels = jnp.sum(jnp.take_along_axis(logits, labels.ids, axis=1) * labels.shares, axis=1)
    right = jnp.argmax(logits, axis=-1) == labels.ids[:, 0]
    return logits, base, jax.nn.logsumexp(logits, axis=-1), at_labels, right


def in_chunks(*arrays: jax.Array) -> tuple[tuple[jax.Array, ...], int]:
    """Arrays [n, ...] as chunks [c, CHUNK_ROWS or fewer, ...] of drafts, and n; `from_chunks` is the way back.

    Example: 1,200 drafts become three chunks of 512, the last one padded with zeros. Where the drafts
    lie on several devices, a chunk has CHUNK_ROWS of each, so that all work on every chunk: 1,200
    drafts on two devices become two chunks of 600, drafts 0 .. 299 and 600 .. 899 and then the rest.
    """
    count, parts = arrays[0].shape[0], num_data_parts()
    own = -(-count // parts)  # drafts of a device
    chunks = -(-own // CHUNK_ROWS)
    size = min(own, CHUNK_ROWS) if parts == 1 else -(-own // chunks)

    def split(x: jax.Array) -> jax.Array:
        padded = jnp.pad(x, [(0, parts * chunks * size - count)] + [(0, 0)] * (x.ndim - 1))
        by_part = padded.reshape(parts, chunks, size, *x.shape[1:])
        return by_part.swapaxes(0, 1).reshape(chunks, parts * size, *x.shape[1:])

    return tuple(split(x) for x in arrays), count


def from_chunks(x: jax.Array, count: int) -> jax.Array:
    """Chunks [c, size, ...] of `in_chunks` as [n, ...] again."""
    parts = num_data_parts()
    by_part = x.reshape(x.shape[0], parts, x.shape[1] // parts, *x.shape[2:]).swapaxes(0, 1)
    return _flat(_flat(by_part))[:count]


def _flat(x: jax.Array) -> jax.Array:
    """The first two axes in one. (-1 would not do: the extra width may be 0.)"""
    return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])


def _by_text(x: jax.Array, batch: Batch) -> jax.Array:
    """Rows of R*K blocks as [R, K, ...]."""
    return x.reshape(batch.tokens.shape[0], -1, *x.shape[1:])


def nothing_wrong_before(right: jax.Array) -> jax.Array:
    """1 where all drafts of the block before this one are right, [n, B-1] of `right` [n, B-1], 0 or 1.

    Example: right 1 1 0 1 gives 1 1 1 0.
    """
    before = jnp.concatenate([jnp.ones_like(right[:, :1]), right[:, :-1]], axis=1)
    return jnp.cumprod(before, axis=1)


def position_weights(block_size: int, gamma: float) -> jax.Array:
    """Weights exp(-(k - 1) / gamma) of drafts k = 1 .. B-1, [B-1] float32.

    A draft counts only where all drafts before it are right, so early ones matter more.
    """
    return jnp.exp(-jnp.arange(block_size - 1, dtype=jnp.float32) / gamma)


def block_loss(
    drafter: Drafter,
    target: Target,
    vocab: Vocab,
    batch: Batch,
    text: TextFeatures,
    key: jax.Array,
    *,
    num_anchors: int,
    gamma: float,
    distill: float = 0.0,
    freeze_backbone: bool = False,
) -> jax.Array:
    """Weighted mean cross entropy over random blocks of a batch, () float32.

    Labels outside `vocab`, and those behind the text's end, have weight 0. Where the head has a
    confidence, the weighted mean of its cross entropy is added, over the drafts that decoding asks
    it about: those with nothing wrong before them. Is the top token the text's? (A label outside
    `vocab` is a draft that is never right.)

    Args:
      drafter: the network in training; the only argument that a gradient is wanted for.
      target: frozen.
      vocab: tokens that are scored.
      batch: R texts.
      text: the target's forward over the texts, constants; `top` is used where `distill` is not 0.
      key: PRNG key of the anchors.
      num_anchors: K anchors a text (static).
      gamma: decay of the weights (static).
      distill: share of each label that is the target's distribution (static).
      freeze_backbone: train the head alone (static).
    """
    drafter = freeze(computing(drafter, target.dtype), freeze_backbone)
    forced, labels, valid, places = random_blocks(target, drafter, batch, text.features, key, num_anchors)
    labels = vocab.index[labels]  # [R*K, B-1]
    scored = valid & (labels >= 0)

    def mean_weights(of: jax.Array) -> jax.Array:
        weights = jnp.where(of, position_weights(drafter.config.block_size, gamma)[None], 0.0)
        return weights / jnp.maximum(jnp.sum(weights), 1e-6)

    wanted = hard_labels(jnp.maximum(labels, 0).reshape(-1))
    if distill:
        # What the target says of the token at a place stands at the place before it.
        top = jax.vmap(lambda rows, at: jax.tree.map(lambda x: x[at], rows))(text.top, _by_text(places, batch) - 1)
        top = TopTokens(vocab.index[_flat(_flat(top.ids))], _flat(_flat(top.probs)))
        wanted = soft_labels(wanted.ids[:, 0], top, distill)
    loss, right = cross_entropy(make_factors(forced, vocab), wanted, mean_weights(scored).reshape(-1))
    if forced.confidence is not None:
        logits, right = forced.confidence, jnp.where(scored, right.reshape(labels.shape), 0.0)
        asked = valid & (nothing_wrong_before(right) > 0)
        loss += jnp.sum(mean_weights(asked) * (jax.nn.softplus(logits) - right * logits))
    return loss
