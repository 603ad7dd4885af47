"""Sampling: ties, filters, keys, and that trie verification leaves the target's distribution alone."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from reanchor_jax import sampling
from reanchor_jax.accept import accept_path
from reanchor_jax.attach import Paths
from reanchor_jax.config import DecodeConfig
from reanchor_jax.draft import draft_key
from reanchor_jax.sampling import (
    choose_target_tokens,
    filter_logits,
    position_noise,
    sample_tokens,
    token_logprobs,
    top_tokens,
)
from reanchor_jax.trie import merge_trie
from tests.tiny import QUICK

SEEDS = 200_000
ALPHA = 1e-3
"""A chi-square test below this fails. Seeds are fixed, so a pass stays a pass."""


@functools.partial(jax.jit, static_argnames="config")
def choose(logits: jax.Array, noise: jax.Array | None, config: DecodeConfig) -> jax.Array:
    return choose_target_tokens(logits, noise, config)


# Ties and filters


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_equal_logits_give_the_lowest_id(temperature):
    logits = jnp.array([[0.0, 2.0, 2.0, 2.0], [1.0, 1.0, 1.0, 1.0], [-3.0, -5.0, -3.0, -9.0]])
    noise = None if temperature == 0 else jnp.zeros_like(logits)
    assert choose(logits, noise, DecodeConfig(temperature=temperature)).tolist() == [1, 0, 0]


def plain_filter(logits: np.ndarray, config: DecodeConfig) -> np.ndarray:
    """Which tokens stay, one row, by sorting and adding up."""
    keep = np.ones(len(logits), bool)
    order = np.argsort(-logits, kind="stable")
    if config.top_k:
        keep[order[config.top_k :]] = False
    probs = np.where(keep, np.exp(logits), 0)
    probs /= probs.sum()
    if config.top_p < 1:
        total = 0.0
        for token in order:
            if total >= config.top_p:
                keep[token] = False
            total += probs[token]
    return keep & (probs >= config.min_p * probs.max())


FILTERS = [
    DecodeConfig(top_k=1),
    DecodeConfig(top_k=5),
    DecodeConfig(top_k=100),
    DecodeConfig(top_p=0.3),
    DecodeConfig(top_p=0.95),
    DecodeConfig(min_p=0.2),
    DecodeConfig(min_p=1.0),
    DecodeConfig(top_k=6, top_p=0.8, min_p=0.1),
]


@pytest.mark.parametrize("config", FILTERS, ids=lambda c: f"k{c.top_k}-p{c.top_p}-m{c.min_p}")
def test_filters_equal_plain_loops(config):
    logits = np.random.default_rng(0).normal(size=(200, 12)).astype(np.float32) * 2
    filtered = np.asarray(filter_logits(jnp.asarray(logits), config))
    keep = np.stack([plain_filter(row, config) for row in logits.astype(np.float64)])
    np.testing.assert_array_equal(np.isfinite(filtered), keep)
    np.testing.assert_array_equal(filtered[keep], logits[keep])  # what stays is not changed
    assert config.top_k == 100 or not keep.all()


def test_docstring_example():
    logits = jnp.log(jnp.array([[0.5, 0.3, 0.15, 0.05]]))
    for config in (DecodeConfig(top_p=0.6), DecodeConfig(min_p=0.5)):
        assert jnp.isfinite(filter_logits(logits, config)).tolist() == [[True, True, False, False]]


def test_tokens_tied_with_the_last_kept_one_stay():
    logits = jnp.array([[3.0, 1.0, 1.0, 0.0]])
    assert jnp.isfinite(filter_logits(logits, DecodeConfig(top_k=2))).tolist() == [[True, True, True, False]]


# One token of many


@pytest.mark.parametrize("vocab_size", [1, 7, 96, 128, 129, 49152 // 8])
def test_top_tokens_is_argmax(vocab_size):
    """Also where equal logits stand in one chunk or in several, and where V is odd or smaller than a chunk."""
    rng = np.random.default_rng(vocab_size)
    smooth, tied = rng.normal(size=(2, 3, vocab_size)), rng.integers(0, 3, size=(2, 3, vocab_size)) - 2.0
    lost = np.full((1, vocab_size), -np.inf)
    for logits in (smooth, tied, tied[0, 0], lost):
        tokens = jax.jit(top_tokens)(jnp.asarray(logits, jnp.float32))
        assert tokens.dtype == jnp.int32
        np.testing.assert_array_equal(tokens, np.argmax(logits.astype(np.float32), axis=-1))


def test_sample_tokens_docstring_example(monkeypatch):
    monkeypatch.setattr(sampling.math, "gcd", lambda most, size: 2)
    logits, uniform = jnp.log(jnp.array([0.5, 0.1, 0.2, 0.2])), jnp.array([0.0, 0.49, 0.51, 0.61, 0.7, 0.81, 1.0])
    assert sample_tokens(jnp.broadcast_to(logits, (7, 4)), uniform).tolist() == [0, 0, 1, 2, 2, 3, 3]


@pytest.mark.parametrize("vocab_size", [5, 384])
def test_sample_tokens_inverts_the_distribution(vocab_size):
    """Every token gets its share of evenly spaced numbers; none that is impossible is drawn."""
    rng = np.random.default_rng(0)
    logits = rng.normal(size=vocab_size) * 3
    logits[[0, vocab_size // 2, vocab_size - 1]] = -np.inf
    probs = np.exp(logits) / np.exp(logits).sum()
    uniform = (np.arange(SEEDS, dtype=np.float32) + 0.5) / SEEDS
    draw = jax.jit(jax.vmap(sample_tokens, in_axes=(None, 0)))
    counts = np.bincount(draw(jnp.asarray(logits, jnp.float32), jnp.asarray(uniform)), minlength=vocab_size)
    assert not counts[probs == 0].any()
    np.testing.assert_allclose(counts, probs * SEEDS, atol=3)  # at either end of its range one, or rounding


# Keys


def test_noise_of_a_position_depends_on_key_and_position_alone():
    config, key = DecodeConfig(temperature=1.0), jax.random.key(3)
    rows = position_noise(key, jnp.arange(50, 60), 7, config)
    again = position_noise(key, jnp.array([57, 3, 50]), 7, config)
    assert rows is not None and again is not None
    np.testing.assert_array_equal(again[jnp.array([0, 2])], rows[jnp.array([7, 0])])
    other = position_noise(jax.random.key(4), jnp.arange(50, 60), 7, config)
    assert other is not None and not np.any(np.asarray(other) == np.asarray(rows))
    assert position_noise(key, jnp.arange(3), 7, DecodeConfig()) is None


def test_no_key_serves_twice():
    """Target noise, draft noise and attachment draws of 4096 positions all use different keys."""
    key, positions = jax.random.key(0), jnp.arange(4096)
    fold = jax.vmap(jax.random.fold_in, in_axes=(None, 0))
    # As used: noise by position; draft noise by length; random attachment by -1 - length.
    used = [fold(key, positions), fold(draft_key(key), positions), fold(draft_key(key), -1 - positions)]
    data = np.concatenate([jax.random.key_data(keys) for keys in used])
    assert len(np.unique(data, axis=0)) == 3 * 4096


def test_logprobs_are_the_unfiltered_softmax():
    logits = np.random.default_rng(1).normal(size=(5, 9)).astype(np.float32)
    tokens, rows = jnp.array([3, 1, 4, 1, 5]), jnp.array([4, 0, 0])
    config = DecodeConfig(temperature=0.5, top_k=2, logprobs=3)
    result = token_logprobs(jnp.asarray(logits), tokens, rows, config)
    expected = np.log(np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True))[[4, 0, 0]]
    np.testing.assert_allclose(result.chosen, expected[range(3), [5, 3, 3]], rtol=1e-5)
    np.testing.assert_array_equal(result.top_ids, np.argsort(-expected, axis=1)[:, :3])
    np.testing.assert_allclose(result.top, -np.sort(-expected, axis=1)[:, :3], rtol=1e-5)
    nothing = token_logprobs(jnp.asarray(logits), tokens, rows, DecodeConfig())
    assert nothing.top.shape == (3, 0) and not np.any(nothing.chosen)


# Distribution: vocabulary of 4, trie of the two likeliest tokens at both depths


FIRST = np.array([0.45, 0.3, 0.15, 0.1])
SECOND = np.array([[0.1, 0.2, 0.3, 0.4], [0.6, 0.2, 0.12, 0.08], [0.26, 0.24, 0.4, 0.1], [0.04, 0.06, 0.1, 0.8]])


@functools.partial(jax.jit, static_argnames="config", compiler_options=QUICK)
def two_tokens(keys: jax.Array, config: DecodeConfig) -> tuple[jax.Array, jax.Array]:
    """For every key the two tokens behind the anchor, and the number of accepted drafts.

    The trie drafts {0, 1} at depth 1 and {0, 1} below each. Where the first token is not among
    them, the second comes from the next round, whose anchor it then is.
    """
    paths = [[9, a, b, 0, 0] for a in (0, 1) for b in (0, 1)]
    lengths = jnp.full(4, 3, jnp.int32)
    trie = merge_trie(Paths(jnp.array(paths, jnp.int32), lengths, jnp.zeros_like(lengths)), 8)
    first, second = jnp.log(jnp.asarray(FIRST, jnp.float32)), jnp.log(jnp.asarray(SECOND, jnp.float32))
    logits = jnp.where((trie.depths == 0)[:, None], first[None, :], second[trie.tokens % 4])

    def one(key: jax.Array) -> tuple[jax.Array, jax.Array]:
        noise = position_noise(key, jnp.array([11, 12, 13]), 4, config)
        assert noise is not None
        targets = choose_target_tokens(logits, noise[trie.depths], config)
        accepted = accept_path(trie, targets)
        issued = targets[jnp.maximum(accepted.nodes, 0)]  # tokens behind each accepted node
        following = choose_target_tokens(second[issued[0]][None], noise[1:2], config)[0]
        return jnp.stack([issued[0], jnp.where(accepted.count > 0, issued[1], following)]), accepted.count

    return jax.vmap(one)(keys)


def filtered(probs: np.ndarray, config: DecodeConfig) -> np.ndarray:
    """The distribution that temperature and filters make of each row, in NumPy."""
    logits = np.log(probs) / config.temperature
    kept = np.where([plain_filter(row, config) for row in logits], np.exp(logits), 0)
    return kept / kept.sum(axis=1, keepdims=True)


@pytest.mark.parametrize(
    "config",
    [DecodeConfig(temperature=1.0), DecodeConfig(temperature=0.7), DecodeConfig(temperature=1.3, top_k=3, min_p=0.2)],
    ids=["plain", "cold", "filtered"],
)
def test_verified_tokens_follow_the_target(config):
    tokens, count = jax.device_get(two_tokens(jax.random.split(jax.random.key(42), SEEDS), config))
    assert set(count.tolist()) == {0, 1, 2}  # depth 1 and depth 2 both accept and reject
    first, second = filtered(FIRST[None], config)[0], filtered(SECOND, config)
    joint = (first[:, None] * second).reshape(-1)
    observed = np.bincount(tokens[:, 0] * 4 + tokens[:, 1], minlength=16)
    possible = joint > 0
    assert observed[~possible].sum() == 0
    assert stats.chisquare(observed[possible], joint[possible] * SEEDS).pvalue > ALPHA
    marginal = np.bincount(tokens[:, 0], minlength=4)[first > 0]
    assert stats.chisquare(marginal, first[first > 0] * SEEDS).pvalue > ALPHA


def test_the_chi_square_sees_the_importance_ratio_rule():
    """Control: accepting the drafter's top token with min(1, p/q) is biased, and this test would see it."""
    rng = np.random.default_rng(0)
    draft_probs = np.array([0.6, 0.2, 0.1, 0.1])
    accepted = rng.random(SEEDS) < min(1.0, FIRST[0] / draft_probs[0])  # draft: always token 0
    residual = np.maximum(FIRST - draft_probs, 0)
    tokens = np.where(accepted, 0, rng.choice(4, SEEDS, p=residual / residual.sum()))
    assert stats.chisquare(np.bincount(tokens, minlength=4), FIRST * SEEDS).pvalue < 1e-9
