"""Stage 3 of a round: paths that share a prefix share its nodes."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from reanchor_jax.attach import Paths


class Trie(NamedTuple):
    """Token trie in at most N nodes. Node 0 is the anchor; the baseline's nodes come first.

    Every node comes after its parent, so any prefix of the node list is a trie.
    """

    tokens: jax.Array  # [N] int32
    parents: jax.Array  # [N] int32, -1 for the anchor and for unused nodes
    depths: jax.Array  # [N] int32; the absolute position is i + depth
    valid: jax.Array  # [N] bool
    blocks: jax.Array  # [N] int32, first path that a node lies on
    ancestors: jax.Array  # [N, N] bool: [n, m] = m is n or an ancestor of n
    path_nodes: jax.Array  # [A, W] int32 node of each path slot, -1 behind a path's end or cut
    num_nodes: jax.Array  # () int32
    num_cut: jax.Array  # () int32 nodes that did not fit


def merge_trie(paths: Paths, num_nodes: int) -> Trie:
    """Merges identical prefixes (paper, algorithm 1, line 18); static shapes, no host code.

    Slot k of path p is represented by the first path that shares its first k + 1 tokens. The
    representatives are the nodes: those of the baseline first, then all others by depth, so
    that a budget cuts the deepest, which are reached least often, and never the baseline.

    Example: paths `a b c` and `a b d e` give nodes a b c | d e, parents -1 0 1 | 1 3,
    depths 0 1 2 | 2 3, and path_nodes 0 1 2 and 0 1 3 4.

    Args:
      paths: candidate paths [A, W].
      num_nodes: node budget N, at least the baseline's length (static).
    """
    tokens, (num_paths, width) = paths.tokens, paths.tokens.shape
    filled = jnp.arange(width)[None, :] < paths.lengths[:, None]  # [A, W]
    equal = (tokens[:, None] == tokens[None]) & filled[:, None] & filled[None]
    shared = jnp.cumprod(equal.astype(jnp.int32), axis=2).astype(bool)  # [A, A, W] first k+1 tokens equal
    owner = jnp.argmax(shared, axis=0).astype(jnp.int32)  # [A, W] representative of (p, k)
    is_node = filled & (owner == jnp.arange(num_paths)[:, None])

    # Number the representatives: baseline slot k is node k, others follow depth by depth.
    num_baseline = paths.lengths[0]
    extra = is_node.at[0].set(False).T.reshape(-1).astype(jnp.int32)  # [W * A], depth-major
    extra_ids = (num_baseline + jnp.cumsum(extra) - extra).reshape(width, num_paths).T
    own_ids = extra_ids.at[0].set(jnp.arange(width))
    total = num_baseline + jnp.sum(extra)
    ids = jnp.take_along_axis(own_ids, owner, axis=0)  # [A, W]: own_ids[owner[p, k], k]
    path_nodes = jnp.where(filled & (ids < num_nodes), ids, -1).astype(jnp.int32)

    # Scatter the representatives' data into node order; index num_nodes is dropped.
    target = jnp.where(is_node & (ids < num_nodes), ids, num_nodes).reshape(-1)

    def scatter(values: jax.Array, empty: int) -> jax.Array:
        values = jnp.broadcast_to(values, (num_paths, width)).reshape(-1).astype(jnp.int32)
        return jnp.full(num_nodes, empty, jnp.int32).at[target].set(values, mode="drop")

    valid = jnp.arange(num_nodes) < total
    depths = scatter(jnp.arange(width)[None, :], 0)
    blocks = scatter(jnp.arange(num_paths)[:, None], 0)
    parent_of_slot = jnp.concatenate([jnp.full((num_paths, 1), -1, jnp.int32), path_nodes[:, :-1]], axis=1)
    # Node n's ancestor at depth k is slot k of the path that n lies on.
    lineage = path_nodes[blocks]  # [N, W]
    ancestors = (
        (lineage[:, depths] == jnp.arange(num_nodes)[None, :])
        & (depths[None, :] <= depths[:, None])
        & valid[:, None]
        & valid[None, :]
    )
    return Trie(
        tokens=scatter(tokens, 0),
        parents=scatter(parent_of_slot, -1),
        depths=depths,
        valid=valid,
        blocks=blocks,
        ancestors=ancestors,
        path_nodes=path_nodes,
        num_nodes=jnp.minimum(total, num_nodes).astype(jnp.int32),
        num_cut=jnp.maximum(total - num_nodes, 0).astype(jnp.int32),
    )
