"""A trace file, which another program may have cut off or changed."""

from __future__ import annotations

import dataclasses
import json
import re
import stat
from pathlib import Path
from typing import Any

from reanchor_jax.checkpoint.fields import Fields
from reanchor_jax.cli.trace import FORMAT
from reanchor_jax.errors import ReanchorError
from reanchor_jax.trace_view.origin import node_blocks, retained_nodes
from reanchor_jax.trace_view.records import Sequence, read_prompt, read_round

_MOST_BYTES = 1 << 29


@dataclasses.dataclass
class TraceFile:
    """What a trace tells."""

    settings: dict[str, Any]
    sequences: list[Sequence] = dataclasses.field(default_factory=list)
    pieces: dict[int, str] | None = None
    """Text of every token id; None without a tokenizer, or where the file ends early."""
    notices: list[str] = dataclasses.field(default_factory=list)
    """What is not as it would be in a whole trace, for people."""


def read_trace(path: Path) -> TraceFile:
    """Reads what `generate --trace FILE` has written.

    A run that was interrupted leaves a trace whose last text has no end, one that was killed at worst
    half a last line: what is there is returned, with notices.

    Raises:
      ReanchorError: no such file, no trace, the file of a run under way, a line that is damaged.
    """
    lines = _read_lines(path)
    half = lines.pop()
    if half:
        try:
            json.loads(half)
            lines.append(half)  # only the line break is missing
            half = b""
        except (ValueError, RecursionError):
            pass
    if not lines:
        raise _no_trace(path)
    trace = TraceFile(_settings(path, lines[0]))
    for number, line in enumerate(lines[1:], start=2):
        where = f"{path}:{number}"
        try:
            if trace.pieces is not None:
                raise ReanchorError(f"{where} stands behind the pieces; expected them to be last")
            _read_line(trace, Fields(_parse(line, where), where))
        except ReanchorError as error:
            raise ReanchorError(f"{error}; the trace is damaged there, write it again") from None
    if half:
        trace.notices.append(f"The file ends within line {len(lines) + 1}: the run or its disk stopped there.")
    elif trace.pieces is None:
        trace.notices.append("The file has no texts of tokens: their ids are shown.")
    if trace.sequences and trace.sequences[-1].token_ids is None:
        trace.notices.append("The run was interrupted: the last text is as far as it came.")
    return trace


def _read_lines(path: Path) -> list[bytes]:
    """All lines; the last is what stands behind the last line break."""
    if path.name.endswith(".partial"):
        raise ReanchorError(
            f"{path} is the trace of a run that goes on or was killed; expected a finished one: wait for the run, "
            "or copy it under another name to see what is there"
        )
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # a pipe would keep us waiting
            raise ReanchorError(f"{path} is no regular file; expected a trace, as --trace FILE writes it")
        if status.st_size > _MOST_BYTES:
            raise ReanchorError(
                f"{path} has {status.st_size} bytes; expected at most {_MOST_BYTES}: trace fewer prompts"
            )
        return path.read_bytes().split(b"\n")
    except FileNotFoundError:
        raise ReanchorError(f"{path} is missing; expected a trace: generate with --trace {path}") from None
    except (OSError, ValueError) as error:  # ValueError: a null byte in the name
        reason = getattr(error, "strerror", None) or error
        raise ReanchorError(f"{path} cannot be read: {reason}; name another file") from None


def _no_trace(path: Path) -> ReanchorError:
    return ReanchorError(f"{path} is not a trace; expected a file that generate --trace FILE has written")


def _parse(line: bytes, where: str) -> dict[str, Any]:
    try:
        entry = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError):
        raise ReanchorError(f"{where} is not valid JSON") from None
    if not isinstance(entry, dict):
        raise ReanchorError(f"{where} holds {type(entry).__name__}; expected a JSON object")
    return entry


def _settings(path: Path, line: bytes) -> dict[str, Any]:
    try:
        entry = _parse(line, str(path))
    except ReanchorError:
        raise _no_trace(path) from None
    if entry.get("kind") != "run":
        raise _no_trace(path)
    fields = Fields(entry, f"{path}:1")
    fields.get("format")
    fields.only("format", FORMAT, why="it is of another version, write the trace again")
    return fields.section("settings").data


def _read_line(trace: TraceFile, fields: Fields) -> None:
    kind = fields.get("kind")
    last = trace.sequences[-1] if trace.sequences else None
    is_open = last is not None and last.token_ids is None
    if kind == "prompt" and not is_open:
        trace.sequences.append(read_prompt(fields))
    elif kind == "round" and last is not None and is_open:
        entry = read_round(fields, last)
        owners = node_blocks(entry)
        if owners != list(entry.trie.blocks):
            raise fields.fail("trie: blocks", list(entry.trie.blocks), f"{owners}, by the blocks and their sites")
        shifted = trace.settings.get("method") == "reanchor" and trace.settings.get("offsets") != 0
        expected = len(retained_nodes(entry, trace.settings.get("retain"))) if shifted else 0
        if entry.retained != expected:
            raise fields.fail("retained", entry.retained, f"{expected}, by the trie and the run's settings")
        last.add(entry)
    elif kind == "end" and last is not None and is_open:
        ids = fields.integers("token_ids", 0, 2**31 - 1)
        # Without a round there is at most the token of prefill, which no other line tells.
        if list(ids) != last.committed_ids[: len(ids)] and (last.rounds or len(ids) > 1):
            raise fields.fail("token_ids", list(ids), "the tokens that the rounds committed, or their beginning")
        last.token_ids, last.finish_reason = ids, str(fields.get_or_none("finish_reason"))
    elif kind == "pieces":
        pieces = fields.section("pieces").data
        for token, text in pieces.items():
            if not re.fullmatch(r"\d{1,10}", token, re.ASCII) or not isinstance(text, str):
                raise fields.fail("pieces", {token: text}, "texts by token id")
        trace.pieces = {int(token): text for token, text in pieces.items()}
    else:
        raise fields.fail("kind", kind, "prompt, then round and end, for each text, and pieces at last")
