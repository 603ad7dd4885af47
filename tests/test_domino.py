"""Domino drafters against the reference's numbers, and that they decode losslessly."""

from __future__ import annotations

import json
from typing import Any, NamedTuple, get_args

import numpy as np
import pytest

from reanchor_jax.checkpoint import load_drafter, load_target
from reanchor_jax.config import DecodeConfig, DominoConfig, DraftRule
from reanchor_jax.pair import Pair, check_pair
from tests.golden_heads import (
    GOLDEN,
    TOLERANCE,
    check_random_pair,
    check_trained_pair,
    draft,
    features,
    force,
    forcing,
    padded,
)
from tests.tiny import run

TARGETS = {
    "domino_shift0_prefix0": "target_qwen3_untied",
    "domino_shift0_prefix1": "target_qwen3_untied",
    "domino_shift1_prefix0": "target_qwen3_untied",
    "domino_shift1_prefix1": "target_qwen3_untied",
    "domino_qwen3_trained": "trained_qwen3_target",
}


class Case(NamedTuple):
    pair: Pair
    info: dict[str, Any]
    arrays: dict[str, np.ndarray]


@pytest.fixture(scope="module", params=TARGETS)
def case(request) -> Case:
    folder = GOLDEN / request.param
    pair = Pair(load_target(GOLDEN / TARGETS[request.param] / "model"), load_drafter(folder / "drafter"))
    check_pair(pair.target, pair.drafter)
    return Case(pair, json.loads((folder / "case.json").read_text()), dict(np.load(folder / "expected.npz")))


def samples(case: Case) -> list[dict[str, np.ndarray]]:
    """The recorded blocks."""
    names = ("block_ids", "ctx", "draft_hidden", "base_logits", "tf_ids", "tf_final_logits", "tokens", "chosen_logits")
    return [{name: case.arrays[f"s{n}_{name}"] for name in names} for n in range(3)]


def test_recorded_blocks(case):
    shift = case.info["shift_label"]
    for sample in samples(case):
        hidden = features(case.pair, sample["block_ids"], sample["ctx"])
        np.testing.assert_allclose(hidden, sample["draft_hidden"], rtol=0, atol=TOLERANCE)
        np.testing.assert_allclose(case.pair.target.logits(hidden), sample["base_logits"], rtol=0, atol=TOLERANCE)

        drafts = draft(case.pair, hidden, sample["block_ids"][0], None)
        np.testing.assert_array_equal(drafts.tokens[0], sample["tokens"])
        np.testing.assert_allclose(drafts.logits[0], sample["chosen_logits"], rtol=0, atol=TOLERANCE)

        # Their teacher forcing: noise that decides every draft.
        ids = sample["tf_ids"]
        forced = draft(case.pair, hidden, ids[0], forcing(ids[1:], case.pair.target.config.vocab_size))
        np.testing.assert_array_equal(forced.tokens[0], ids[1:])
        rows = sample["tf_final_logits"][:-1] if shift else sample["tf_final_logits"][1:]
        np.testing.assert_allclose(forced.logits[0], rows, rtol=0, atol=TOLERANCE)
        logits, _ = force(case.pair, hidden, ids[:-1])  # as in training
        np.testing.assert_allclose(logits, rows, rtol=0, atol=TOLERANCE)

        # Control: correction and alignment are far from nothing.
        base = sample["base_logits"][:-1] if shift else sample["base_logits"][1:]
        other = sample["base_logits"][1:] if shift else sample["base_logits"][:-1]
        first = case.info["pure_draft_prefix_len"]
        assert np.abs(forced.logits[0] - base)[first:].max() > 100 * TOLERANCE
        assert np.abs(forced.logits[0] - other).max(axis=-1).min() > 100 * TOLERANCE
        np.testing.assert_allclose(forced.logits[0][:first], base[:first], rtol=0, atol=TOLERANCE)


def test_chain_decoding_reproduces_every_round(case):
    arrays = case.arrays
    if "gen_prompt" in arrays:
        prompts, ids, lengths = (arrays[f"gen_{x}"][None] for x in ("prompt", "new_ids", "acceptance_lengths"))
    else:
        prompts, ids, lengths = (arrays[x] for x in ("prompt_ids", "new_ids", "acceptance_lengths"))
    # Their limit does not count the first token, which prefill chose.
    result = run(case.pair, padded(prompts), DecodeConfig(method="dflash", bucket_nodes=False), ids.shape[1] + 1)
    np.testing.assert_array_equal(result.tokens[:, :-1], ids)
    for committed, rounds, wanted in zip(result.counts.committed, result.rounds, lengths, strict=True):
        assert committed[:rounds].tolist() == wanted[wanted > 0].tolist()


@pytest.mark.parametrize(("temperature", "rule"), [(0.0, "greedy"), *((1.0, rule) for rule in get_args(DraftRule))])
def test_a_trained_pair_is_lossless(temperature, rule):
    name = "domino_qwen3_trained"
    pair = Pair(load_target(GOLDEN / TARGETS[name] / "model"), load_drafter(GOLDEN / name / "drafter"))
    prompts = padded(np.load(GOLDEN / name / "expected.npz")["prompt_ids"][:4])
    check_trained_pair(pair, prompts, temperature, rule)


# With test_dspark.py's: every program takes seconds to compile, so most sizes are met by one of the two.
@pytest.mark.parametrize("block_size", [2, 3, 4, 5, 7, 10, 11, 13, 16])
def test_random_pairs_are_lossless(block_size):
    head = DominoConfig(emb_dim=6, gru_hidden_dim=10, shift_label=block_size % 2 == 0, pure_draft_prefix_len=1)
    check_random_pair(block_size, head)
