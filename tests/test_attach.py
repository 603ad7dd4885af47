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
def attach_all(blocks: Blocks, keys: jax.Array) -> dict[str, Paths]:
    """Every rule on a batch of block sets."""
    return {rule: jax.vmap(lambda b, k, rule=rule: attach_blocks(b, rule, k))(blocks, keys) for rule in RULES}


def check(blocks: Blocks, paths: Paths, rule: str) -> None:
    """One block set's paths against the oracle's."""
    tokens, valid, lengths = blocks
    baseline = tokens[0, : lengths[0]].tolist()
    assert paths.sites[0] == 0 and paths.tokens[0, : len(baseline)].tolist() == baseline
    assert paths.lengths[0] == len(baseline)
    for offset in range(1, len(tokens)):
        block = tokens[offset, : lengths[offset]].tolist()
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


def random_blocks(rng: np.random.Generator, num: int, size: int) -> Blocks:
    """Block sets over alphabets from 1 token (everything matches) to 2B; 1 to B blocks are real, half the sets cut."""
    alphabet = rng.integers(1, 2 * size + 1, (num, 1, 1))
    tokens = rng.integers(0, 2**20, (num, size, size)) % alphabet
    valid = np.arange(size)[None, :] < rng.integers(1, size + 1, (num, 1))
    lengths = np.where(rng.random((num, 1)) < 0.5, size, rng.integers(1, size + 1, (num, size)))
    return Blocks(tokens.astype(np.int32), valid, lengths.astype(np.int32))


@pytest.mark.parametrize("size", SIZES)
def test_rules_equal_plain_loops(size):
    rng = np.random.default_rng(size)
    blocks = random_blocks(rng, CASES, size)
    result = jax.device_get(attach_all(blocks, jax.random.split(jax.random.key(size), CASES)))
    for rule in RULES:
        for case in range(CASES):
            check(*jax.tree.map(lambda x, case=case: x[case], (blocks, result[rule])), rule)
    # Both extremes of T* occur, and dropped blocks too: the sweep is not of one kind.
    sites = result["earliest"].sites[:, 1:]
    assert (sites == 0).any() and (sites == size - 1).any() and (sites == -1).any()


@st.composite
def block_sets(draw) -> Blocks:
    size = draw(st.sampled_from([2, 3, 5]))
    token = st.integers(0, draw(st.integers(0, 4)))
    rows = draw(st.lists(st.lists(token, min_size=size, max_size=size), min_size=size, max_size=size))
    lengths = draw(st.lists(st.integers(1, size), min_size=size, max_size=size))
    valid = np.arange(size) < draw(st.integers(1, size))
    return Blocks(np.array(rows, np.int32), valid, np.array(lengths, np.int32))


@settings(max_examples=150, deadline=None, derandomize=True)
@given(block_sets(), st.integers(0, 2**31))
def test_rules_equal_plain_loops_shrinking(blocks, seed):
    result = jax.device_get(attach_all(jax.tree.map(lambda x: x[None], blocks), jax.random.key(seed)[None]))
    for rule in RULES:
        check(blocks, jax.tree.map(lambda x: x[0], result[rule]), rule)


def attach_one(rows: list[list[int]], rule: AttachRule, seed: int = 0, lengths: list[int] | None = None) -> Paths:
    tokens = jnp.array([rows], jnp.int32)
    lengths = [tokens.shape[2]] * len(rows) if lengths is None else lengths
    blocks = Blocks(tokens, jnp.ones(tokens.shape[:2], bool), jnp.array([lengths], jnp.int32))
    paths = attach_all(blocks, jax.random.key(seed)[None])
    return jax.tree.map(lambda x: x[0], jax.device_get(paths[rule]))


def test_docstring_example():
    a, b, c, d, x, y, z = range(7)
    paths = attach_one([[a, b, c, d], [9, 9, 9, 9], [b, x, y, z]], "earliest")
    assert paths.sites.tolist() == [0, -1, 1]
    assert paths.lengths.tolist() == [4, 0, 5]
    assert paths.tokens[2, :5].tolist() == [a, b, x, y, z]
    cut = attach_one([[a, b, c, d], [9, 9, 9, 9], [b, x, y, z]], "earliest", lengths=[3, 4, 2])
    assert cut.sites.tolist() == [0, -1, 1] and cut.lengths.tolist() == [3, 0, 3]
    assert cut.tokens[2, :3].tolist() == [a, b, x]


def test_a_cut_baseline_offers_no_site_behind_its_end():
    # Token 7 stands in slot 2 of the baseline, which is cut before it.
    rows, lengths = [[5, 6, 7, 8], [7, 1, 1, 1], [7, 2, 2, 2], [7, 3, 3, 3]], [2, 4, 4, 4]
    assert attach_one(rows, "earliest", lengths=lengths).sites.tolist() == [0, -1, -1, -1]
    assert attach_one(rows, "longest", lengths=lengths).sites.tolist() == [0, -1, -1, -1]
    paths = attach_one(rows, "fallback", lengths=lengths)
    assert paths.sites.tolist() == [0, 1, 2, -1]  # right at its end is the last place without a match
    assert paths.tokens[2, :6].tolist() == [5, 6, 7, 2, 2, 2]


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
        attach_blocks, Blocks(jnp.array([[1, 1, 0, 1], [1, 2, 3, 4]]), jnp.ones(2, bool), jnp.full(2, 4)), "random"
    )
    sites = jax.jit(jax.vmap(draw))(jax.random.split(jax.random.key(0), 3000)).sites[:, 1]
    counts = np.bincount(np.asarray(sites), minlength=4)
    assert counts[2] == 0 and np.all(np.abs(counts[[0, 1, 3]] - 1000) < 130)
