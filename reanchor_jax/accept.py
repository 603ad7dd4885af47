"""Stage 5 of a round: the path that the target's own tokens take through the trie."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from reanchor_jax.trie import Trie


class Accepted(NamedTuple):
    """The accepted path; `nodes[0]` is the anchor."""

    nodes: jax.Array  # [W] int32 node at each depth, -1 behind the last accepted node
    count: jax.Array  # () int32 accepted drafts; the last accepted node is nodes[count]


def accept_path(trie: Trie, target_tokens: jax.Array) -> Accepted:
    """Follows, from the anchor, the child whose token is the target's token at its parent.

    A node is accepted where it and all its ancestors carry the target's token; siblings carry
    different tokens, so the accepted nodes form one path. No loop: one mask over [N, N].

    Args:
      trie: verified trie.
      target_tokens: [N] int32 the target's token behind each node.
    """
    width = trie.path_nodes.shape[1]
    agrees = trie.tokens == target_tokens[jnp.maximum(trie.parents, 0)]
    agrees = (agrees | (trie.depths == 0)) & trie.valid
    accepted = trie.valid & ~jnp.any(trie.ancestors & ~agrees[None, :], axis=1)
    at_depth = accepted[None, :] & (trie.depths[None, :] == jnp.arange(width)[:, None])  # [W, N]
    nodes = jnp.where(jnp.any(at_depth, axis=1), jnp.argmax(at_depth, axis=1), -1).astype(jnp.int32)
    return Accepted(nodes=nodes, count=jnp.sum(accepted).astype(jnp.int32) - 1)
