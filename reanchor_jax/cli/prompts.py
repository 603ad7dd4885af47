"""What to answer: one PROMPT, or a JSONL file with one prompt a line."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

from reanchor_jax.errors import ReanchorError
from reanchor_jax.tokenizer import check_text

_KINDS = ("prompt", "turns", "prompt_ids")


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One text, one list of user turns, or one list of token ids."""

    index: int
    """Which prompt of the file, from 0; blank lines do not count."""
    where: str
    """For errors: "the prompt", or file and line."""
    turns: tuple[str, ...] = ()
    """The user's turns; empty where ids are given."""
    ids: tuple[int, ...] = ()
    conversation: bool = False
    """Whether it was given as `turns`."""

    @property
    def fingerprint(self) -> str:
        """Tells whether a result belongs to this prompt: 16 hex digits of SHA-256."""
        content = json.dumps([list(self.turns), list(self.ids), self.conversation])
        return hashlib.sha256(content.encode()).hexdigest()[:16]


def one_prompt(text: str) -> list[Prompt]:
    """The prompt of the command line."""
    return [Prompt(index=0, where="the prompt", turns=(text,))]


def read_prompts(path: Path) -> list[Prompt]:
    """Prompts of a JSONL file: objects with exactly one of `prompt`, `turns`, `prompt_ids`.

    Other fields (names, categories, answers) are left alone; blank lines are skipped.

    Raises:
      ReanchorError: no such file, or a line that is no such object, by its number.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise ReanchorError(f"--prompts {path} cannot be read: {error.strerror or error}; expected a file") from None
    prompts = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            prompts.append(_read_line(line, len(prompts), f"{path}:{number}"))
    if not prompts:
        raise ReanchorError(f"--prompts {path} has no prompts; expected one JSON object a line")
    return prompts


def _read_line(line: bytes, index: int, where: str) -> Prompt:
    try:
        entry = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise ReanchorError(f"{where} is no JSON: {reason}; expected one object a line") from None
    if not isinstance(entry, dict):
        raise ReanchorError(f"{where} is {_short(entry)}; expected an object with one of {', '.join(_KINDS)}")
    kinds = [kind for kind in _KINDS if kind in entry]
    if len(kinds) != 1:
        found = " and ".join(kinds) or f"the fields {', '.join(map(_short, entry)) or '(none)'}"
        raise ReanchorError(f"{where} has {found}; expected exactly one of {', '.join(_KINDS)}")
    kind, value = kinds[0], entry[kinds[0]]
    if kind == "prompt_ids":
        if not isinstance(value, list) or not value or not all(type(token) is int for token in value):
            raise ReanchorError(f"{where}: prompt_ids is {_short(value)}; expected a list of at least one integer")
        return Prompt(index, where, ids=tuple(value))
    turns = [value] if kind == "prompt" else value
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) for turn in turns):
        expected = "a string" if kind == "prompt" else "a list of at least one string"
        raise ReanchorError(f"{where}: {kind} is {_short(value)}; expected {expected}")
    if not all(turn.strip() for turn in turns):
        raise ReanchorError(f"{where}: {kind} is empty; expected some text")
    for turn in turns:
        check_text(turn, f"{where}: {kind}")
    return Prompt(index, where, turns=tuple(turns), conversation=kind == "turns")


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:40]}..."
