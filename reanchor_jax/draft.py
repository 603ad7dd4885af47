"""Stage 1 of a round: draft the baseline block and all shifted blocks in one vmapped call."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from reanchor_jax.cache import KVCache
from reanchor_jax.config import DecodeConfig
from reanchor_jax.drafter import Drafter
from reanchor_jax.heads import DraftNoise
from reanchor_jax.pair import Pair
from reanchor_jax.schedule import schedule_blocks
from reanchor_jax.state import DecodeState


class Blocks(NamedTuple):
    """Drafted blocks; row d is g(d), row 0 the baseline."""

    tokens: jax.Array  # [A, B] int32, anchor first
    valid: jax.Array  # [A] bool
    lengths: jax.Array  # [A] int32 tokens that are worth verifying, anchor included; B without a schedule


def draft_blocks(pair: Pair, state: DecodeState, config: DecodeConfig, noise: jax.Array | None) -> Blocks:
    """Drafts g(0) .. g(A-1) (paper, algorithm 1, lines 1 to 9).

    Block d starts at position i + d from the anchor x~_{i+d} (d = 0: the committed anchor) and
    sees the committed context, d retained suffix states and itself. The committed context is
    shared by all blocks and the suffix's keys and values are computed once.

    Args:
      pair: target (for embedding and LM head) and drafter.
      state: committed context and retained suffix.
      config: how many offsets, and the draft rule.
      noise: [W, V] target noise; row r belongs to position i + 1 + r. Only `coupled` reads it.
    """
    drafter = pair.drafter
    assert drafter is not None
    block_size = drafter.config.block_size
    num_blocks = config.num_blocks(block_size)
    offsets = jnp.arange(num_blocks)
    suffix = _suffix_context(drafter, state, num_blocks - 1)

    anchors = jnp.concatenate([state.tokens[state.length][None], state.suffix.tokens[: num_blocks - 1]])
    num_slots = drafter.config.num_slots
    masks = jnp.full((num_blocks, num_slots - 1), drafter.config.mask_token_id, jnp.int32)
    x = drafter.head.embed(pair.target, jnp.concatenate([anchors[:, None], masks], axis=1))  # [A, T, D]

    def draft_one(x: jax.Array, offset: jax.Array) -> jax.Array:
        positions = state.length + offset + jnp.arange(num_slots)
        return drafter(x, positions, state.context, state.length, suffix, offset)

    hidden = jax.vmap(draft_one)(x, offsets)  # [A, T, D]
    drafts = drafter.head(pair.target, hidden, anchors, _draft_noise(pair, state, config, noise), config.draft_temp)
    return Blocks(
        tokens=jnp.concatenate([anchors[:, None], drafts.tokens], axis=1),
        valid=offsets <= state.suffix.count,
        lengths=schedule_blocks(drafts.confidence, num_blocks, block_size, config),
    )


def _suffix_context(drafter: Drafter, state: DecodeState, num_slots: int) -> KVCache:
    """Context keys and values of the first `num_slots` retained states."""
    positions = state.length + jnp.arange(num_slots)
    return drafter.context(state.suffix.features[:num_slots], positions)


def _draft_noise(pair: Pair, state: DecodeState, config: DecodeConfig, noise: jax.Array | None) -> DraftNoise:
    """The noise of the draft rule for all blocks."""
    assert pair.drafter is not None
    if config.draft_rule == "greedy":
        return DraftNoise()
    num_drafts = pair.drafter.config.block_size - 1
    num_blocks = config.num_blocks(num_drafts + 1)
    if config.draft_rule == "coupled" and noise is not None:
        # Draft k of block d stands at position i + d + k, k >= 1: noise row d + k - 1.
        return DraftNoise(gumbel=noise[jnp.arange(num_blocks)[:, None] + jnp.arange(num_drafts)[None, :]])
    key = jax.random.fold_in(draft_key(state.key), state.length)
    return DraftNoise(uniform=jax.random.uniform(key, (num_blocks, num_drafts), jnp.float32))


def draft_key(key: jax.Array) -> jax.Array:
    """Key of the drafter's own randomness, apart from every position of the target's."""
    return jax.random.fold_in(key, 2**32 - 1)
