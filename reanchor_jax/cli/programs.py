"""Compiled programs of a run: one prefill, one round and one loop per padded prompt size."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from reanchor_jax.cli.answer import Answer
from reanchor_jax.config import DecodeConfig
from reanchor_jax.decode import decode_round
from reanchor_jax.loop import Generation, decode_loop
from reanchor_jax.pair import Pair
from reanchor_jax.prefill import prefill
from reanchor_jax.sampling import TokenLogprobs
from reanchor_jax.state import DecodeState, RoundRecord


class First(NamedTuple):
    """What the host reads after prefill."""

    token: jax.Array  # () int32
    done: jax.Array  # () bool
    logprobs: TokenLogprobs  # [1, ...]


class Round(NamedTuple):
    """What the host reads after a round: small whatever the model's size, never a cache."""

    tokens: jax.Array  # [W] int32, of which `kept` joined the text
    kept: jax.Array  # () int32
    committed: jax.Array  # () int32
    nodes: jax.Array  # () int32
    cut: jax.Array  # () int32
    done: jax.Array  # () bool
    logprobs: TokenLogprobs  # [W, ...]
    record: RoundRecord | None  # where a trace is wanted


class Programs:
    """Compiles at first use, ahead of the call, and times the call alone.

    Each call waits for its result and fetches only that from the device. Seconds go to the answer
    in whose turn they were spent.
    """

    def __init__(self, pair: Pair, config: DecodeConfig, max_new_tokens: int):
        """`max_new_tokens` is the static capacity, at least 1."""
        self._pair, self._config, self._capacity = pair, config, max_new_tokens
        self._compiled: dict[tuple[str, int, bool], Callable[..., Any]] = {}

    def prefill(
        self, answer: Answer, size: int, limit: int, eos_ids: Sequence[int], seed: int, index: int
    ) -> tuple[DecodeState, First]:
        """Runs the answer's prompt, padded to `size`. Its key is fold_in(key(seed), index)."""
        padded = np.zeros(size, np.int32)
        padded[: len(answer.prompt_ids)] = answer.prompt_ids
        numbers = (np.int32(len(answer.prompt_ids)), np.uint32(seed), np.uint32(index), np.int32(limit))
        arguments = (self._pair, padded, *numbers, np.array(eos_ids, np.int32))
        function = functools.partial(_prefill, config=self._config, max_new_tokens=self._capacity)
        program = self._program(answer, ("prefill", size, False), function, arguments)
        start = time.perf_counter()
        state, first = program(*arguments)
        first = jax.device_get(first)
        answer.prefill_seconds += time.perf_counter() - start
        return state, first

    def round(self, answer: Answer, size: int, state: DecodeState, traced: bool) -> tuple[DecodeState, Round]:
        """One round; consumes the state."""
        function = functools.partial(_round, config=self._config, traced=traced)
        return self._rounds(answer, ("round", size, traced), function, state)

    def all_rounds(self, answer: Answer, size: int, state: DecodeState) -> Generation:
        """Rounds until the end, without the host; consumes the state."""
        function = functools.partial(decode_loop, config=self._config, max_new_tokens=self._capacity)
        return self._rounds(answer, ("loop", size, False), function, state)[1]

    def _rounds(
        self, answer: Answer, name: tuple[str, int, bool], function: Callable[..., Any], state: DecodeState
    ) -> tuple[DecodeState, Any]:
        # The state is donated: its caches are updated in place, not copied every round.
        program = self._program(answer, name, function, (self._pair, state), donate=(1,))
        start = time.perf_counter()
        state, result = program(self._pair, state)
        result = jax.device_get(result)
        answer.decode_seconds += time.perf_counter() - start
        return state, result

    def _program(
        self,
        answer: Answer,
        name: tuple[str, int, bool],
        function: Callable[..., Any],
        arguments: tuple[Any, ...],
        donate: tuple[int, ...] = (),
    ) -> Callable[..., Any]:
        if name not in self._compiled:
            start = time.perf_counter()
            self._compiled[name] = jax.jit(function, donate_argnums=donate).lower(*arguments).compile()
            answer.compile_seconds += time.perf_counter() - start
        return self._compiled[name]


def _prefill(
    pair: Pair,
    ids: jax.Array,
    prompt_len: jax.Array,
    seed: jax.Array,
    index: jax.Array,
    limit: jax.Array,
    eos_ids: jax.Array,
    *,
    config: DecodeConfig,
    max_new_tokens: int,
) -> tuple[DecodeState, First]:
    state = prefill(
        pair,
        ids,
        prompt_len,
        key=jax.random.fold_in(jax.random.key(seed), index),
        config=config,
        max_new_tokens=max_new_tokens,
        limit=limit,
        eos_ids=eos_ids,
    )
    return state, First(state.tokens[prompt_len], state.done, state.first_logprobs)


def _round(pair: Pair, state: DecodeState, *, config: DecodeConfig, traced: bool) -> tuple[DecodeState, Round]:
    before = state.length
    state, record = decode_round(pair, state, config)
    return state, Round(
        # Anchor at slot 7, three tokens committed: they stand at slots 8, 9, 10.
        tokens=jax.lax.dynamic_slice(state.tokens, (before + 1,), (record.path.shape[0],)),
        kept=state.length - before,
        committed=record.committed,
        nodes=record.num_nodes,
        cut=record.num_cut,
        done=state.done,
        logprobs=record.logprobs,
        record=record if traced else None,
    )
