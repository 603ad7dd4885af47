"""The whole generation in one call: prefill, then rounds until EOS or the limit."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from reanchor_jax.config import DecodeConfig
from reanchor_jax.decode import decode_round
from reanchor_jax.pair import Pair, block_size, check_config
from reanchor_jax.prefill import prefill
from reanchor_jax.sampling import TokenLogprobs
from reanchor_jax.state import DecodeState, RoundRecord


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RoundCounts:
    """One number per round, [R] int32 with R = `max_new_tokens`; rounds beyond `rounds` are 0."""

    committed: jax.Array  # accepted drafts and the target's own token, before clipping
    nodes: jax.Array  # verified trie nodes, the anchor included
    cut: jax.Array  # nodes lost to the budget
    offsets: jax.Array  # shifted blocks drafted

    @property
    def accepted(self) -> jax.Array:
        """Accepted drafts, [R] int32: all that was committed but the target's own token."""
        return jnp.maximum(self.committed - 1, 0)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Generation:
    """What `generate` returns.

    The first token comes from prefill and belongs to no round, so
    `num_tokens == 1 + sum(counts.committed) - clipped`, unless the limit is 0.
    """

    tokens: jax.Array  # [max_new_tokens] int32 generated ids, EOS included; 0 behind the end
    num_tokens: jax.Array  # () int32
    rounds: jax.Array  # () int32
    counts: RoundCounts
    clipped: jax.Array  # () int32 committed tokens of the last round beyond EOS or the limit
    logprobs: TokenLogprobs  # [max_new_tokens, ...]; zeros behind the end

    @property
    def tau(self) -> jax.Array:
        """Committed tokens per round, [] f32; the last round counts in full. 0 without a round."""
        total = jnp.sum(self.counts.committed, axis=-1).astype(jnp.float32)
        return total / jnp.maximum(self.rounds, 1).astype(jnp.float32)


class _Loop(NamedTuple):
    state: DecodeState
    rounds: jax.Array
    counts: RoundCounts
    clipped: jax.Array
    logprobs: TokenLogprobs  # [max_new_tokens + 2B, ...]: slack for one whole round


def generate(
    pair: Pair,
    prompt_ids: jax.Array,
    prompt_len: jax.Array,
    *,
    key: jax.Array,
    config: DecodeConfig,
    max_new_tokens: int,
    limit: jax.Array | None = None,
    eos_ids: jax.Array | None = None,
) -> Generation:
    """Prefill and all rounds as one program without host transfers.

    Works under `jax.jit` (with `config` and `max_new_tokens` static) and under `vmap` over
    prompts, lengths and keys. Arguments as in `prefill`. Sizes that compile again when they
    change: P (pad prompts to few sizes), `max_new_tokens` (a capacity; stop earlier with the
    traced `limit`), and anything in `config`.

    Raises:
      ReanchorError: at trace time, for a config outside its ranges or a missing drafter.
    """
    check_config(pair, config)
    state = prefill(
        pair,
        prompt_ids,
        prompt_len,
        key=key,
        config=config,
        max_new_tokens=max_new_tokens,
        limit=limit,
        eos_ids=eos_ids,
    )
    return decode_loop(pair, state, config, max_new_tokens)[1]


def decode_loop(
    pair: Pair, state: DecodeState, config: DecodeConfig, max_new_tokens: int
) -> tuple[DecodeState, Generation]:
    """Rounds until EOS or the limit, from a state that `prefill` made.

    The last state comes back so that a caller who times prefill and rounds apart can donate the
    first one: its caches are then updated in place.

    Args:
      pair: networks.
      state: from `prefill` with the same `config` and `max_new_tokens`.
      config: static decoding settings.
      max_new_tokens: static capacity for new tokens.
    """
    zeros = jnp.zeros(max_new_tokens, jnp.int32)
    slack = 2 * block_size(pair, config)
    logprobs = jax.tree.map(
        lambda first: jnp.zeros((max_new_tokens + slack, *first.shape[1:]), first.dtype).at[:1].set(first),
        state.first_logprobs,
    )
    loop = _Loop(state, jnp.int32(0), RoundCounts(zeros, zeros, zeros, zeros), jnp.int32(0), logprobs)
    if max_new_tokens:  # a capacity of 0 has no slot to count a round in
        loop = jax.lax.while_loop(lambda loop: _goes_on(loop.state.done), lambda loop: _step(pair, loop, config), loop)

    num_tokens = loop.state.generated
    slots = jnp.arange(max_new_tokens)
    ids = jax.lax.dynamic_slice(loop.state.tokens, (loop.state.prompt_len,), (max_new_tokens,))

    def trim(rows: jax.Array) -> jax.Array:
        inside = (slots < num_tokens).reshape(-1, *(1,) * (rows.ndim - 1))
        return jnp.where(inside, rows[:max_new_tokens], jnp.zeros((), rows.dtype))

    generation = Generation(
        tokens=trim(ids),
        num_tokens=num_tokens,
        rounds=loop.rounds,
        counts=loop.counts,
        clipped=loop.clipped,
        logprobs=jax.tree.map(trim, loop.logprobs),
    )
    return loop.state, generation


@jax.custom_batching.custom_vmap
def _goes_on(done: jax.Array) -> jax.Array:
    """Whether there is a round to come, () bool.

    Under `vmap` one answer for all rows: with one for each, JAX would copy every cache in every
    round, to give back to finished rows what they had. A round leaves those as they are by itself.
    """
    return ~done


@_goes_on.def_vmap
def _any_goes_on(axis_size: int, in_batched: list[bool], done: jax.Array) -> tuple[jax.Array, bool]:
    del axis_size, in_batched
    return _goes_on(jnp.all(done)), False  # by itself again, for a `vmap` around this one


def _step(pair: Pair, loop: _Loop, config: DecodeConfig) -> _Loop:
    active = (~loop.state.done).astype(jnp.int32)
    state, record = decode_round(pair, loop.state, config)
    return _Loop(
        state=state,
        rounds=loop.rounds + active,
        counts=_count(loop.counts, record, loop.rounds, active),
        clipped=loop.clipped + active * record.clipped,
        logprobs=jax.tree.map(
            lambda rows, new: jax.lax.dynamic_update_slice(rows, new, (record.start, *(0,) * (new.ndim - 1))),
            loop.logprobs,
            record.logprobs,
        ),
    )


def _count(counts: RoundCounts, record: RoundRecord, index: jax.Array, active: jax.Array) -> RoundCounts:
    return RoundCounts(
        committed=counts.committed.at[index].set(active * record.committed),
        nodes=counts.nodes.at[index].set(active * record.num_nodes),
        cut=counts.cut.at[index].set(active * record.num_cut),
        offsets=counts.offsets.at[index].set(active * record.num_offsets),
    )
