"""Error-position replay: the drafter is scored on its own recorded proposals (paper, algorithm 4, lines 3 to 10).

The drafter drafts again from a recorded block's start, now with a gradient, and the target says
what it would have chosen behind every prefix of the proposal, rejected ones included. Accepted
drafts pull the drafter towards all that the target holds possible (forward KL), discarded ones away
from what the target holds impossible (reverse KL).
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from reanchor_jax.cache import init_target_cache
from reanchor_jax.drafter import Drafter
from reanchor_jax.target import Target
from reanchor_jax.training.blocks import block_hidden
from reanchor_jax.training.loss import Factors, draft_logits, from_chunks, in_chunks, make_factors, make_vocab
from reanchor_jax.training.optimizer import OptimizerConfig, make_optimizer, update
from reanchor_jax.training.rollout import Rollout
from reanchor_jax.training.step import TrainState
from reanchor_jax.training.trainable import computing, freeze, is_trained


class Replay(NamedTuple):
    """Recorded blocks of one step, K of each text."""

    tokens: Any  # [R, T] int32 texts
    starts: Any  # [R, K] int32 anchors' positions
    proposals: Any  # [R, K, B-1] int32
    accepted: Any  # [R, K] int32
    scored: Any  # [R, K] int32, as in `Rollout`; 0 for a block that does not exist


def sample_blocks(rollout: Rollout, num_blocks: int, rng: np.random.Generator) -> Replay:
    """K blocks of each text, drawn without replacement; all of them where there are no more."""
    num_rows, num_drafts = rollout.tokens.shape[0], rollout.proposals.shape[1]
    starts, accepted, scored = (np.zeros((num_rows, num_blocks), np.int32) for _ in range(3))
    proposals = np.zeros((num_rows, num_blocks, num_drafts), np.int32)
    for row in range(num_rows):
        own = np.flatnonzero(rollout.rows == row)
        chosen = np.sort(rng.permutation(own)[:num_blocks])
        count = len(chosen)
        starts[row, :count], proposals[row, :count] = rollout.starts[chosen], rollout.proposals[chosen]
        accepted[row, :count], scored[row, :count] = rollout.accepted[chosen], rollout.scored[chosen]
    return Replay(rollout.tokens, starts, proposals, accepted, scored)


class TargetStates(NamedTuple):
    """What the target makes of one text and K proposals."""

    features: jax.Array  # [T, C*D] of the text
    hidden: jax.Array  # [K, B-1, D] of which it predicts draft k, given the anchor and drafts 1 .. k-1


def target_states(
    target: Target, tokens: jax.Array, starts: jax.Array, proposals: jax.Array, tap_ids: tuple[int, ...]
) -> TargetStates:
    """One forward over the text with all proposals as branches of it.

    Example, B = 4, block at 7: its drafts 1 and 2 are appended at positions 8 and 9 and see the
    text up to position 7, and each other in order. Draft 1 is predicted at the anchor, 2 at draft 1,
    3 at draft 2; nothing is predicted at draft 3, which stays out.

    Args:
      target: frozen.
      tokens: [T] int32 text.
      starts: [K] int32 positions of the blocks' anchors.
      proposals: [K, B-1] int32.
      tap_ids: static layers whose outputs are the features.
    """
    size, (num_blocks, num_drafts) = tokens.shape[0], proposals.shape
    depths = jnp.arange(1, num_drafts)
    branches = (starts[:, None] + depths[None, :]).reshape(-1)
    positions = jnp.concatenate([jnp.arange(size), branches])
    last_text = jnp.concatenate([jnp.arange(size), jnp.repeat(starts, num_drafts - 1)])
    block = jnp.concatenate([jnp.full(size, -1), jnp.repeat(jnp.arange(num_blocks), num_drafts - 1)])
    sees_text = positions[None, :] <= last_text[:, None]
    sees_own = (block[None, :] == block[:, None]) & (positions[None, :] <= positions[:, None])
    mask = jnp.where(block[None, :] < 0, sees_text, sees_own)
    output = target(
        jnp.concatenate([tokens, proposals[:, :-1].reshape(-1)]),
        positions,
        init_target_cache(target.config, 0, target.dtype),
        jnp.int32(0),
        mask,
        tap_ids,
    )
    behind = output.hidden[size:].reshape(num_blocks, num_drafts - 1, output.hidden.shape[1])
    return TargetStates(output.features[:size], jnp.concatenate([output.hidden[starts][:, None], behind], axis=1))


def divergence(p_logits: jax.Array, q_logits: jax.Array, forward: jax.Array) -> jax.Array:
    """KL(p || q) where `forward` [n], else KL(q || p): [n] f32 of logits [n, V] each, at temperature 1."""
    p, q = jax.nn.log_softmax(p_logits), jax.nn.log_softmax(q_logits)
    return jnp.sum(jnp.where(forward[:, None], jnp.exp(p), -jnp.exp(q)) * (p - q), axis=-1)


def divergences(factors: Factors, target: Target, target_hidden: jax.Array, forward: jax.Array) -> jax.Array:
    """`divergence` of the target's and the drafter's distributions, [n] f32.

    Logits exist for a chunk of drafts at a time; the gradient computes them again.

    Args:
      factors: n drafts.
      target: frozen.
      target_hidden: [n, D] what the target predicts them of.
      forward: [n] bool.
    """
    chunks, count = in_chunks(factors.hidden, factors.extra, target_hidden, forward)

    @jax.checkpoint
    def of_chunk(chunk):
        hidden, extra, target_hidden, forward = chunk
        return divergence(target.logits(target_hidden), draft_logits(factors, hidden, extra)[0], forward)

    return from_chunks(jax.lax.map(of_chunk, chunks), count)


def discard_weights(block_size: int, gamma: float) -> jax.Array:
    """Weights gamma^(k - 1) of drafts k = 1 .. B-1, [B-1] float32: the paper's w_{i,j} with j = i + k."""
    return jnp.float32(gamma) ** jnp.arange(block_size - 1, dtype=jnp.float32)


def replay_loss(
    drafter: Drafter,
    target: Target,
    replay: Replay,
    states: TargetStates,
    *,
    gamma: float,
    freeze_backbone: bool = False,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Half the sum of ForwardKL over accepted drafts and ReverseKL over discarded ones, () f32; and what to log.

    ForwardKL is a mean, ReverseKL a mean weighted by `discard_weights`, both over all blocks. The
    first rejection is discarded like all behind it. A group without drafts contributes zero.

    Args:
      drafter: the network in training; the only argument that a gradient is wanted for.
      target: frozen.
      replay: R texts with K blocks each.
      states: of the R texts, [R, ...] each; constants.
      gamma: decay of the weights, above 0 and at most 1 (static).
      freeze_backbone: train the head alone (static).
    """
    drafter = freeze(computing(drafter, target.dtype), freeze_backbone)
    num_drafts = replay.proposals.shape[-1]
    hidden = jax.vmap(partial(block_hidden, target, drafter))(replay.tokens, states.features, replay.starts)
    anchors = jnp.take_along_axis(replay.tokens, replay.starts, axis=1)
    before = jnp.concatenate([anchors[..., None], replay.proposals[..., :-1]], axis=-1)  # [R, K, B-1]
    hidden, before, target_hidden = (x.reshape(-1, *x.shape[2:]) for x in (hidden, before, states.hidden))
    factors = make_factors(drafter.head.force(target, hidden, before), make_vocab(target.config.vocab_size, None))

    slots = jnp.arange(num_drafts)[None, :]
    scored = slots < replay.scored.reshape(-1, 1)  # [R*K, B-1]
    accepted = scored & (slots < replay.accepted.reshape(-1, 1))
    discarded = scored & ~accepted
    rows = target_hidden.reshape(-1, target_hidden.shape[-1])
    kl = divergences(factors, target, rows, accepted.reshape(-1)).reshape(scored.shape)

    weights = jnp.where(discarded, discard_weights(num_drafts + 1, gamma)[None], 0.0)
    num_accepted = jnp.sum(accepted).astype(jnp.float32)
    forward = jnp.sum(jnp.where(accepted, kl, 0.0)) / jnp.maximum(num_accepted, 1.0)
    total = jnp.sum(weights)
    # Not max(total, tiny): a small gamma may make all weights small.
    reverse = jnp.sum(weights * kl) / jnp.where(total > 0, total, 1.0)
    loss = (forward + reverse) / 2
    share = num_accepted / jnp.maximum(jnp.sum(scored), 1).astype(jnp.float32)
    return loss, {"loss": loss, "forward_kl": forward, "reverse_kl": reverse, "accepted_share": share}


@partial(jax.jit, static_argnames="tap_ids")
def replay_states(target: Target, replay: Replay, scale: jax.Array, *, tap_ids: tuple[int, ...]) -> TargetStates:
    """`target_states` of R texts, [R, ...] each; features are divided by the scale [C*D]."""
    states = jax.vmap(partial(target_states, target, tap_ids=tap_ids))(replay.tokens, replay.starts, replay.proposals)
    return states._replace(features=states.features.astype(jnp.float32) / scale[None, None])


@partial(jax.jit, static_argnames=("optimizer", "gamma", "freeze_backbone"), donate_argnames="state")
def replay_step(
    state: TrainState,
    target: Target,
    replay: Replay,
    states: TargetStates,
    *,
    optimizer: OptimizerConfig,
    gamma: float,
    freeze_backbone: bool = False,
) -> tuple[TrainState, dict[str, jax.Array]]:
    """One optimizer step, and what to log of it; arguments as in `replay_loss`. The state is donated."""
    loss_of = partial(replay_loss, gamma=gamma, freeze_backbone=freeze_backbone)
    (_, seen), gradient = jax.value_and_grad(loss_of, has_aux=True)(state.drafter, target, replay, states)
    transform = make_optimizer(optimizer, is_trained(state.drafter, freeze_backbone))
    drafter, opt_state = update(transform, gradient, state.opt_state, state.drafter)
    return TrainState(drafter, opt_state), seen
