"""Trained pairs reproduce the reference loops round for round, not only id for id."""

import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reanchor_jax import DecodeConfig, Pair, generate
from reanchor_jax.checkpoint import load_drafter, load_target

GOLDEN = Path(__file__).parent / "golden"
PAIRS = {
    "dflash_qwen3_b16": "trained_qwen3_target",
    "dflash_qwen3_b8": "trained_qwen3_target",
    "dflash_llama_b10": "trained_llama_target",
}
RULES = [
    "earliest/baseline",
    "earliest/accepted_path",
    "fixed/baseline",
    "longest/baseline",
    "fixed_unmatched/baseline",
    "fallback/baseline",
    "fallback/accepted_path",
]
NO_EOS = (-1,)


@functools.cache
def load(name: str):
    pair = Pair(load_target(GOLDEN / PAIRS[name] / "model"), load_drafter(GOLDEN / name / "drafter"))
    return pair, dict(np.load(GOLDEN / name / "expected.npz"))


def decode_all(name: str, config: DecodeConfig, max_new_tokens: int, num_prompts: int):
    pair, expected = load(name)
    run = jax.jit(functools.partial(generate, config=config, max_new_tokens=max_new_tokens))
    results = []
    for ids, length in list(zip(expected["prompt_ids"], expected["prompt_lens"], strict=True))[:num_prompts]:
        prompt = np.zeros(64, np.int32)
        prompt[:length] = ids[:length]
        result = run(
            pair, jnp.array(prompt), jnp.int32(length), key=jax.random.key(0), eos_ids=jnp.array(NO_EOS, jnp.int32)
        )
        results.append(jax.device_get(result))
    return results, expected


@pytest.mark.parametrize("name", PAIRS)
def test_chain_reproduces_ids_and_accepted_lengths(name):
    # The reference stops at 96 tokens beside the first, which it does not count: 97 of ours.
    results, expected = decode_all(name, DecodeConfig(method="dflash"), 97, 12)
    for result, ids, lengths in zip(results, expected["new_ids"], expected["acceptance_lengths"], strict=True):
        assert result.tokens[:96].tolist() == ids.tolist()
        assert result.counts.committed[: result.rounds].tolist() == lengths[lengths >= 0].tolist()
        assert 1 + result.counts.committed.sum() - result.clipped == result.num_tokens == 97


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("name", PAIRS)
def test_reanchor_reproduces_rounds(name, rules):
    attach, retain = rules.split("/")
    results, expected = decode_all(name, DecodeConfig(attach=attach, retain=retain), 96, 8)
    reference = json.loads((GOLDEN / name / "reanchor.json").read_text())["results"][rules]
    compared = 0
    for index, result in enumerate(results):
        assert result.tokens.tolist() == expected["ar_new_ids"][index].tolist()
        if reference["min_draft_margin"][index] < 1e-4:
            continue  # a drafted token is nearly tied: rounding may choose the other one
        compared += 1
        for field, key in (("committed", "committed"), ("nodes", "nodes"), ("offsets", "offsets")):
            ours = getattr(result.counts, field)[: result.rounds].tolist()
            assert ours == reference[f"{key}_per_round"][index], (index, field)
        assert not result.counts.cut.any()
    assert compared >= 5
