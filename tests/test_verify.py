"""Verification of a trie against each of its paths recomputed alone."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reanchor_jax.attach import Paths
from reanchor_jax.config import DecodeConfig
from reanchor_jax.pair import Pair
from reanchor_jax.state import DecodeState
from reanchor_jax.target import forward_text
from reanchor_jax.trie import Trie, merge_trie
from reanchor_jax.verify import Verdict, trie_sizes, verify_trie
from tests.test_trie import random_paths
from tests.tiny import QUICK, make_pair, make_prompts, start_stream

BLOCK = 4
CONFIG = DecodeConfig(logprobs=1)


@functools.lru_cache
def pair(family: str) -> Pair:
    return make_pair(BLOCK, family=family, tied=family == "llama")


@functools.partial(jax.jit, static_argnames=("num_nodes", "config"), compiler_options=QUICK)
def verify(
    pair: Pair, state: DecodeState, tokens: jax.Array, lengths: jax.Array, *, num_nodes: int, config: DecodeConfig
) -> tuple[Trie, Verdict]:
    trie = merge_trie(Paths(tokens, lengths, jnp.zeros_like(lengths)), num_nodes)
    return trie, verify_trie(pair, state, trie, config, None)


@functools.partial(jax.jit, compiler_options=QUICK)
def alone(pair: Pair, tokens: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Logits, features, keys and values of a whole sequence, without any cache."""
    assert pair.drafter is not None
    output = forward_text(pair.target, tokens, pair.drafter.config.target_layer_ids)
    return pair.target.logits(output.hidden), output.features, output.kv[0].k, output.kv[0].v


def start(family: str) -> tuple[DecodeState, np.ndarray]:
    """A state behind a prompt of 8 tokens, and those tokens."""
    ids, num, key = (x[0] for x in make_prompts(1))
    return start_stream(pair(family), ids, num, key=key, config=CONFIG, max_new_tokens=16), np.asarray(ids)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("config", [CONFIG, DecodeConfig(logprobs=1, bucket_nodes=False)], ids=["sizes", "one size"])
def test_every_node_equals_its_path_alone(family, config):
    state, prompt = start(family)
    tokens, lengths = random_paths(np.random.default_rng(7), 12, BLOCK)
    for case in range(12):
        trie, verdict = jax.device_get(
            verify(pair(family), state, tokens[case], lengths[case], num_nodes=BLOCK * BLOCK, config=config)
        )
        for nodes, path, length in zip(trie.path_nodes, tokens[case], lengths[case], strict=True):
            fits = int((nodes >= 0).sum())
            if not length or not fits:
                continue
            whole = np.concatenate([prompt, path])  # what follows the path's end cannot be seen by it
            logits, features, k, v = jax.device_get(alone(pair(family), whole))
            here = slice(len(prompt), len(prompt) + fits)
            close = functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-5)
            close(verdict.logits[nodes[:fits]], logits[here])
            close(verdict.features[nodes[:fits]], features[here])
            close(verdict.kv[0].k[:, :, nodes[:fits]], k[:, :, here])
            close(verdict.kv[0].v[:, :, nodes[:fits]], v[:, :, here])
            assert verdict.tokens[nodes[:fits]].tolist() == logits[here].argmax(axis=1).tolist()


def test_a_dead_sibling_before_a_chain_does_not_move_it():
    """Positions come from depth: with the sibling, the chain's nodes have other indices, not other depths."""
    state, _ = start("llama")
    rows = np.zeros((BLOCK, 2 * BLOCK - 1), np.int32)
    rows[:, 0] = 3
    rows[1, :6] = [3, 9, 1, 5, 2, 7]  # the chain
    rows[2, :2] = [3, 8]
    chain = np.array([4, 6, 0, 0], np.int32)
    both = np.array([4, 6, 2, 0], np.int32)
    rows[3] = rows[2]

    def chain_logits(rows: np.ndarray, lengths: np.ndarray, path: int) -> tuple[np.ndarray, list[int]]:
        trie, verdict = jax.device_get(verify(pair("llama"), state, rows, lengths, num_nodes=12, config=CONFIG))
        nodes = trie.path_nodes[path, :6]
        return verdict.logits[nodes], nodes.tolist()

    alone, alone_nodes = chain_logits(rows, chain, 1)
    # The sibling comes first: as path 1, with the chain as path 2.
    swapped = rows[[0, 2, 1, 3]]
    beside, beside_nodes = chain_logits(swapped, both[[0, 2, 1, 3]], 2)
    assert alone_nodes == [0, 4, 5, 6, 7, 8] and beside_nodes == [0, 5, 6, 7, 8, 9]
    np.testing.assert_allclose(beside, alone, rtol=2e-5, atol=2e-5)


def test_sizes_end_at_the_budget():
    assert trie_sizes(4, 16, DecodeConfig()) == (4, 8, 16)
    assert trie_sizes(5, 25, DecodeConfig()) == (5, 10, 20, 25)
    assert trie_sizes(5, 5, DecodeConfig()) == (5,)
    assert trie_sizes(1, 1, DecodeConfig()) == (1,)
    assert trie_sizes(5, 25, DecodeConfig(bucket_nodes=False)) == (25,)
