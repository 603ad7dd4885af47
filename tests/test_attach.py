"""Attachment: all six rules against plain loops on random blocks."""

from __future__ import annotations

import functools
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reanchor_jax.attach import Paths, attach_blocks
from reanchor_jax.config import AttachRule
from reanchor_jax.draft import Blocks
from tests import oracle
from tests.tiny import QUICK

RULES = get_args(AttachRule)
SIZES = range(2, 17)
CASES = 680
"""Random block sets for each block size."""


@functools.partial(jax.jit, compiler_options=QUICK)
def attach_all(tokens: jax.Array, valid: jax.Array, keys: jax.Array) -> dict[str, Paths]:
    """Every rule on a batch of block sets."""
    return {
        rule: jax.vmap(lambda t, v, k, rule=rule: attach_blocks(Blocks(t, v), rule, k))(tokens, valid, keys)
        for rule in RULES
    }


def check(tokens: np.ndarray, valid: np.ndarray, paths: Paths, rule: str) -> None:
    """One block set's paths against the oracle's."""
    baseline = tokens[0].tolist()
    assert paths.sites[0] == 0 and paths.tokens[0, : len(baseline)].tolist() == baseline
    assert paths.lengths[0] == len(baseline)
    for offset in range(1, len(tokens)):
        block = tokens[offset].tolist()
        site, length = int(paths.sites[offset]), int(paths.lengths[offset])

        def drawn(sites: list[int], site: int = site) -> int:
            assert site in sites  # what is random is which of T, not whether
            return site

        expected = oracle.attach_site(baseline, block, offset, rule, drawn) if valid[offset] else None
        if expected is None:
            assert site == -1 and length == 0
        else:
            path = oracle.attach(baseline, block, expected)
            assert site == expected and length == len(path)
            assert tuple(paths.tokens[offset, :length].tolist()) == path


def random_blocks(rng: np.random.Generator, num: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Block sets over alphabets from 1 token (everything matches) to 2B; 1 to B blocks are real."""
    alphabet = rng.integers(1, 2 * size + 1, (num, 1, 1))
    tokens = rng.integers(0, 2**20, (num, size, size)) % alphabet
    valid = np.arange(size)[None, :] < rng.integers(1, size + 1, (num, 1))
    return tokens.astype(np.int32), valid


@pytest.mark.parametrize("size", SIZES)
def test_rules_equal_plain_loops(size):
    rng = np.random.default_rng(size)
    tokens, valid = random_blocks(rng, CASES, size)
    result = jax.device_get(attach_all(tokens, valid, jax.random.split(jax.random.key(size), CASES)))
    for rule in RULES:
        for case in range(CASES):
            check(tokens[case], valid[case], jax.tree.map(lambda x, case=case: x[case], result[rule]), rule)
    # Both extremes of T* occur, and dropped blocks too: the sweep is not of one kind.
    sites = result["earliest"].sites[:, 1:]
    assert (sites == 0).any() and (sites == size - 1).any() and (sites == -1).any()


@st.composite
def block_sets(draw) -> tuple[np.ndarray, np.ndarray]:
    size = draw(st.sampled_from([2, 3, 5]))
    token = st.integers(0, draw(st.integers(0, 4)))
    rows = draw(st.lists(st.lists(token, min_size=size, max_size=size), min_size=size, max_size=size))
    return np.array(rows, np.int32), np.arange(size) < draw(st.integers(1, size))


@settings(max_examples=150, deadline=None, derandomize=True)
@given(block_sets(), st.integers(0, 2**31))
def test_rules_equal_plain_loops_shrinking(blocks, seed):
    tokens, valid = blocks
    result = jax.device_get(attach_all(tokens[None], valid[None], jax.random.key(seed)[None]))
    for rule in RULES:
        check(tokens, valid, jax.tree.map(lambda x: x[0], result[rule]), rule)


def attach_one(rows: list[list[int]], rule: AttachRule, seed: int = 0) -> Paths:
    paths = attach_all(jnp.array([rows], jnp.int32), jnp.ones((1, len(rows)), bool), jax.random.key(seed)[None])
    return jax.tree.map(lambda x: x[0], jax.device_get(paths[rule]))


def test_docstring_example():
    a, b, c, d, x, y, z = range(7)
    paths = attach_one([[a, b, c, d], [9, 9, 9, 9], [b, x, y, z]], "earliest")
    assert paths.sites.tolist() == [0, -1, 1]
    assert paths.lengths.tolist() == [4, 0, 5]
    assert paths.tokens[2, :5].tolist() == [a, b, x, y, z]


@pytest.mark.parametrize(
    ("rule", "site"),
    [("earliest", 1), ("fixed", -1), ("fixed_unmatched", 2), ("longest", 3), ("fallback", 1)],
)
def test_rules_differ_where_they_should(rule, site):
    # Token 7 stands in slots 1 and 3 of the baseline, not in slot 2; from slot 3 the block agrees longer.
    paths = attach_one([[5, 7, 0, 7, 8, 9], [0] * 6, [7, 8, 9, 1, 2, 3]], rule)
    assert paths.sites[2] == site


def test_no_match_is_dropped_but_for_the_unmatched_rules():
    sites = {rule: int(attach_one([[1, 2, 3], [0, 0, 0], [9, 1, 2]], rule).sites[2]) for rule in RULES}
    assert sites == {"earliest": -1, "fixed": -1, "fixed_unmatched": 2, "random": -1, "longest": -1, "fallback": 2}


def test_longest_takes_the_earliest_of_equally_long_runs():
    assert attach_one([[4, 4, 4, 4], [4, 9, 9, 9]], "longest").sites[1] == 0


def test_site_at_the_anchor_is_legal():
    paths = attach_one([[3, 1, 2], [3, 8, 8]], "earliest")
    assert paths.sites[1] == 0 and paths.tokens[1, :3].tolist() == [3, 8, 8] and paths.lengths[1] == 3


def test_random_draws_every_site_evenly():
    # Token 1 stands in three of four slots; 3000 draws, a third each (5 sigma are 130).
    draw = functools.partial(
        attach_blocks, Blocks(jnp.array([[1, 1, 0, 1], [1, 2, 3, 4]]), jnp.ones(2, bool)), "random"
    )
    sites = jax.jit(jax.vmap(draw))(jax.random.split(jax.random.key(0), 3000)).sites[:, 1]
    counts = np.bincount(np.asarray(sites), minlength=4)
    assert counts[2] == 0 and np.all(np.abs(counts[[0, 1, 3]] - 1000) < 130)
