"""ReAnchor in plain Python: dictionaries, lists and loops, nothing shared with the package.

A token path is a tuple that starts with the anchor. A trie is the set of all prefixes of its
paths, and a node is one such prefix: its parent is the prefix without the last token.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

Path = tuple[int, ...]


# Attachment


def overlap(baseline: Sequence[int], block: Sequence[int]) -> list[int]:
    """T: the baseline slots that hold the block's first token."""
    return [t for t, token in enumerate(baseline) if token == block[0]]


def agreement(baseline: Sequence[int], block: Sequence[int], t: int) -> int:
    """For how many tokens the block continues the baseline's own tokens from slot t."""
    run = 0
    while t + run < len(baseline) and run < len(block) and baseline[t + run] == block[run]:
        run += 1
    return run


def attach_site(
    baseline: Sequence[int],
    block: Sequence[int],
    offset: int,
    rule: str,
    choose: Callable[[list[int]], int] = lambda sites: sites[0],
) -> int | None:
    """t*, or None where the block is dropped. `choose` is the random rule's draw from T."""
    sites = overlap(baseline, block)
    # A baseline that a schedule has cut may end before the offset: there is nothing to attach to.
    unmatched = offset if offset <= len(baseline) else None
    if rule == "fixed_unmatched":
        return unmatched
    if rule == "fixed":
        return offset if offset in sites else None
    if not sites:
        return unmatched if rule == "fallback" else None
    if rule in ("earliest", "fallback"):
        return min(sites)
    if rule == "longest":
        return max(sites, key=lambda t: (agreement(baseline, block, t), -t))
    assert rule == "random"
    return choose(sites)


def attach(baseline: Sequence[int], block: Sequence[int], site: int) -> Path:
    """The baseline up to the site, then the whole block."""
    return (*baseline[:site], *block)


# Trie


@dataclasses.dataclass
class Trie:
    """Kept nodes in order, and what every path became of them."""

    nodes: list[Path]
    first_path: dict[Path, int]
    """The first path that a node lies on."""
    paths: list[list[Path] | None]
    """For each path its kept nodes, None for a dropped path."""
    num_cut: int


def merge(paths: Sequence[Path | None], budget: int | None = None) -> Trie:
    """All prefixes of all paths; paths[0] is the baseline.

    Kept under a budget: the baseline, then the shallowest nodes, earlier paths first.
    """
    first_path: dict[Path, int] = {}
    for p, path in enumerate(paths):
        for node in ancestors(path or ()):
            first_path.setdefault(node, p)
    nodes = sorted(first_path, key=lambda node: (first_path[node] > 0, len(node), first_path[node]))
    kept = nodes[:budget]
    fits = set(kept)
    mapped = [None if path is None else [node for node in ancestors(path) if node in fits] for path in paths]
    return Trie(kept, first_path, mapped, len(nodes) - len(kept))


def ancestors(node: Path) -> list[Path]:
    """The node and everything above it."""
    return [node[: k + 1] for k in range(len(node))]


# Acceptance and retention


def accept(nodes: Sequence[Path], target_token: dict[Path, int]) -> list[Path]:
    """The accepted nodes, anchor first: follow the child with the target's token."""
    node = nodes[0]
    accepted = [node]
    while (child := (*node, target_token[node])) in nodes:
        accepted.append(child)
        node = child
    return accepted


def retain(trie: Trie, accepted: list[Path], rule: str, block_size: int) -> list[Path]:
    """Nodes beyond the stop whose verifier states the next round reuses."""
    chosen = trie.paths[0]
    if rule == "accepted_path":
        holding = [path for path in trie.paths if path is not None and set(accepted) <= set(path)]
        chosen = max(holding, key=len)  # of equally long ones the first
    assert chosen is not None
    return chosen[len(accepted) :][: block_size - 1]


# The whole loop


@dataclasses.dataclass
class Round:
    """What one round did."""

    committed: list[int]
    num_nodes: int
    num_cut: int
    num_offsets: int
    num_retained: int


def decode(
    prompt: Sequence[int],
    target: Callable[[Path], list[tuple[Any, int]]],
    drafter: Callable[[list[Any], int], list[int]],
    *,
    block_size: int,
    attach_rule: str,
    retain_rule: str,
    limit: int,
    eos: Sequence[int] = (),
    max_offset: int | None = None,
    budget: int | None = None,
) -> tuple[list[int], list[Round]]:
    """Generates `limit` tokens without any cache: every path is recomputed from the first token.

    Args:
      prompt: token ids.
      target: sequence -> (feature, next token) of each of its positions.
      drafter: features of positions 0 .. j-1 and the anchor at position j -> its B-1 drafts.
      block_size: B.
      attach_rule: any but `random`.
      retain_rule: `baseline` or `accepted_path`.
      limit: tokens to generate.
      eos: tokens that end the text.
      max_offset: largest offset; None takes B - 1.
      budget: most trie nodes.

    Returns:
      New tokens, and the rounds (the first token belongs to none).
    """
    features = [feature for feature, _ in target(tuple(prompt))]
    tokens = [*prompt, target(tuple(prompt))[-1][1]]
    retained: list[tuple[Any, int]] = []  # (feature of position i + s, the target's token behind it)
    rounds: list[Round] = []

    def finished() -> bool:
        new = tokens[len(prompt) :]
        return len(new) >= limit or any(token in eos for token in new)

    while not finished():
        anchor = tokens[-1]
        baseline = [anchor, *drafter(features, anchor)]
        paths: list[Path | None] = [tuple(baseline)]
        offsets = range(1, 1 + min(len(retained), block_size - 1 if max_offset is None else max_offset))
        for d in offsets:
            shifted_anchor = retained[d - 1][1]
            block = [shifted_anchor, *drafter(features + [f for f, _ in retained[:d]], shifted_anchor)]
            site = attach_site(baseline, block, d, attach_rule)
            paths.append(None if site is None else attach(baseline, block, site))
        trie = merge(paths, budget)

        answer: dict[Path, tuple[Any, int]] = {}
        for path in trie.paths:
            if path:
                outputs = target((*tokens[:-1], *path[-1]))[len(tokens) - 1 :]
                answer.update(zip(path, outputs, strict=True))
        accepted = accept(trie.nodes, {node: token for node, (_, token) in answer.items()})
        kept = retain(trie, accepted, retain_rule, block_size)

        features += [answer[node][0] for node in accepted]
        committed = [answer[node][1] for node in accepted]
        tokens += committed
        retained = [answer[node] for node in kept]
        rounds.append(Round(committed, len(trie.nodes), trie.num_cut, len(offsets), len(kept)))

    new = tokens[len(prompt) :]
    for index, token in enumerate(new):
        if token in eos:
            new = new[: index + 1]
            break
    return new[:limit], rounds
