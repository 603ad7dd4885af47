"""Decoding of prompts under settings: compiled once each, warmed up, timed, recorded."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.study.pairs import Networks
from experiments.study.prompts import Prompt
from experiments.study.records import Record
from experiments.study.settings import Setting, Study
from reanchor_jax.config import DecodeConfig
from reanchor_jax.decode import decode_round
from reanchor_jax.loop import decode_loop
from reanchor_jax.prefill import prefill
from reanchor_jax.state import DecodeState, RoundRecord

WARM_UP_TOKENS = 8

_PREFILL_FIELDS = ("temperature", "top_k", "top_p", "min_p")
"""Of a config, what prefill reads besides whether there is a drafter."""


class Runner:
    """Decodes prompt after prompt; what settings share is computed once.

    Programs are kept by setting and padded prompt size. Settings of one temperature and drafter
    start from the same prefill of a prompt, whose seconds are in all of their records.
    """

    def __init__(self, networks: Networks, study: Study):
        self._networks, self._study = networks, study
        self._programs: dict[Any, Callable[..., Any]] = {}
        self._states: dict[Any, tuple[DecodeState, float]] = {}
        self._prompt: Prompt | None = None

    def run(self, setting: Setting, prompt: Prompt, plain_ids: Sequence[int]) -> Record:
        """The counts and times of an answer; `plain_ids` are those of plain decoding, for observers."""
        if prompt != self._prompt:
            self._states, self._prompt = {}, prompt
        run = self._timed if setting.observe is None else self._observed
        return run(setting, prompt, plain_ids)

    def _timed(self, setting: Setting, prompt: Prompt, plain_ids: Sequence[int]) -> Record:
        del plain_ids
        pair, key, compile_seconds = self._networks.of(setting), (setting.name, prompt.size), 0.0
        state, prefill_seconds = self._prefill(setting, prompt)
        if key not in self._programs:
            start = time.perf_counter()
            loop = functools.partial(decode_loop, config=setting.config, max_new_tokens=self._study.max_new_tokens)
            self._programs[key] = jax.jit(loop).lower(pair, state).compile()
            compile_seconds = time.perf_counter() - start
            jax.block_until_ready(self._programs[key](pair, dataclasses.replace(state, limit=_short(state))))
        start = time.perf_counter()
        _, generation = self._programs[key](pair, state)
        generation = jax.device_get(jax.block_until_ready(generation))
        seconds = time.perf_counter() - start
        rounds, counts = int(generation.rounds), generation.counts
        return {
            "token_ids": generation.tokens[: generation.num_tokens].tolist(),
            "committed": counts.committed[:rounds].tolist(),
            "nodes": counts.nodes[:rounds].tolist(),
            "cut": int(counts.cut.sum()),
            "offsets": int(counts.offsets.sum()),
            "clipped": int(generation.clipped),
            "prefill_seconds": round(prefill_seconds, 6),
            "decode_seconds": round(seconds, 6),
            "compile_seconds": round(compile_seconds, 3),
        }

    def _observed(self, setting: Setting, prompt: Prompt, plain_ids: Sequence[int]) -> Record:
        assert setting.observe is not None
        pair, key = self._networks.of(setting), (setting.name, prompt.size)
        state, _ = self._prefill(setting, prompt)
        if key not in self._programs:
            self._programs[key] = jax.jit(functools.partial(decode_round, config=setting.config))
        first = int(state.tokens[state.length])
        ids, records = [first][: int(state.generated)], list[RoundRecord]()
        while not state.done:
            state, record = self._programs[key](pair, state)
            record = jax.device_get(record)
            records.append(record)
            issued = record.target_tokens[record.path[: int(record.committed)]]
            ids += issued[: int(record.committed - record.clipped)].tolist()
        return {
            "token_ids": ids,
            "committed": [int(record.committed) for record in records],
            "nodes": [int(record.num_nodes) for record in records],
            "observed": setting.observe(records, plain_ids),
        }

    def _prefill(self, setting: Setting, prompt: Prompt) -> tuple[DecodeState, float]:
        """The state before the first round, and how long it took."""
        method = "ar" if setting.config.method == "ar" else "dflash"
        config = DecodeConfig(method=method, **{name: getattr(setting.config, name) for name in _PREFILL_FIELDS})
        shared = (config, setting.drafter if method != "ar" else "", setting.block_size)
        if shared in self._states:
            return self._states[shared]
        pair, key = self._networks.of(setting), (shared, prompt.size)
        padded = np.zeros(prompt.size, np.int32)
        padded[: len(prompt.ids)] = prompt.ids
        arguments = (
            pair,
            padded,
            np.int32(len(prompt.ids)),
            jax.random.fold_in(jax.random.key(self._study.seed), prompt.row),
            np.array(self._networks.eos_ids, np.int32),
        )
        if key not in self._programs:
            fill = functools.partial(_prefill, config=config, max_new_tokens=self._study.max_new_tokens)
            self._programs[key] = jax.jit(fill).lower(*arguments).compile()
            jax.block_until_ready(self._programs[key](*arguments))
        start = time.perf_counter()
        state = jax.block_until_ready(self._programs[key](*arguments))
        self._states[shared] = (state, time.perf_counter() - start)
        return self._states[shared]


def _short(state: DecodeState) -> Any:
    return jnp.minimum(WARM_UP_TOKENS, state.limit)


def _prefill(pair: Any, ids: Any, length: Any, key: Any, eos_ids: Any, **static: Any) -> DecodeState:
    return prefill(pair, ids, length, key=key, eos_ids=eos_ids, **static)
