"""Whole runs on trained pairs against the reference implementations, round by round.

How the reference loops count: they stop once the committed tokens of all rounds reach
`max_new_tokens`, without the first token, which prefill chose. Ours counts that token, so our
limit is one higher (DFlash) where their loop counts so, and the ids are compared up to theirs.
The last round counts in full in all of them.

Where we differ on purpose: z-lab's loop runs one round even when the first token is a stop token;
ours runs none. The text is the same.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reanchor_jax.checkpoint import load_drafter, load_target
from reanchor_jax.config import DecodeConfig
from reanchor_jax.drafter import with_block_size
from reanchor_jax.loop import Generation, generate
from reanchor_jax.pair import Pair
from tests.tiny import QUICK, RULES, rules_by_index

GOLDEN = Path(__file__).parent / "golden"
TARGETS = {
    "dflash_qwen3_b16": "trained_qwen3_target",
    "dflash_qwen3_b8": "trained_qwen3_target",
    "dflash_llama_b10": "trained_llama_target",
}
CHAIN = DecodeConfig(method="dflash")
PROMPT_SIZE, CAPACITY = 64, 97
MARGIN = 1e-4
"""Rounds are compared where no draft's two best logits are closer than this (reanchor.json's own note)."""


class Case(NamedTuple):
    """A trained pair with what the references recorded of it."""

    pair: Pair
    expected: Any  # the arrays of expected.npz
    reanchor: dict[str, Any]  # results of reanchor.json by "attach/retain"


@functools.lru_cache
def load(name: str) -> Case:
    pair = Pair(load_target(GOLDEN / TARGETS[name] / "model"), load_drafter(GOLDEN / name / "drafter"))
    results = json.loads((GOLDEN / name / "reanchor.json").read_text())["results"]
    return Case(pair, dict(np.load(GOLDEN / name / "expected.npz")), results)


def resized(pair: Pair, block_size: int) -> Pair:
    """The pair with another block size than it was trained for."""
    assert pair.drafter is not None
    return Pair(pair.target, with_block_size(pair.drafter, block_size))


def run_rounds(
    pair: Pair, ids: jax.Array, num: jax.Array, limit: jax.Array, eos: jax.Array, rule: Any, *, config: DecodeConfig
) -> Generation:
    fn = functools.partial(generate, key=jax.random.key(0), config=config, max_new_tokens=CAPACITY)
    if rule is None:
        return fn(pair, ids, num, limit=limit, eos_ids=eos)
    with rules_by_index(rule):
        return fn(pair, ids, num, limit=limit, eos_ids=eos)


# Runs with tries are many: there fast code pays for its compile time.
run_trie = jax.jit(run_rounds, static_argnames="config")
run_chain = jax.jit(run_rounds, static_argnames="config", compiler_options=QUICK)


def run(
    pair: Pair, prompt: np.ndarray, config: DecodeConfig, limit: int, stop: list[int], rule: int | None = None
) -> Generation:
    """One prompt, padded with -1 in the files."""
    num = int((prompt >= 0).sum())
    ids = np.zeros(PROMPT_SIZE, np.int32)
    ids[:num] = prompt[:num]
    eos = jnp.array([*stop, -1, -1][:2], jnp.int32)
    index = None if rule is None else jnp.int32(rule)
    fn = run_trie if config.method == "reanchor" else run_chain
    return jax.device_get(fn(pair, jnp.asarray(ids), jnp.int32(num), jnp.int32(limit), eos, index, config=config))


def unpad(row: np.ndarray) -> list[int]:
    """A row without its padding of -1."""
    return row[row >= 0].tolist()


def check(result: Generation, ids: np.ndarray, rounds: np.ndarray) -> None:
    """Ids as far as the reference gives them, and the committed tokens of every round."""
    ids, committed = np.array(unpad(ids)), unpad(rounds)
    assert result.tokens[: len(ids)].tolist() == ids.tolist()
    assert result.counts.committed[: result.rounds].tolist() == committed


@pytest.mark.parametrize("name", TARGETS)
def test_dflash_reproduces_every_round(name):
    pair, expected, _ = load(name)
    rows = zip(expected["prompt_ids"], expected["new_ids"], expected["acceptance_lengths"], strict=True)
    for prompt, new, rounds in rows:
        result = run(pair, prompt, CHAIN, 97, [])
        check(result, new, rounds)
        assert result.counts.nodes[0] == pair.drafter.config.block_size and not result.counts.offsets.any()
    # Stop tokens: theirs are kept in the text, and the stopping round counts in full.
    rows = zip(expected["stop_sets"], expected["stop_new_ids"], expected["stop_acceptance_lengths"], strict=True)
    for prompt, (stop, new, rounds) in zip(expected["prompt_ids"], rows, strict=False):
        result = run(pair, prompt, CHAIN, 97, unpad(stop))
        check(result, new, rounds)
        stopped = new[-1] < 0
        assert result.num_tokens == (len(unpad(new)) if stopped else 97)
    result = run(pair, expected["prompt_ids"][0], CHAIN, len(expected["short_new_ids"]) + 1, [])
    check(result, expected["short_new_ids"], expected["short_acceptance_lengths"])
    half = resized(pair, int(expected["half_block_size"]))
    for prompt, new, rounds in zip(
        expected["prompt_ids"], expected["new_ids"], expected["half_block_acceptance_lengths"], strict=False
    ):
        check(run(half, prompt, CHAIN, 97, []), new, rounds)


@pytest.mark.parametrize("name", TARGETS)
def test_reanchor_reproduces_every_round(name):
    pair, expected, reanchor = load(name)
    assert len(reanchor) == 7
    compared = 0
    for rules, recorded in reanchor.items():
        rule = RULES.index(tuple(rules.split("/")))
        for row, margin in enumerate(recorded["min_draft_margin"]):
            result = run(pair, expected["prompt_ids"][row], DecodeConfig(nodes=256), 96, [], rule)
            assert result.tokens[:96].tolist() == expected["ar_new_ids"][row].tolist()
            if margin > MARGIN:
                compared += 1
                for field in ("committed", "nodes", "offsets"):
                    counts = getattr(result.counts, field)[: result.rounds].tolist()
                    assert counts == recorded[f"{field}_per_round"][row], (rules, row, field)
    assert compared >= 40  # of 56 runs


def test_the_default_rules_need_no_patch():
    """The same numbers once more with the rules where they belong, in the config."""
    pair, expected, reanchor = load("dflash_qwen3_b8")
    recorded = reanchor["fallback/accepted_path"]
    for row, margin in enumerate(recorded["min_draft_margin"]):
        result = run(pair, expected["prompt_ids"][row], DecodeConfig(attach="fallback", nodes=256), 96, [])
        assert result.tokens[:96].tolist() == expected["ar_new_ids"][row].tolist()
        if margin > MARGIN:
            assert result.counts.nodes[: result.rounds].tolist() == recorded["nodes_per_round"][row]


def test_edges_of_the_reference_loop():
    pair = load("dflash_qwen3_b8").pair
    edges = np.load(GOLDEN / "dflash_edges" / "expected.npz")
    names = json.loads((GOLDEN / "dflash_edges" / "case.json").read_text())["edges"]
    for row, name in enumerate(names):
        size, limit = int(edges["block_size"][row]), int(edges["max_new_tokens"][row])
        prompt, stop = edges["prompt_ids"][row], unpad(edges["stop_ids"][row])
        config = DecodeConfig(method="ar") if size == 1 else CHAIN
        result = run(resized(pair, max(size, 2)), prompt, config, limit + 1, stop)
        if name.startswith("first generated token"):  # their one round of no consequence
            assert edges["acceptance_lengths"][row, 0] > 0
            assert result.rounds == 0 and result.num_tokens == 1
            assert result.tokens[:1].tolist() == unpad(edges["new_ids"][row])
        else:
            check(result, edges["new_ids"][row], edges["acceptance_lengths"][row])
