"""DSpark drafters against the reference's numbers, and that they decode losslessly."""

from __future__ import annotations

import dataclasses
import json
from typing import get_args

import jax
import numpy as np
import pytest

from reanchor_jax.checkpoint import load_drafter, load_target, save_drafter
from reanchor_jax.config import DecodeConfig, DraftRule, DSparkConfig, MarkovHead
from reanchor_jax.pair import Pair, check_pair
from reanchor_jax.target import softcap
from tests.golden_heads import (
    GOLDEN,
    NEW,
    TOLERANCE,
    check_random_pair,
    check_trained_pair,
    draft,
    features,
    force,
    forcing,
    padded,
)
from tests.test_golden_rounds import run as run_one
from tests.test_golden_rounds import unpad
from tests.tiny import make_pair, run

RANDOM = (
    "dspark_qwen3_vanilla", "dspark_qwen3_gated", "dspark_qwen3_rnn", "dspark_qwen3_nomarkov", "dspark_gemma4_vanilla",
)  # fmt: skip
TARGETS = {"dspark_qwen3_trained": "trained_qwen3_target", "dspark_gemma4_trained": "target_gemma4_unified"}


def close(got: jax.Array, want: np.ndarray) -> None:
    np.testing.assert_allclose(got, want, rtol=0, atol=TOLERANCE)


SCHEDULES = (
    {"schedule": "threshold", "confidence_threshold": 0.8},
    # Costs of 1 to 8 tokens: a fifth token is dear.
    {"schedule": "hardware", "costs": (1.0, 1.05, 1.1, 1.15, 2.0, 2.05, 2.1, 2.15)},
)


def check_block(pair: Pair, block: dict[str, np.ndarray]) -> jax.Array:
    """Features, logits, tokens and confidences of a recorded block; returns the features."""
    hidden = features(pair, block["block_ids"], block["ctx"])
    close(hidden, block["block_hidden"])
    drafts = draft(pair, hidden, block["block_ids"][0], None)
    np.testing.assert_array_equal(drafts.tokens[0], block["tokens"])
    close(drafts.logits[0], block["corrected_logits"])
    close(drafts.confidence[0], block["confidence_logits"])
    logits, confidence = force(pair, hidden, np.append(block["block_ids"][0], block["tokens"][:-1]))
    close(logits, block["corrected_logits"])
    close(confidence, block["confidence_logits"])
    return hidden


@pytest.mark.parametrize("name", RANDOM)
def test_recorded_blocks(name):
    # The head brings its own embedding and LM head; of the target only the shapes count.
    pair = Pair(load_target(GOLDEN / "target_qwen3_untied" / "model"), load_drafter(GOLDEN / name / "drafter"))
    arrays = np.load(GOLDEN / name / "expected.npz")
    moved = 0.0
    for n in range(3):
        block = {key.removeprefix(f"s{n}_"): arrays[key] for key in arrays if key.startswith(f"s{n}_")}
        hidden = check_block(pair, block)
        base = hidden @ pair.drafter.head.lm_head[...].T
        close(softcap(base, pair.drafter.config.head.logit_softcap), block["base_logits"])
        moved = max(moved, np.abs(block["corrected_logits"] - block["base_logits"]).max())
        if "tf_logits" in block:
            # `tf_prev_ids` are the tokens before each slot: the anchor, then all drafts but the last.
            before = block["tf_prev_ids"]
            forced = draft(pair, hidden, before[0], forcing(np.append(before[1:], 0), pair.target.config.vocab_size))
            close(forced.logits[0], block["tf_logits"])
    assert moved > 100 * TOLERANCE or name == "dspark_qwen3_nomarkov"


def trained(name: str = "dspark_qwen3_trained") -> tuple[Pair, dict[str, np.ndarray]]:
    folder = GOLDEN / name
    pair = Pair(load_target(GOLDEN / TARGETS[name] / "model"), load_drafter(folder / "drafter"))
    check_pair(pair.target, pair.drafter)
    return pair, dict(np.load(folder / "expected.npz"))


@pytest.mark.parametrize("name", TARGETS)
def test_recorded_rounds(name):
    pair, arrays = trained(name)
    rounds = sorted({key.split("_")[0] for key in arrays if key.startswith("round")})
    assert len(rounds) >= 2
    for name in rounds:
        check_block(pair, {key.removeprefix(f"{name}_"): x for key, x in arrays.items() if key.startswith(f"{name}_")})


@pytest.mark.parametrize(
    ("name", "run_name"),
    [("dspark_qwen3_trained", f"t{n}") for n in range(3)] + [("dspark_gemma4_trained", f"t{n}") for n in range(2)],
)
def test_chain_decoding_reproduces_every_round(name, run_name):
    """Their runs without a confidence threshold, and with 0.5 and 0.8."""
    pair, arrays = trained(name)
    names = ("new_ids", "acceptance_lengths", "proposal_lengths")
    ids, lengths, proposals = (arrays[f"{run_name}_{name}"] for name in names)
    threshold = float(arrays["thresholds"][int(run_name[1])])
    schedule = "threshold" if threshold else "none"
    config = DecodeConfig(method="dflash", bucket_nodes=False, schedule=schedule, confidence_threshold=threshold or 0.5)
    # Their limit does not count the first token, which prefill chose.
    result = run(pair, padded(arrays["prompt_ids"]), config, ids.shape[1] + 1)
    np.testing.assert_array_equal(result.tokens[:, :-1], ids)
    assert (proposals == 0).any() == (threshold > 0)
    for row, rounds in enumerate(result.rounds):
        assert result.counts.committed[row, :rounds].tolist() == [n for n in lengths[row] if n > 0]
        # A chain's nodes are the anchor and what was proposed.
        assert (result.counts.nodes[row, :rounds] - 1).tolist() == [n for n in proposals[row] if n >= 0]


@pytest.mark.parametrize(
    ("name", "temperature", "rule"),
    [
        ("dspark_gemma4_trained", 0.0, "greedy"),
        ("dspark_qwen3_trained", 0.0, "greedy"),
        *(("dspark_qwen3_trained", 1.0, rule) for rule in get_args(DraftRule)),
    ],
)
def test_a_trained_pair_is_lossless(name, temperature, rule):
    pair, arrays = trained(name)
    check_trained_pair(pair, padded(arrays["prompt_ids"][:4]), temperature, rule)


@pytest.mark.parametrize(
    ("temperature", "rule", "bucket_nodes"),
    [(0.0, "greedy", False), (0.0, "greedy", True), *((1.0, rule, False) for rule in get_args(DraftRule))],
)
def test_schedules_are_lossless_and_verify_less(temperature, rule, bucket_nodes):
    pair, arrays = trained()
    prompts = padded(arrays["prompt_ids"][:4])
    config = DecodeConfig(temperature=temperature, draft_rule=rule, attach="fallback", bucket_nodes=bucket_nodes)
    plain = run(pair, prompts, dataclasses.replace(config, method="ar"), NEW)
    # Every program takes seconds to compile; the chain is ReAnchor's baseline block alone.
    for method in ("dflash", "reanchor") if temperature == 0 and not bucket_nodes else ("reanchor",):
        whole = run(pair, prompts, dataclasses.replace(config, method=method), NEW)
        nodes = []
        for schedule in SCHEDULES:
            result = run(pair, prompts, dataclasses.replace(config, method=method, **schedule), NEW)
            np.testing.assert_array_equal(result.tokens, plain.tokens)
            nodes.append(result.counts.nodes.sum() / result.rounds.sum())
        assert max(nodes) < whole.counts.nodes.sum() / whole.rounds.sum()


# With test_domino.py's: every program takes seconds to compile, so most sizes are met by one of the two.
@pytest.mark.parametrize("block_size", [2, 3, 4, 6, 8, 9, 12, 14, 15, 16])
def test_random_pairs_are_lossless(block_size):
    kind = [*get_args(MarkovHead), None][block_size // 3 % 4]  # all kinds under all draft rules
    head = DSparkConfig(
        markov_rank=5 if kind else 0,
        markov_head_type=kind,
        enable_confidence_head=True,
        confidence_head_with_markov=kind is not None,
    )
    check_random_pair(block_size, head)


def test_the_smallest_block_round_trips(tmp_path):
    """One draft: the file says a block size of 1."""
    head = DSparkConfig(
        markov_rank=0, markov_head_type=None, enable_confidence_head=False, confidence_head_with_markov=False
    )
    drafter = make_pair(2, head=head).drafter
    save_drafter(drafter, tmp_path)
    assert load_drafter(tmp_path).config == drafter.config


def test_edges_of_the_reference_loop():
    pair, _ = trained()
    edges = np.load(GOLDEN / "dspark_edges" / "expected.npz")
    names = json.loads((GOLDEN / "dspark_edges" / "case.json").read_text())["edges"]
    for row, name in enumerate(names):
        ids, stop = unpad(edges["new_ids"][row]), unpad(edges["stop_ids"][row])
        limit = int(edges["max_new_tokens"][row]) + 1  # theirs does not count the first token
        result = run_one(pair, edges["prompt_ids"][row], DecodeConfig(method="dflash"), limit, stop)
        assert result.tokens[: len(ids)].tolist() == ids, name
        rounds = unpad(edges["acceptance_lengths"][row])
        assert result.rounds == len(rounds)
        if stop:
            assert result.num_tokens == len(ids)
            rounds = []  # they do not count the target's token behind an accepted stop token
        committed = result.counts.committed[: len(rounds)]
        assert committed.tolist() == rounds
        assert (result.counts.nodes[: len(rounds)] - 1).tolist() == unpad(edges["proposal_lengths"][row])[: len(rounds)]
