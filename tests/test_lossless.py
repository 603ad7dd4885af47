"""Losslessness: every way to speculate gives plain decoding's text, token for token."""

from __future__ import annotations

import functools
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reanchor_jax.config import DecodeConfig, DraftRule
from reanchor_jax.loop import Generation, generate
from reanchor_jax.pair import Pair
from tests.tiny import (
    QUICK,
    RULES,
    Prompts,
    Script,
    anti,
    check_counts,
    make_pair,
    make_prompts,
    mix,
    oracle,
    rules_by_index,
    run,
    scripted,
)

NEW = 40
one_size = functools.partial(DecodeConfig, bucket_nodes=False)  # as `DecodeConfig` asks for under vmap


@functools.lru_cache
def pair(block_size: int = 6, family: str = "qwen3", tied: bool = False) -> Pair:
    return make_pair(block_size, family=family, tied=tied, seed=block_size)


@functools.lru_cache
def plain(config: DecodeConfig, *args: Any) -> Generation:
    """Plain decoding of `make_prompts()`; only the sampling fields of `config` count."""
    result = run(pair(*args), make_prompts(), config, NEW)
    assert config.method == "ar" and np.all(result.num_tokens == NEW)
    return result


def ar(config: DecodeConfig) -> DecodeConfig:
    """Plain decoding with the same sampling."""
    return DecodeConfig(
        method="ar",
        temperature=config.temperature,
        top_k=config.top_k,
        top_p=config.top_p,
        min_p=config.min_p,
        logprobs=config.logprobs,
    )


def run_all_rules(config: DecodeConfig, scripts: Script | None, prompts: Prompts) -> Generation:
    """Rows are rule pairs times prompts; `scripts` has one row for every prompt."""

    def one(rule: jax.Array, script: Script | None, prompt: Prompts) -> Generation:
        ids, num, key = prompt
        with scripted(script, pair().target.config.vocab_size), rules_by_index(rule):
            return generate(pair(), ids, num, key=key, config=config, max_new_tokens=NEW)

    by_rule = jax.vmap(jax.vmap(one, in_axes=(None, 0, 0)), in_axes=(0, None, None))
    rows = jax.jit(by_rule, compiler_options=QUICK)(jnp.arange(len(RULES)), scripts, prompts)
    return jax.tree.map(lambda x: np.concatenate(x), jax.device_get(rows))


def check_rows(result: Generation, expected: np.ndarray) -> None:
    """Every row's text is plain decoding's."""
    check_counts(result)
    repeats = len(result.tokens) // len(expected)
    np.testing.assert_array_equal(result.tokens, np.tile(expected, (repeats, 1)))


@pytest.mark.parametrize(
    ("temperature", "draft_rule"), [(0.0, "greedy"), *((1.0, rule) for rule in get_args(DraftRule))]
)
def test_all_rule_pairs_equal_plain_decoding(temperature, draft_rule):
    config = one_size(temperature=temperature, draft_rule=draft_rule)
    result = run_all_rules(config, None, jax.tree.map(lambda x: x[:2], make_prompts()))
    check_rows(result, plain(ar(config)).tokens[:2])
    # The rules are really different runs, most of them with shifted blocks in the trie.
    nodes = np.sum(result.counts.nodes, axis=1).reshape(len(RULES), -1).sum(axis=1)
    assert len(set(nodes.tolist())) >= len(RULES) // 2
    assert np.all(np.sum(result.counts.offsets, axis=1) > 0)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_scripted_drafters_equal_plain_decoding(temperature):
    """ORACLE, ANTI and MIX drafters with all rule pairs: acceptance from nothing to beyond the block."""
    config = one_size(temperature=temperature)
    first = Prompts(*(x[:1] for x in make_prompts()))
    expected = plain(ar(config)).tokens[:1]
    # Behind the last token that plain decoding gave, ORACLE does not know; the last round may be wrong there.
    table = jnp.concatenate([first.ids[0, : int(first.lens[0])], jnp.asarray(expected[0])])
    scripts = [oracle(table), anti(table)]
    scripts += [mix(table, k, shifted, lucky) for k, shifted, lucky in ((1, 6, True), (2, 2, True), (3, 1, False))]
    rows = Prompts(*(jnp.repeat(x, len(scripts), axis=0) for x in first))
    result = run_all_rules(config, jax.tree.map(lambda *x: jnp.stack(x), *scripts), rows)
    check_rows(result, np.repeat(expected, len(scripts), axis=0))
    accepted = np.asarray(result.counts.accepted).reshape(len(RULES), len(scripts), NEW)
    rounds = np.asarray(result.rounds).reshape(len(RULES), len(scripts))
    assert np.all(rounds[:, 0] == -(-(NEW - 1) // 6))  # ORACLE: whole blocks
    assert np.all(rounds[:, :1] <= rounds[:, 2:]) and np.all(rounds[:, 2:] < rounds[:, 1:2])
    assert np.max(accepted[:, 2]) > 5  # beyond the baseline's end


# The usual way, one static config after the other


@pytest.mark.parametrize(
    ("block_size", "family", "tied", "config"),
    [
        (2, "llama", True, one_size()),
        (3, "qwen3", True, one_size(attach="fallback", temperature=1.0, draft_rule="coupled")),
        (4, "llama", False, one_size(attach="fallback", retain="baseline")),
        (6, "qwen3", False, one_size(method="dflash", temperature=1.0, draft_rule="sample")),
        (9, "llama", True, one_size(attach="longest", temperature=1.0)),
        (16, "qwen3", False, one_size(attach="fixed_unmatched", nodes=40)),
    ],
)
def test_pairs_equal_plain_decoding(block_size, family, tied, config):
    args = (block_size, family, tied)
    result = run(pair(*args), make_prompts(), config, NEW)
    check_rows(result, plain(ar(config), *args).tokens)


@pytest.mark.parametrize(
    "config",
    [
        one_size(temperature=1.0, top_k=3, draft_rule="sample"),
        one_size(temperature=2.0, min_p=0.3, attach="fixed_unmatched", draft_rule="coupled"),
        one_size(temperature=0.7, top_k=9, top_p=0.8, min_p=0.05, draft_temperature=1.5, draft_rule="sample"),
    ],
    ids=["top-k", "min-p", "all"],
)
def test_filters_equal_plain_decoding(config):
    filtered = plain(ar(config))
    check_rows(run(pair(), make_prompts(), config, NEW), filtered.tokens)
    assert not np.array_equal(filtered.tokens, plain(ar(DecodeConfig(temperature=1.0))).tokens)


@pytest.mark.parametrize(("nodes", "offsets"), [(6, None), (13, 2), (None, 0)])
def test_budgets_and_offset_limits_equal_plain_decoding(nodes, offsets):
    config = one_size(attach="fallback", nodes=nodes, offsets=offsets)
    result = run(pair(), make_prompts(), config, NEW)
    check_rows(result, plain(ar(config)).tokens)
    assert np.max(result.counts.nodes) == (nodes or 6)
    assert np.max(result.counts.offsets) == (5 if offsets is None else offsets)
    assert (np.sum(result.counts.cut) > 0) == (nodes is not None)
    if nodes != 13:  # the baseline alone fits, or is all there is: rounds are DFlash's
        chain = run(pair(), make_prompts(), one_size(method="dflash"), NEW)
        np.testing.assert_array_equal(result.counts.committed, chain.counts.committed)


def test_a_greedy_text_may_be_drafted_by_sampling():
    config = one_size(draft_rule="sample", attach="random")
    check_rows(run(pair(), make_prompts(), config, NEW), plain(ar(config)).tokens)


def test_logprobs_equal_those_of_plain_decoding():
    config = one_size(attach="fallback", temperature=1.0, logprobs=3)
    result, expected = run(pair(), make_prompts(), config, NEW), plain(ar(config))
    check_rows(result, expected.tokens)
    np.testing.assert_array_equal(result.logprobs.top_ids, expected.logprobs.top_ids)
    for name in ("chosen", "top"):
        actual, wanted = getattr(result.logprobs, name), getattr(expected.logprobs, name)
        np.testing.assert_allclose(actual, wanted, rtol=1e-4, atol=1e-4)


def test_a_row_of_a_batch_equals_its_solo_run():
    """Also across verification sizes: solo runs verify at the smallest that fits, the batch at one."""
    batch = run(pair(), make_prompts(), one_size(attach="fallback", temperature=1.0), NEW)
    config = DecodeConfig(attach="fallback", temperature=1.0)
    solo = jax.jit(
        lambda ids, num, key: generate(pair(), ids, num, key=key, config=config, max_new_tokens=NEW),
        compiler_options=QUICK,
    )
    for row, prompt in enumerate(zip(*make_prompts(), strict=True)):
        alone = jax.device_get(solo(*prompt))
        jax.tree.map(lambda one, all, row=row: np.testing.assert_array_equal(one, all[row]), alone, batch)
