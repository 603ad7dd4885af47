"""Trie merge: nodes, parents, depths, ancestors, path mapping and budget against dictionaries."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reanchor_jax.attach import Paths
from reanchor_jax.config import DecodeConfig
from reanchor_jax.trie import Trie, merge_trie
from tests import oracle
from tests.tiny import QUICK

SIZES = range(2, 17)
CASES = 680
"""Random path sets for each block size: 10,200 in all."""


@functools.partial(jax.jit, static_argnames="num_nodes", compiler_options=QUICK)
def merge_all(tokens: jax.Array, lengths: jax.Array, num_nodes: int) -> Trie:
    """A batch of path sets [C, A, W]."""
    return jax.vmap(lambda t, n: merge_trie(Paths(t, n, jnp.zeros_like(n)), num_nodes))(tokens, lengths)


def random_paths(rng: np.random.Generator, num: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Path sets as attachment makes them: a baseline of B tokens and up to B-1 longer ones, or cut ones.

    Alphabets from one token (all paths share all nodes) upwards; many paths copy a part of an
    earlier one, some the whole of it; some are dropped.
    """
    width = 2 * size - 1
    tokens = rng.integers(0, 2**20, (num, size, width)) % rng.integers(1, 5, (num, 1, 1))
    tokens[:, :, 0] = tokens[:, :1, 0]
    for path in range(1, size):
        source = rng.integers(0, path, num)
        copied = np.arange(width)[None, :] < rng.integers(0, width + 1, (num, 1))
        tokens[:, path] = np.where(copied, tokens[np.arange(num), source], tokens[:, path])
    lengths = size + rng.integers(0, size, (num, size))
    # Schedules cut any path, the baseline too: in a third of the sets.
    lengths = np.where(rng.random((num, 1)) < 0.33, rng.integers(1, lengths + 1), lengths)
    baseline = np.minimum(lengths[:, 0], size)
    lengths = np.where(rng.random((num, size)) < 0.2, 0, lengths)
    lengths[:, 0] = baseline
    return tokens.astype(np.int32), lengths.astype(np.int32)


def as_paths(tokens: np.ndarray, lengths: np.ndarray) -> list[oracle.Path | None]:
    return [tuple(row[:n]) if n else None for row, n in zip(tokens.tolist(), lengths.tolist(), strict=True)]


def check(tokens: np.ndarray, lengths: np.ndarray, trie: Trie, budget: int) -> None:
    """One merged trie against the oracle's, field by field."""
    paths = as_paths(tokens, lengths)
    expected = oracle.merge(paths, budget)
    num = int(trie.num_nodes)
    assert (num, int(trie.num_cut)) == (len(expected.nodes), expected.num_cut)
    assert trie.valid.tolist() == [n < num for n in range(budget)]
    index = {node: n for n, node in enumerate(expected.nodes)}

    # Read every node back as the tokens on its way down, through parents alone.
    node_paths: list[oracle.Path] = []
    token_list, parents, depths = trie.tokens.tolist(), trie.parents.tolist(), trie.depths.tolist()
    for n in range(num):
        above = () if parents[n] < 0 else node_paths[parents[n]]  # a parent comes before its child
        node_paths.append((*above, token_list[n]))
        assert depths[n] == len(above)
    assert parents[num:] == [-1] * (budget - num)
    assert node_paths == expected.nodes
    assert trie.blocks[:num].tolist() == [expected.first_path[node] for node in expected.nodes]

    matrix = np.zeros((budget, budget), bool)
    for n, node in enumerate(expected.nodes):
        matrix[n, [index[above] for above in oracle.ancestors(node)]] = True
    np.testing.assert_array_equal(trie.ancestors, matrix)

    mapping = np.full(trie.path_nodes.shape, -1)
    for p, nodes in enumerate(expected.paths):
        for k, node in enumerate(nodes or ()):
            mapping[p, k] = index[node]
    np.testing.assert_array_equal(trie.path_nodes, mapping)


def check_budget(full: oracle.Trie, kept: list[oracle.Path]) -> None:
    """What a budget may do, whatever its tie order: said apart from the oracle's order."""
    baseline = full.paths[0]
    assert baseline is not None and kept[: len(baseline)] == baseline
    assert all(node[:-1] in kept for node in kept if len(node) > 1)
    cut = set(full.nodes) - set(kept)
    extra = [len(node) for node in kept[len(baseline) :]]
    assert all(len(node) >= max(extra, default=0) for node in cut)


@pytest.mark.parametrize("size", SIZES)
def test_merge_equals_dictionaries(size):
    rng = np.random.default_rng(size)
    tokens, lengths = random_paths(rng, CASES, size)
    most = size + (size - 1) * (2 * size - 2)  # every path shares the anchor alone
    # Half of the cases without a cut, half with one of three small budgets.
    for part, budget in enumerate((most, (size, size + 1, 2 * size - 1)[size % 3])):
        chosen = slice(part, None, 2)
        tries = jax.device_get(merge_all(tokens[chosen], lengths[chosen], budget))
        for case, (t, n) in enumerate(zip(tokens[chosen], lengths[chosen], strict=True)):
            trie = jax.tree.map(lambda x, case=case: x[case], tries)
            check(t, n, trie, budget)
            check_budget(oracle.merge(as_paths(t, n)), oracle.merge(as_paths(t, n), budget).nodes)
        assert (tries.num_cut > 0).any() == (budget != most)


@st.composite
def path_sets(draw) -> tuple[np.ndarray, np.ndarray]:
    size = draw(st.sampled_from([2, 4]))
    token = st.integers(0, draw(st.integers(0, 2)))
    row = st.lists(token, min_size=2 * size - 1, max_size=2 * size - 1)
    tokens = np.array(draw(st.lists(row, min_size=size, max_size=size)), np.int32)
    tokens[:, 0] = 0
    length = st.sampled_from([0, *range(size, 2 * size)])
    lengths = [size, *draw(st.lists(length, min_size=size - 1, max_size=size - 1))]
    return tokens, np.array(lengths, np.int32)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(path_sets(), st.sampled_from([1, 2, 4]))
def test_merge_equals_dictionaries_shrinking(paths, times):
    tokens, lengths = paths
    budget = len(tokens) * times
    trie = jax.device_get(merge_all(tokens[None], lengths[None], budget))
    check(tokens, lengths, jax.tree.map(lambda x: x[0], trie), budget)


def merge_one(paths: list[list[int]], num_nodes: int) -> Trie:
    width = 2 * len(paths[0]) - 1
    tokens = jnp.array([path + [0] * (width - len(path)) for path in paths], jnp.int32)
    lengths = jnp.array([len(path) for path in paths], jnp.int32)
    return jax.tree.map(lambda x: x[0], jax.device_get(merge_all(tokens[None], lengths[None], num_nodes)))


def test_docstring_example():
    a, b, c, d, e = range(5)
    trie = merge_one([[a, b, c], [a, b, d, e]], 8)
    assert trie.num_nodes == 5 and trie.num_cut == 0
    assert trie.tokens[:5].tolist() == [a, b, c, d, e]
    assert trie.parents.tolist() == [-1, 0, 1, 1, 3, -1, -1, -1]
    assert trie.depths[:5].tolist() == [0, 1, 2, 2, 3]
    assert trie.path_nodes.tolist() == [[0, 1, 2, -1, -1], [0, 1, 3, 4, -1]]


def test_same_path_twice_adds_nothing():
    assert merge_one([[1, 2, 3], [1, 2, 3, 4], [1, 2, 3, 4]], 9).num_nodes == 4


def test_budget_cuts_the_deepest_and_never_the_baseline():
    trie = merge_one([[1, 2, 3, 4], [1, 2, 9, 9, 9, 9], [1, 8]], 6)
    # Nodes 1 2 3 4, then by depth: 8 (depth 1), 9 (depth 2) | cut: 9 9 9 of depths 3, 4, 5.
    assert trie.tokens.tolist() == [1, 2, 3, 4, 8, 9] and trie.num_nodes == 6 and trie.num_cut == 3
    assert trie.path_nodes[1].tolist() == [0, 1, 5, -1, -1, -1, -1]


@pytest.mark.parametrize("size", [2, 7, 16])
def test_a_trie_has_at_most_block_size_squared_nodes(size):
    """B*B nodes at most: blocks that share nothing, each attached behind its own baseline slot."""
    baseline = [0, *range(100, 99 + size)]
    shifted = [baseline[:d] + [1000 * d + k for k in range(size)] for d in range(1, size)]
    trie = merge_one([baseline, *shifted], DecodeConfig(nodes=1000).num_nodes(size))
    assert trie.num_nodes == size * size == DecodeConfig(nodes=1000).num_nodes(size) and trie.num_cut == 0
    assert DecodeConfig().num_nodes(size) == min(4 * size, size * size)
