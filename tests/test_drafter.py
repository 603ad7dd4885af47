"""DFlash drafters against rounds recorded inside z-lab's `dflash_generate`."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reanchor_jax.cache import KVCache, init_cache, write_rows
from reanchor_jax.checkpoint import load_drafter, load_target
from reanchor_jax.drafter import Drafter
from reanchor_jax.pair import check_pair
from reanchor_jax.target import Target, forward_text

GOLDEN = Path(__file__).parent / "golden"
TARGETS = {
    "dflash_qwen3_b16": "trained_qwen3_target",
    "dflash_qwen3_b8": "trained_qwen3_target",
    "dflash_llama_b10": "trained_llama_target",
}
TOLERANCE = 2e-4
SLOTS, PAD = 160, 96
"""Slots of the caches under test, and the length that contexts are padded to: one compile each."""


class Round(NamedTuple):
    """One recorded round."""

    prompt: int
    ctx: np.ndarray  # [start, C*D]
    block_ids: np.ndarray  # [B]
    start: int
    hidden: np.ndarray  # [B, D]
    logits: np.ndarray  # [B-1, V]


class Case(NamedTuple):
    """A pair with what the reference recorded of it."""

    target: Target
    drafter: Drafter
    rounds: list[Round]
    sequences: list[np.ndarray]
    """Prompt and new tokens of every recorded prompt."""


@pytest.fixture(scope="module", params=list(TARGETS))
def case(request) -> Case:
    z = np.load(GOLDEN / request.param / "expected.npz")
    rounds = [
        Round(
            int(z[f"round{n}_prompt_round"][0]),
            z[f"round{n}_ctx"],
            z[f"round{n}_block_ids"],
            int(z[f"round{n}_start"]),
            z[f"round{n}_draft_hidden"],
            z[f"round{n}_draft_logits"],
        )
        for n in range(sum(name.endswith("_start") for name in z))
    ]
    assert len(rounds) >= 6
    return Case(
        load_target(GOLDEN / TARGETS[request.param] / "model"),
        load_drafter(GOLDEN / request.param / "drafter"),
        rounds,
        [
            np.concatenate([prompt[:num], new])
            for prompt, num, new in zip(z["prompt_ids"], z["prompt_lens"], z["new_ids"], strict=True)
        ],
    )


@jax.jit
def context(drafter: Drafter, features: jax.Array, start: jax.Array) -> KVCache:
    return drafter.context(features, start + jnp.arange(features.shape[0], dtype=jnp.int32))


@jax.jit
def draft(pair: tuple, block_ids, start, cache, cache_len, suffix, suffix_len) -> tuple[jax.Array, jax.Array]:
    """Features and logits of the block."""
    target, drafter = pair
    positions = start + jnp.arange(block_ids.shape[0], dtype=jnp.int32)
    hidden = drafter(target.embed(block_ids), positions, cache, cache_len, suffix, suffix_len)
    return hidden, target.logits(hidden)


def empty(drafter: Drafter, num_slots: int) -> KVCache:
    """A cache of garbage: whatever is not masked shows."""
    cache = init_cache(drafter.config.layer, drafter.config.num_layers, num_slots, jnp.float32)
    return jax.tree.map(lambda x: jnp.full_like(x, 50.0), cache)


def written(drafter: Drafter, features: np.ndarray, first: int, num_slots: int) -> KVCache:
    """The context of features at positions first, first + 1, ... in slots 0, 1, ...; garbage behind."""
    padded = np.pad(features, ((0, PAD - len(features)), (0, 0)))
    kv = context(drafter, jnp.asarray(padded), jnp.int32(first))
    num = len(features)
    return write_rows(empty(drafter, num_slots), kv.k[:, :, :num], kv.v[:, :, :num], jnp.int32(0))


def run(case: Case, recorded: Round, suffix_len: int = 0, num_suffix: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Drafts the recorded block with the last `suffix_len` context positions in the suffix."""
    cut = recorded.start - suffix_len
    hidden, logits = draft(
        (case.target, case.drafter),
        jnp.asarray(recorded.block_ids),
        jnp.int32(recorded.start),
        written(case.drafter, recorded.ctx[:cut], 0, SLOTS),
        jnp.int32(cut),
        written(case.drafter, recorded.ctx[cut:], cut, num_suffix),
        jnp.int32(suffix_len),
    )
    return np.asarray(hidden), np.asarray(logits)


def test_recorded_rounds(case):
    for recorded in case.rounds:
        hidden, logits = run(case, recorded)
        np.testing.assert_allclose(hidden, recorded.hidden, rtol=0, atol=TOLERANCE)
        np.testing.assert_allclose(logits[1:], recorded.logits, rtol=0, atol=TOLERANCE)


def test_suffix_is_context_like_any_other(case):
    """Positions moved from the cache to the retained suffix change nothing but rounding."""
    num_suffix = case.drafter.config.block_size - 1
    for recorded in case.rounds[:3]:
        for suffix_len in (0, 1, num_suffix):
            hidden, logits = run(case, recorded, suffix_len, num_suffix)
            np.testing.assert_allclose(hidden, recorded.hidden, rtol=0, atol=TOLERANCE)
            np.testing.assert_allclose(logits[1:], recorded.logits, rtol=0, atol=TOLERANCE)


def test_context_does_not_depend_on_how_it_is_cut(case):
    """Features of a position give its keys and values, whatever else is in the call."""
    features = jnp.asarray(case.rounds[0].ctx[:20])
    whole = context(case.drafter, features, jnp.int32(0))
    for cut in (1, 13):
        first = context(case.drafter, features[:cut], jnp.int32(0))
        second = context(case.drafter, features[cut:], jnp.int32(cut))
        np.testing.assert_allclose(jnp.concatenate([first.k, second.k], 2), whole.k, rtol=0, atol=1e-5)
        np.testing.assert_allclose(jnp.concatenate([first.v, second.v], 2), whole.v, rtol=0, atol=1e-5)


@jax.jit
def features_of(pair: tuple, tokens: jax.Array) -> list[jax.Array]:
    """Target features at the drafter's layer ids, and at those of one layer later."""
    target, drafter = pair
    ids = drafter.config.target_layer_ids
    return [forward_text(target, tokens, taps).features for taps in (ids, tuple(i + 1 for i in ids))]


def test_features_are_the_reference_s(case):
    """Layer id n is the output of layer n, not its input (an off-by-one costs acceptance only)."""
    for recorded in case.rounds:
        tokens = np.zeros(PAD, np.int32)
        tokens[: recorded.start] = case.sequences[recorded.prompt][: recorded.start]
        right, shifted = features_of((case.target, case.drafter), jnp.asarray(tokens))
        got = np.asarray(right)[: recorded.start]
        np.testing.assert_allclose(got, recorded.ctx, rtol=0, atol=TOLERANCE)
        assert np.abs(np.asarray(shifted)[: recorded.start] - recorded.ctx).max() > 1000 * TOLERANCE


def test_the_block_is_bidirectional_and_its_position_counts(case):
    """Negative controls: the last mask's embedding, the start and the context all reach slot 1."""
    recorded = case.rounds[0]
    _, logits = run(case, recorded)
    other = recorded.block_ids.copy()
    other[-1] = 65
    for changed in (
        recorded._replace(block_ids=other),
        recorded._replace(ctx=np.roll(recorded.ctx, 1, axis=0)),
        recorded._replace(ctx=recorded.ctx[:-1], start=recorded.start - 1),
    ):
        _, moved = run(case, changed)
        assert np.abs(moved - logits)[1].max() > 10 * TOLERANCE


def test_golden_pairs_fit(case):
    check_pair(case.target, case.drafter)
