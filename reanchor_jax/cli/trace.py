"""A record of every round, for people and programs that want to see how a text was drafted."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from reanchor_jax.cli.answer import Answer
from reanchor_jax.errors import ReanchorError
from reanchor_jax.state import RoundRecord
from reanchor_jax.tokenizer import ChatTokenizer

FORMAT = 1


class Trace:
    """Writes JSONL, one object a line, told apart by `kind`.

    `run` (first line): format and settings. `prompt`: index, turn and ids of a prompt whose rounds
    follow. `round`: `start`, how many tokens were generated before it; `anchor`, its absolute
    position; `blocks`, the drafted ones with their `offset`, `tokens` (anchor first) and attachment
    `site` (null where dropped); `trie` with `tokens`, `parents` (-1 for the anchor), `depths`,
    `blocks` (which block a node came from) and `target_tokens` (the target's token behind it);
    `path`, the accepted nodes, anchor first; and the counts `accepted`, `committed`, `clipped`,
    `cut`, `retained`. `end`: the answer's ids and why it ended. `pieces` (last line): the text of
    every token id that occurs, where there is a tokenizer.

    The file takes its place when it is closed; until then the lines are in .FILE.partial beside it.
    """

    def __init__(self, path: Path, settings: dict[str, Any], tokenizer: ChatTokenizer | None):
        self._path = Path(os.path.realpath(path))  # a link is written through
        self._partial = self._path.with_name(f".{path.name}.partial")
        self._tokenizer, self._seen = tokenizer, set[int]()
        self._prompt_len = 0
        try:
            self._file = self._partial.open("w", encoding="utf-8")
        except OSError as error:
            raise ReanchorError(f"--trace {path} cannot be written: {error.strerror or error}") from None
        self._write({"kind": "run", "format": FORMAT, "settings": settings})

    def begin(self, index: int, turn: int, prompt_ids: list[int]) -> None:
        """The rounds of a prompt's turn follow."""
        self._prompt_len = len(prompt_ids)
        self._seen.update(prompt_ids)
        self._write({"kind": "prompt", "index": index, "turn": turn, "prompt_ids": prompt_ids})

    def round(self, record: RoundRecord) -> None:
        """One round; `record` is on the host."""
        blocks = [
            {
                "offset": d,
                "tokens": record.blocks[d].tolist(),
                "length": int(record.block_lengths[d]),
                "site": None if site < 0 else int(site),
            }
            for d, site in enumerate(record.sites)
            if record.block_valid[d]
        ]
        n = int(record.num_nodes)
        trie = {
            "tokens": record.trie_tokens[:n].tolist(),
            "parents": record.trie_parents[:n].tolist(),
            "depths": record.trie_depths[:n].tolist(),
            "blocks": record.trie_blocks[:n].tolist(),
            "target_tokens": record.target_tokens[:n].tolist(),
        }
        self._seen.update(trie["tokens"], trie["target_tokens"], *(block["tokens"] for block in blocks))
        start = int(record.start)
        self._write(
            {
                "kind": "round",
                "start": start,
                # The last of `start` tokens is the anchor.
                "anchor": self._prompt_len + start - 1,
                "blocks": blocks,
                "trie": trie,
                "path": record.path[: int(record.committed)].tolist(),
                "accepted": int(record.accepted),
                "committed": int(record.committed),
                "clipped": int(record.clipped),
                "cut": int(record.num_cut),
                "retained": int(record.num_retained),
            }
        )

    def end(self, answer: Answer) -> None:
        """The turn's answer is complete."""
        self._seen.update(answer.token_ids)
        self._write({"kind": "end", "token_ids": answer.token_ids, "finish_reason": answer.finish_reason})

    def close(self) -> None:
        """Writes the pieces and moves the file into place."""
        if self._tokenizer is not None:
            self._write({"kind": "pieces", "pieces": {token: self._piece(token) for token in sorted(self._seen)}})
        self._file.close()
        os.replace(self._partial, self._path)

    def discard(self) -> None:
        """Leaves no file behind, nor the earlier one touched."""
        self._file.close()
        self._partial.unlink(missing_ok=True)

    def _piece(self, token: int) -> str:
        """The token's text within a text: some decoders drop a space at the start, "a" of " a a"."""
        assert self._tokenizer is not None
        return self._tokenizer.decode([token, token])[len(self._tokenizer.decode([token])) :]

    def _write(self, entry: dict[str, Any]) -> None:
        self._file.write(json.dumps(entry) + "\n")
