"""Stage 4 of a round: one target forward over the trie."""

from __future__ import annotations

from typing import NamedTuple

import jax

from reanchor_jax.config import DecodeConfig
from reanchor_jax.pair import Pair
from reanchor_jax.sampling import choose_target_tokens
from reanchor_jax.state import DecodeState
from reanchor_jax.target import TargetOutput
from reanchor_jax.trie import Trie


class Verdict(NamedTuple):
    """The target's answer at every trie node."""

    output: TargetOutput  # hidden, features, keys and values of the N nodes
    tokens: jax.Array  # [N] int32 the target's token behind each node
    logits: jax.Array  # [N, V] f32


def verify_trie(pair: Pair, state: DecodeState, trie: Trie, config: DecodeConfig, noise: jax.Array | None) -> Verdict:
    """Verifies all nodes jointly: each sees the committed positions and its own ancestors.

    Reads the cache and writes nothing. A node's position is the anchor's plus its depth, never
    its index.

    Args:
      pair: the target, and the drafter whose target layers are tapped.
      state: committed cache.
      trie: nodes to verify.
      config: temperature and filters.
      noise: [W, V] target noise, row r for position i + 1 + r; None at temperature 0.
    """
    tap_ids = () if pair.drafter is None or config.method == "ar" else pair.drafter.config.target_layer_ids
    positions = state.length + trie.depths
    output = pair.target(trie.tokens, positions, state.cache, state.length, trie.ancestors, tap_ids)
    logits = pair.target.logits(output.hidden)
    # The token behind a node of depth k stands at position i + k + 1: noise row k.
    node_noise = None if noise is None else noise[trie.depths]
    return Verdict(output, choose_target_tokens(logits, node_noise, config), logits)
