"""Where each token came from (paper, sections 3.2 and 4.3: in-block refinement and block extension)."""

from __future__ import annotations

from collections.abc import Sequence as Several
from typing import Literal

from reanchor_jax.trace_view.records import Block, Round, Sequence, Trie

Origin = Literal["baseline", "refinement", "extension", "target"]
"""`baseline`: a draft of the baseline block. `refinement`: a shifted block's draft at a position that
the baseline block has a draft for too, another one or behind other tokens. `extension`: a shifted
block's draft beyond the baseline block's end (where a schedule cuts the block, beyond the cut).
`target`: the target's own token, behind the last accepted draft or out of prefill."""

ORIGINS: tuple[Origin, ...] = ("baseline", "refinement", "extension", "target")


def node_origins(entry: Round) -> list[Origin]:
    """Where each trie node's token came from. What both kinds of blocks drafted is the baseline's.

    Example, B = 3: g(0) = a b c, and g(1) = b x y attached at t* = 1. The nodes a b c | x y are
    target baseline baseline | refinement (beside c, depth 2) extension (depth 3, behind the end).
    """
    end = entry.blocks[0].length  # first depth beyond the baseline block
    origins: list[Origin] = []
    for node, (block, depth) in enumerate(zip(entry.trie.blocks, entry.trie.depths, strict=True)):
        if node == 0:
            origins.append("target")  # the anchor: the last round's own token
        elif block == 0:
            origins.append("baseline")
        else:
            origins.append("refinement" if depth < end else "extension")
    return origins


def committed_origins(entry: Round) -> list[Origin]:
    """Where each committed token came from: accepted drafts, then the target's own; before clipping."""
    origins = node_origins(entry)
    return [*(origins[node] for node in entry.path[1:]), "target"]


def sequence_origins(sequence: Sequence) -> list[Origin]:
    """Where each generated token came from. The first one is out of prefill."""
    origins: list[Origin] = ["target"]
    for entry in sequence.rounds:
        origins += committed_origins(entry)[: len(entry.path) - entry.clipped]
    return origins[: len(sequence.tokens)]


def count_origins(origins: Several[Origin]) -> dict[Origin, int]:
    """Tokens of each origin."""
    return {origin: origins.count(origin) for origin in ORIGINS}


def path_nodes(trie: Trie, baseline: Block, block: Block) -> list[int]:
    """Nodes of the path g(0)[0:t*] ++ g(d), the anchor first, as far as the node budget let it in.

    Example: tokens a b c | x y, parents -1 0 1 | 1 3: the path of g(1) = b x y at t* = 1 is 0 1 3 4.
    """
    if block.site is None:
        return []
    child = {(parent, token): node for node, (parent, token) in enumerate(zip(trie.parents, trie.tokens, strict=True))}
    nodes: list[int] = []
    for token in (*baseline.tokens[: block.site], *block.tokens[: block.length]):
        node = child.get((nodes[-1] if nodes else -1, token))
        if node is None:
            break
        nodes.append(node)
    return nodes


def node_blocks(entry: Round) -> list[int | None]:
    """Offset of the first block whose path each node lies on, by blocks and sites; None for a node on no path."""
    owners: list[int | None] = [None] * len(entry.trie.tokens)
    for block in reversed(entry.blocks):
        for node in path_nodes(entry.trie, entry.blocks[0], block):
            owners[node] = block.offset
    return owners


def retained_nodes(entry: Round, rule: object) -> list[int]:
    """Nodes whose verifier states were retained, in order of the offsets 1, 2, .. that start from them.

    They are the rejected suffix of one path: under rule `baseline` the baseline's, under
    `accepted_path` that of the longest path that holds every accepted node (ties: the first).
    """
    baseline = entry.blocks[0]
    paths = [path_nodes(entry.trie, baseline, block) for block in entry.blocks]
    if rule == "baseline":
        best = paths[0]
    else:
        accepted = list(entry.path)
        best = max((path for path in paths if path[: len(accepted)] == accepted), key=len, default=accepted)
    return best[len(entry.path) :][: len(baseline.tokens) - 1]
