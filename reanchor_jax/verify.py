"""Stage 4 of a round: one target forward over the trie."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from reanchor_jax.cache import KVCache
from reanchor_jax.config import DecodeConfig
from reanchor_jax.pair import Pair, block_size, tap_ids
from reanchor_jax.sampling import choose_target_tokens
from reanchor_jax.state import DecodeState
from reanchor_jax.trie import Trie


class Verdict(NamedTuple):
    """The target's answer at every trie node."""

    tokens: jax.Array  # [N] int32 the target's token behind each node
    logits: jax.Array | None  # [N, V] f32, kept only where log-probabilities are asked for
    features: jax.Array  # [N, C*D] tapped hidden states
    kv: tuple[KVCache, ...]  # [R, K, N, H] the nodes' own keys and values, for each layer of the pattern


def verify_trie(pair: Pair, state: DecodeState, trie: Trie, config: DecodeConfig, noise: jax.Array | None) -> Verdict:
    """Verifies all nodes jointly: each sees the committed positions and its own ancestors.

    A trie rarely fills its budget, so the forward runs at the smallest of a few static sizes
    that holds the round's nodes (`DecodeConfig.bucket_nodes`). Reads the cache and writes
    nothing. A node's position is the anchor's plus its depth, never its index.

    Args:
      pair: the target, and the drafter whose target layers are tapped.
      state: committed cache.
      trie: nodes to verify.
      config: temperature and filters.
      noise: [W, V] f32 target noise, row r for position i + 1 + r; None at temperature 0.

    Returns:
      The verdict; its rows behind `trie.num_nodes` mean nothing.
    """

    def verify_first(size: int) -> Verdict:
        """Verifies the first `size` nodes and fills the rest up to N with zeros."""
        depths = trie.depths[:size]
        output = pair.target(
            trie.tokens[:size],
            state.length + depths,
            state.cache,
            state.length,
            trie.ancestors[:size, :size],
            tap_ids(pair, config),
        )
        logits = pair.target.logits(output.hidden)
        # The token behind a node of depth k stands at position i + k + 1: noise row k.
        tokens = choose_target_tokens(logits, None if noise is None else noise[depths], config)
        spare = trie.tokens.shape[0] - size
        return Verdict(
            tokens=_pad(tokens, spare, 0),
            logits=None if config.logprobs is None else _pad(logits, spare, 0),
            features=_pad(output.features, spare, 0),
            kv=jax.tree.map(lambda rows: _pad(rows, spare, 2), output.kv),
        )

    sizes = trie_sizes(block_size(pair, config), trie.tokens.shape[0], config)
    # Node lists are compact: the smallest size that holds all nodes verifies the whole trie.
    index = jnp.sum(trie.num_nodes > jnp.array(sizes))
    return jax.lax.switch(index, [functools.partial(verify_first, size) for size in sizes])


def trie_sizes(size: int, num_nodes: int, config: DecodeConfig) -> tuple[int, ...]:
    """Static trie sizes that a round can verify: B, 2B, 4B, ... and N; only N without buckets.

    A schedule makes small tries, down to the anchor alone: with one, sizes begin at 1.
    """
    size = size if config.schedule == "none" else 1
    sizes = [num_nodes]
    while config.bucket_nodes and size < num_nodes:
        sizes.insert(-1, size)
        size *= 2
    return tuple(sizes)


def _pad(rows: jax.Array, spare: int, axis: int) -> jax.Array:
    widths = [(0, spare if i == axis else 0) for i in range(rows.ndim)]
    return jnp.pad(rows, widths)
