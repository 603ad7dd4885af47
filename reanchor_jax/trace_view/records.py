"""What a trace holds, checked field by field: it may come from anywhere."""

from __future__ import annotations

import dataclasses
import itertools
from typing import NamedTuple

from reanchor_jax.checkpoint.fields import Fields

_MOST = 2**31 - 1


class Block(NamedTuple):
    """A drafted block g(d)."""

    offset: int
    tokens: tuple[int, ...]
    """B of them, anchor first."""
    length: int
    """How many of them a schedule keeps; B without one."""
    site: int | None
    """t*: the block continues the baseline prefix of this length; None where it was dropped."""


class Trie(NamedTuple):
    """Verified nodes, the anchor first and every node behind its parent."""

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    depths: tuple[int, ...]
    blocks: tuple[int, ...]
    """Offset of the first block whose path a node lies on."""
    target_tokens: tuple[int, ...]
    """The target's token behind each node."""


@dataclasses.dataclass(frozen=True)
class Round:
    """One round."""

    start: int
    """Tokens generated before it."""
    anchor: int
    """Absolute position of the anchor, i."""
    blocks: tuple[Block, ...]
    """The baseline block first."""
    trie: Trie
    path: tuple[int, ...]
    """Accepted nodes, the anchor first."""
    clipped: int
    """Committed tokens beyond the end of the text or the limit."""
    cut: int
    """Nodes lost to the budget."""
    retained: int
    """Verifier states kept for the next round."""

    @property
    def committed(self) -> tuple[int, ...]:
        """The target's token behind each accepted node: the accepted drafts, then its own token."""
        return tuple(self.trie.target_tokens[node] for node in self.path)


@dataclasses.dataclass
class Sequence:
    """One turn's text."""

    index: int
    turn: int
    prompt_ids: tuple[int, ...]
    rounds: list[Round] = dataclasses.field(default_factory=list)
    committed_ids: list[int] = dataclasses.field(default_factory=list)
    """What the rounds say: the first anchor, then what each round committed within the limit."""
    token_ids: tuple[int, ...] | None = None
    """None where the run was interrupted."""
    finish_reason: str | None = None

    def add(self, entry: Round) -> None:
        """The next round."""
        if not self.rounds:
            self.committed_ids.append(entry.trie.tokens[0])
        self.committed_ids += entry.committed[: len(entry.path) - entry.clipped]
        self.rounds.append(entry)

    @property
    def tokens(self) -> tuple[int, ...]:
        """The generated tokens. A stop string may have ended the text before the last round's."""
        return tuple(self.committed_ids) if self.token_ids is None else self.token_ids


def read_prompt(fields: Fields) -> Sequence:
    """A line of kind `prompt`."""
    return Sequence(
        index=fields.integer("index", 0, _MOST),
        turn=fields.integer("turn", 0, _MOST),
        prompt_ids=fields.integers("prompt_ids", 0, _MOST),
    )


def read_round(fields: Fields, sequence: Sequence) -> Round:
    """A line of kind `round`, which continues `sequence`.

    Raises:
      ReanchorError: a field is missing, or contradicts another or the rounds before.
    """
    expected = max(len(sequence.committed_ids), 1)
    start = fields.integer("start", expected, expected)
    anchor = len(sequence.prompt_ids) + start - 1
    blocks = _blocks(fields)
    trie = _trie(fields.section("trie"), blocks)
    path = fields.integers("path", 0, len(trie.tokens) - 1)
    if path[:1] != (0,):
        raise fields.fail("path", list(path), "accepted nodes from the anchor, 0, on")
    for parent, node in itertools.pairwise(path):
        if trie.parents[node] != parent or trie.tokens[node] != trie.target_tokens[parent]:
            raise fields.fail("path", list(path), f"nodes that carry the target's tokens, which {node} does not")
    if sequence.rounds and trie.tokens[0] != sequence.committed_ids[-1]:
        raise fields.fail("the anchor", trie.tokens[0], f"{sequence.committed_ids[-1]}, the last token before")
    fields.integer("accepted", len(path) - 1, len(path) - 1)
    fields.integer("committed", len(path), len(path))
    return Round(
        start=start,
        anchor=fields.integer("anchor", anchor, anchor),
        blocks=blocks,
        trie=trie,
        path=path,
        clipped=fields.integer("clipped", 0, len(path)),
        cut=fields.integer("cut", 0, _MOST),
        retained=fields.integer("retained", 0, len(trie.tokens)),
    )


def _blocks(fields: Fields) -> tuple[Block, ...]:
    entries = fields.get("blocks")
    if not isinstance(entries, list) or not entries or not all(isinstance(entry, dict) for entry in entries):
        raise fields.fail("blocks", entries, "a list of blocks, the baseline first")
    blocks: list[Block] = []
    for number, entry in enumerate(entries):
        block = Fields(entry, f"{fields.where}: block {number}")
        tokens = block.integers("tokens", 0, _MOST)
        size = len(blocks[0].tokens) if blocks else len(tokens)
        if len(tokens) != size or not tokens:
            raise block.fail("tokens", list(tokens), f"{size or 'some'} tokens, as in the baseline block")
        least = blocks[-1].offset + 1 if blocks else 0
        site = block.get("site")
        blocks.append(
            Block(
                offset=block.integer("offset", least, _MOST if blocks else 0),
                tokens=tokens,
                length=block.integer("length", 1, size),
                # The baseline starts at the anchor.
                site=None if site is None and blocks else block.integer("site", 0, size - 1 if blocks else 0),
            )
        )
    return tuple(blocks)


def _trie(fields: Fields, blocks: tuple[Block, ...]) -> Trie:
    lists = {name: fields.integers(name, -1 if name == "parents" else 0, _MOST) for name in Trie._fields}
    trie = Trie(**lists)
    attached = {block.offset for block in blocks if block.site is not None}
    if not trie.tokens or len({len(values) for values in trie}) != 1:
        raise fields.fail("tokens", list(trie.tokens), "one for each of parents, depths, blocks and target_tokens")
    if (trie.parents[0], trie.depths[0], trie.blocks[0]) != (-1, 0, 0) or trie.tokens[0] != blocks[0].tokens[0]:
        raise fields.fail("node 0", [values[0] for values in trie], "the anchor, without a parent, at depth 0")
    for node, parent in enumerate(trie.parents[1:], start=1):
        if not 0 <= parent < node or trie.depths[node] != trie.depths[parent] + 1:
            raise fields.fail(f"the parent of node {node}", parent, "an earlier node, one step nearer to the anchor")
        if trie.blocks[node] not in attached:
            raise fields.fail(f"the block of node {node}", trie.blocks[node], "the offset of an attached block")
    return trie
