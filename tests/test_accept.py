"""Acceptance: the walk through the trie against plain loops."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reanchor_jax.accept import Accepted, accept_path
from reanchor_jax.attach import Paths
from reanchor_jax.trie import Trie, merge_trie
from tests import oracle
from tests.test_trie import as_paths, path_sets, random_paths
from tests.tiny import QUICK

SIZES = range(2, 17)
CASES = 680
"""Random verified tries for each block size."""


@functools.partial(jax.jit, static_argnames="num_nodes", compiler_options=QUICK)
def accept_all(tokens: jax.Array, lengths: jax.Array, targets: jax.Array, num_nodes: int) -> tuple[Trie, Accepted]:
    """Merges a batch of path sets and walks each trie with the target's token of every node."""

    def one(tokens: jax.Array, lengths: jax.Array, targets: jax.Array) -> tuple[Trie, Accepted]:
        trie = merge_trie(Paths(tokens, lengths, jnp.zeros_like(lengths)), num_nodes)
        return trie, accept_path(trie, targets)

    return jax.vmap(one)(tokens, lengths, targets)


def check(tokens: np.ndarray, lengths: np.ndarray, targets: np.ndarray, accepted: Accepted) -> int:
    """One walk against the oracle's; returns the number of accepted drafts."""
    nodes = oracle.merge(as_paths(tokens, lengths), len(targets)).nodes
    expected = oracle.accept(nodes, dict(zip(nodes, targets.tolist(), strict=False)))
    index = {node: n for n, node in enumerate(nodes)}
    spare = len(accepted.nodes) - len(expected)
    assert accepted.nodes.tolist() == [index[node] for node in expected] + [-1] * spare
    assert accepted.count == len(expected) - 1
    return len(expected) - 1


@pytest.mark.parametrize("size", SIZES)
def test_walk_equals_plain_loops(size):
    rng = np.random.default_rng(100 + size)
    budget = 3 * size
    tokens, lengths = random_paths(rng, CASES, size)
    # Tokens of both small and large alphabets; unused nodes get some too and must not be walked to.
    targets = rng.integers(0, 2**20, (CASES, budget)) % rng.integers(1, 4, (CASES, 1))
    # A third of the cases follows its first path to the end.
    trie, _ = jax.device_get(accept_all(tokens, lengths, targets.astype(np.int32), budget))
    for case in range(0, CASES, 3):
        path = trie.path_nodes[case, rng.integers(0, size)]
        path = path[path >= 0]
        targets[case, path[:-1]] = trie.tokens[case, path[1:]]
    targets = targets.astype(np.int32)
    _, accepted = jax.device_get(accept_all(tokens, lengths, targets, budget))
    counts = [
        check(tokens[case], lengths[case], targets[case], jax.tree.map(lambda x, case=case: x[case], accepted))
        for case in range(CASES)
    ]
    assert min(counts) == 0 and max(counts) >= size - 1


@settings(max_examples=100, deadline=None, derandomize=True)
@given(path_sets(), st.data())
def test_walk_equals_plain_loops_shrinking(paths, data):
    tokens, lengths = paths
    budget = 2 * len(tokens)
    targets = np.array(data.draw(st.lists(st.integers(0, 2), min_size=budget, max_size=budget)), np.int32)
    _, accepted = jax.device_get(accept_all(tokens[None], lengths[None], targets[None], budget))
    check(tokens, lengths, targets, jax.tree.map(lambda x: x[0], accepted))


def accept_one(paths: list[list[int]], targets: list[int]) -> Accepted:
    width = 2 * len(paths[0]) - 1
    tokens = jnp.array([path + [0] * (width - len(path)) for path in paths], jnp.int32)
    lengths = jnp.array([len(path) for path in paths], jnp.int32)
    _, accepted = accept_all(tokens[None], lengths[None], jnp.array([targets], jnp.int32), len(targets))
    return jax.tree.map(lambda x: x[0], jax.device_get(accepted))


def test_path_changes_blocks_where_the_target_does():
    # Nodes 1 2 3 | 4(token 7, below node 1) | 5(token 8, below node 4): the walk is 0 1 4 5.
    accepted = accept_one([[1, 2, 3], [1, 2, 7, 8]], [2, 7, 0, 8, 0, 0])
    assert accepted.nodes.tolist() == [0, 1, 3, 4, -1] and accepted.count == 3


def test_right_token_below_a_wrong_parent_is_not_accepted():
    # The target says 9 behind the anchor: node 1 (token 2) is wrong, its child's token is "right".
    accepted = accept_one([[1, 2, 3]], [9, 3, 3])
    assert accepted.nodes.tolist() == [0, -1, -1, -1, -1] and accepted.count == 0


def test_unused_nodes_are_never_accepted():
    # Unused nodes hold token 0 and have no parent; a target that says 0 everywhere reaches none.
    accepted = accept_one([[0, 5, 5]], [0] * 6)
    assert accepted.count == 0
