"""Commit writes what was accepted and nothing else; retention keeps what the paper says."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reanchor_jax.accept import Accepted, accept_path
from reanchor_jax.attach import Paths
from reanchor_jax.cache import KVCache
from reanchor_jax.commit import Committed, commit, retain_suffix
from reanchor_jax.config import RetainRule
from reanchor_jax.pair import Pair
from reanchor_jax.sampling import TokenLogprobs
from reanchor_jax.state import DecodeState, Suffix
from reanchor_jax.trie import merge_trie
from reanchor_jax.verify import Verdict
from tests import oracle
from tests.test_trie import as_paths, random_paths
from tests.tiny import QUICK, make_pair

SLOTS = 24


# Retention


def node_verdict(targets: jax.Array) -> Verdict:
    """A verdict whose features are node numbers, so that what is kept can be told."""
    numbers = jnp.arange(targets.shape[0], dtype=jnp.float32)[:, None]
    return Verdict(targets, None, numbers, ())


@functools.partial(jax.jit, static_argnames="num_nodes", compiler_options=QUICK)
def retain_all(tokens: jax.Array, lengths: jax.Array, targets: jax.Array, num_nodes: int) -> dict[str, Suffix]:
    """Both rules on a batch of verified path sets."""

    def one(tokens: jax.Array, lengths: jax.Array, targets: jax.Array) -> dict[str, Suffix]:
        trie = merge_trie(Paths(tokens, lengths, jnp.zeros_like(lengths)), num_nodes)
        accepted = accept_path(trie, targets)
        verdict = node_verdict(targets)
        rules = get_args(RetainRule)
        return {rule: retain_suffix(trie, verdict, accepted, rule, tokens.shape[0] - 1) for rule in rules}

    return jax.vmap(one)(tokens, lengths, targets)


@pytest.mark.parametrize("size", [2, 3, 5, 8, 16])
def test_retention_equals_plain_loops(size):
    rng = np.random.default_rng(size)
    budget, cases = 2 * size, 240
    tokens, lengths = random_paths(rng, cases, size)
    targets = (rng.integers(0, 2**20, (cases, budget)) % rng.integers(1, 4, (cases, 1))).astype(np.int32)
    result = jax.device_get(retain_all(tokens, lengths, targets, budget))
    counts = {rule: [] for rule in result}
    for case in range(cases):
        trie = oracle.merge(as_paths(tokens[case], lengths[case]), budget)
        index = {node: n for n, node in enumerate(trie.nodes)}
        accepted = oracle.accept(trie.nodes, dict(zip(trie.nodes, targets[case].tolist(), strict=False)))
        for rule, suffix in result.items():
            kept = [index[node] for node in oracle.retain(trie, accepted, rule, size)]
            count = int(suffix.count[case])
            assert count == len(kept)
            assert suffix.features[case, :count, 0].tolist() == kept
            assert suffix.tokens[case, :count].tolist() == targets[case, kept].tolist()
            counts[rule].append(count)
    assert counts["baseline"] != counts["accepted_path"]
    assert min(counts["baseline"]) == 0 and max(counts["accepted_path"]) == size - 1


def retain_one(paths: list[list[int]], targets: list[int], rule: str) -> list[int]:
    """Node numbers that a rule keeps."""
    width = 2 * len(paths[0]) - 1
    tokens = jnp.array([path + [0] * (width - len(path)) for path in paths], jnp.int32)
    lengths = jnp.array([len(path) for path in paths], jnp.int32)
    result = retain_all(tokens[None], lengths[None], jnp.array([targets], jnp.int32), len(targets))
    suffix = jax.device_get(result[rule])
    return suffix.features[0, : int(suffix.count[0]), 0].astype(int).tolist()


def test_docstring_example():
    # B = 4, one draft accepted: the baseline's nodes of depths 2 and 3.
    for rule in get_args(RetainRule):
        assert retain_one([[1, 2, 3, 4], [1], [1], [1]], [2, 9, 9, 9], rule) == [2, 3]


def test_rules_differ_off_the_baseline():
    # Path 1 leaves the baseline behind its second token; the target follows it for one node more.
    paths = [[1, 2, 3, 4], [1, 2, 5, 6, 7], [1], [1]]
    targets = [2, 5, 0, 0, 9, 0, 0]  # nodes 1 2 3 4 | 5 6 7: accepted 0 1 4
    assert retain_one(paths, targets, "baseline") == [3]
    assert retain_one(paths, targets, "accepted_path") == [5, 6]


def test_nothing_is_kept_behind_a_fully_accepted_block():
    paths = [[1, 2, 3], [1, 2, 3, 4, 5], [1]]
    whole, beyond = [2, 3, 9, 0, 0, 0], [2, 3, 4, 9, 0, 0]
    assert retain_one(paths, whole, "baseline") == [] and retain_one(paths, beyond, "baseline") == []
    assert retain_one(paths, whole, "accepted_path") == [3, 4]
    assert retain_one(paths, beyond, "accepted_path") == [4]


def test_longest_path_wins_and_ties_go_to_the_baseline_then_the_smallest_offset():
    none_accepted = [9] * 9
    assert retain_one([[1, 2, 3], [1, 4, 5], [1, 6, 7]], none_accepted, "accepted_path") == [1, 2]
    # Nodes 1 2 3 | 4 6 | 5 7 | 8 8: both longer paths have 4 tokens, the first is kept (at most B-1).
    assert retain_one([[1, 2, 3], [1, 4, 5, 8], [1, 6, 7, 8]], none_accepted, "accepted_path") == [3, 5]


# Commit


def make_state(
    pair: Pair, length: Any, prompt_len: Any, limit: Any, eos_ids: Any, done: Any, tokens: Any, rows: Any
) -> DecodeState:
    """A state whose caches hold `rows` [SLOTS]: slot s holds rows[s] everywhere."""
    layer = pair.target.config.layer
    assert pair.drafter is not None
    shape = (layer.num_kv_heads, SLOTS, layer.head_dim)

    def cache(num_layers: int) -> KVCache:
        kv = jnp.broadcast_to(rows[None, None, :, None], (num_layers, *shape))
        return KVCache(kv, kv + 0.5)

    return DecodeState(
        tokens=tokens,
        length=length,
        prompt_len=prompt_len,
        limit=limit,
        eos_ids=eos_ids,
        done=done,
        key=jax.random.key(0),
        cache=(cache(pair.target.config.num_layers),),
        context=cache(pair.drafter.config.num_layers),
        suffix=Suffix(jnp.zeros((3, 64)), jnp.zeros(3, jnp.int32), jnp.int32(0)),
        first_logprobs=TokenLogprobs(jnp.zeros(1), jnp.zeros((1, 0), jnp.int32), jnp.zeros((1, 0))),
    )


NODES = 10


def verdict_of(pair: Pair, targets: jax.Array, features: jax.Array) -> Verdict:
    """Node n's keys are 100 + n everywhere, its values 200 + n."""
    layer, num_layers = pair.target.config.layer, pair.target.config.num_layers
    shape = (num_layers, layer.num_kv_heads, NODES, layer.head_dim)
    numbers = jnp.broadcast_to(jnp.arange(NODES, dtype=jnp.float32)[None, None, :, None], shape)
    return Verdict(targets, None, features, (KVCache(100 + numbers, 200 + numbers),))


def commit_one(
    pair: Pair, state_args: tuple, targets: jax.Array, features: jax.Array, nodes: jax.Array, count: jax.Array
) -> tuple[Committed, KVCache]:
    """The commit, and the context rows of the accepted nodes."""
    state = make_state(pair, *state_args)
    committed = commit(pair, state, verdict_of(pair, targets, features), Accepted(nodes, count))
    committed = committed._replace(state=dataclasses.replace(committed.state, key=None))  # no NumPy array
    assert pair.drafter is not None
    positions = state.length + jnp.arange(nodes.shape[0])
    return committed, pair.drafter.context(features[jnp.maximum(nodes, 0)], positions)


@pytest.fixture(scope="module")
def commits() -> list[dict[str, Any]]:
    """400 random commits: scattered nodes, EOS anywhere or nowhere, limits near and far, done or not."""
    rng, num, width = np.random.default_rng(0), 400, 7
    count = rng.integers(0, width, num)
    nodes = np.full((num, width), -1)
    for case in range(num):
        nodes[case, 1 : count[case] + 1] = np.sort(rng.choice(np.arange(1, NODES), count[case], replace=False))
    nodes[:, 0] = 0
    prompt_len, new = rng.integers(1, 5, num), rng.integers(1, 9, num)  # new: tokens generated so far
    length = prompt_len + new - 1
    limit = new + rng.integers(1, 12, num)
    eos = np.where(rng.random((num, 2)) < 0.4, -1, rng.integers(0, 12, (num, 2)))
    done = rng.random(num) < 0.1
    tokens = rng.integers(20, 30, (num, SLOTS))
    targets = rng.integers(0, 12, (num, NODES))
    rows = np.broadcast_to(np.arange(SLOTS, dtype=np.float32), (num, SLOTS))
    features = rng.normal(size=(num, NODES, 64)).astype(np.float32)
    ints = [x.astype(np.int32) for x in (length, prompt_len, limit, eos)]
    state_args = (*ints, done, tokens.astype(np.int32), rows)
    commit_all = jax.jit(jax.vmap(commit_one, in_axes=(None, 0, 0, 0, 0, 0)), compiler_options=QUICK)
    targets, nodes, count = (x.astype(np.int32) for x in (targets, nodes, count))
    committed, context = jax.device_get(commit_all(make_pair(4), state_args, targets, features, nodes, count))
    given = dict(count=count, nodes=nodes, prompt_len=prompt_len, new=new, length=length, limit=limit, eos=eos)
    given |= dict(done=done, tokens=tokens, targets=targets)
    return [
        {name: values[case] for name, values in given.items()}
        | {"committed": jax.tree.map(lambda x, case=case: x[case], committed)}
        | {"context": jax.tree.map(lambda x, case=case: x[case], context)}
        for case in range(num)
    ]


def test_tokens_stop_at_the_first_eos_and_the_limit(commits):
    reasons = set()
    for case in commits:
        committed: Committed = case["committed"]
        issued = case["targets"][case["nodes"][: case["count"] + 1]].tolist()
        kept: list[int] = []
        done = bool(case["done"])
        for token in issued:
            if done:
                break
            kept.append(token)
            eos, full = token in case["eos"], case["new"] + len(kept) >= case["limit"]
            done = eos or full
            reasons |= {"eos"} if eos else {"limit"} if full else set()
        length = case["length"]
        assert committed.state.length == length + len(kept)
        assert committed.clipped == len(issued) - len(kept)
        assert committed.state.done == done
        assert committed.state.tokens[length + 1 : length + 1 + len(kept)].tolist() == kept
        np.testing.assert_array_equal(committed.state.tokens[: length + 1], case["tokens"][: length + 1])
        reasons |= {"open"} if not done else {"done"} if case["done"] else set()
    assert reasons == {"eos", "limit", "open", "done"}


def test_caches_get_the_accepted_rows_and_keep_the_committed_ones(commits):
    for case in commits:
        state: DecodeState = case["committed"].state
        start, stop = case["length"], int(state.length)
        nodes = case["nodes"][: stop - start]
        for kv, old, new in ((state.cache[0].k, 0, 100), (state.cache[0].v, 0.5, 200)):
            expected = np.concatenate([np.arange(start) + old, nodes + new])[None, None, :, None]
            assert np.all(kv[:, :, :stop] == expected)
        for kv, old, new in ((state.context.k, 0, case["context"].k), (state.context.v, 0.5, case["context"].v)):
            assert np.all(kv[:, :, :start] == (np.arange(start) + old)[None, None, :, None])
            np.testing.assert_array_equal(kv[:, :, start:stop], new[:, :, : stop - start])
