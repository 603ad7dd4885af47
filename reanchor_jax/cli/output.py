"""Results as JSON: one object per prompt, appended to a file that `--resume` goes on with."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from reanchor_jax.cli.answer import Answer
from reanchor_jax.cli.check import Check
from reanchor_jax.cli.prompts import Prompt
from reanchor_jax.cli.session import Turns
from reanchor_jax.errors import ReanchorError

_BEGINNING = b'{"index": '
"""Of every result."""


def make_record(turns: Turns, settings: dict[str, Any], load_seconds: float, device: str) -> dict[str, Any]:
    """The result of one prompt.

    Its fields describe the only or last turn; a prompt given as `turns` has those of every turn in
    `turns` too. `settings` and `device` are the run's, `index` and `fingerprint` the prompt's.
    """
    checks: list[Check | None] = [*turns.checks] or [None] * len(turns.answers)
    answered = [_turn(answer, check, load_seconds) for answer, check in zip(turns.answers, checks, strict=True)]
    record = {"index": turns.prompt.index, "fingerprint": turns.prompt.fingerprint, **answered[-1]}
    if turns.prompt.conversation:
        record["turns"] = answered
    return {**record, "device": device, "settings": settings}


def _turn(answer: Answer, check: Check | None, load_seconds: float) -> dict[str, Any]:
    record: dict[str, Any] = {
        "text": answer.text,
        "token_ids": answer.token_ids,
        "prompt_tokens": len(answer.prompt_ids),
        "finish_reason": answer.finish_reason,
        "rounds": len(answer.committed),
        "committed_per_round": answer.committed,
        "accepted_drafts_per_round": answer.accepted,
        "nodes_per_round": answer.nodes,
        "cut_nodes": answer.cut,
        "clipped_tokens": answer.clipped,
        "tau": answer.tau,
        "seconds": {
            "load": load_seconds,
            "compile": answer.compile_seconds,
            "prefill": answer.prefill_seconds,
            "decode": answer.decode_seconds,
        },
        "tokens_per_second": answer.tokens_per_second,
    }
    if answer.logprobs is not None:
        record["logprobs"] = answer.logprobs
    if check is not None:
        record["check"] = {
            "equal": check.equal,
            "first_difference": check.first_difference,
            "logit_gap": check.gap,
            "plain_tokens_per_second": check.plain.tokens_per_second,
            "speedup": check.speedup,
        }
    return record


class ResultFile:
    """A JSONL file of results. Made without touching the disk; written from `append` on."""

    def __init__(self, path: Path, resume: bool, prompts: list[Prompt], settings: dict[str, Any]):
        """Checks that the file can be written, and reads the results that it has.

        Raises:
          ReanchorError: it cannot be written; it has results and `resume` is not set; its results
            are of other settings or prompts, or unreadable.
        """
        self._path, self._file = path, None
        self._kept = 0
        """Bytes of whole lines; a half-written last line lies beyond."""
        self.done: set[int] = set()
        """Indices of the prompts that have their results."""
        check_writable("--output", path)
        try:
            content = path.read_bytes() if path.exists() else b""
        except OSError as error:
            raise ReanchorError(f"--output {path} cannot be read: {error.strerror or error}") from None
        if content and not resume:
            raise ReanchorError(f"--output {path} exists; go on with it with --resume, or name another file")
        lines = content.split(b"\n")
        # What lies behind the last line break was cut off in the middle.
        if not lines[-1].startswith(_BEGINNING[: len(lines[-1])]):
            raise _foreign(f"{path}:{len(lines)}")
        for number, line in enumerate(lines[:-1], start=1):
            self.done.add(_read_result(line, f"{path}:{number}", prompts, settings))
        self._kept = len(content) - len(lines[-1])

    def append(self, line: str) -> None:
        """Adds a result; it is in the file when this returns."""
        try:
            if self._file is None:
                self._file = self._path.open("ab")
                self._file.truncate(self._kept)
            self._file.write(line.encode() + b"\n")
            self._file.flush()
        except OSError as error:
            raise ReanchorError(f"--output {self._path} cannot be written: {error.strerror or error}") from None

    def close(self) -> None:
        """Nothing more comes."""
        if self._file is not None:
            self._file.close()


def check_writable(flag: str, path: Path) -> None:
    """Raises ReanchorError where a file could not be written; leaves nothing behind."""
    real = Path(os.path.realpath(path))  # a link is written through
    try:
        if real.is_dir():
            reason = "it is a folder"
        elif not real.parent.is_dir():
            reason = f"there is no folder {real.parent}"
        elif real.is_symlink():
            reason = "its links go in a circle"
        elif not real.exists():
            tempfile.TemporaryFile(dir=real.parent).close()
            return
        elif not real.is_file():
            reason = "it is no regular file"
        else:
            real.open("r+b").close()
            return
    except OSError as error:
        reason = error.strerror or str(error)
    raise ReanchorError(f"{flag} {path} cannot be written: {reason}; name another file")


def _foreign(where: str) -> ReanchorError:
    return ReanchorError(f"{where} is no result of this program; --resume goes on with its own files only")


def _read_result(line: bytes, where: str, prompts: list[Prompt], settings: dict[str, Any]) -> int:
    """The index of the prompt that an earlier result belongs to."""
    try:
        record = json.loads(line)
        index, fingerprint, found = record["index"], record["fingerprint"], record["settings"]
        differing = [name for name in {**settings, **found} if settings.get(name) != found.get(name)]
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise _foreign(where) from None
    if differing:
        name = differing[0]
        raise ReanchorError(
            f"{where} was made with {name} {found.get(name)!r}; expected {settings.get(name)!r}, as now: "
            "resume with the same settings, or name another file"
        )
    if not isinstance(index, int) or not 0 <= index < len(prompts) or prompts[index].fingerprint != fingerprint:
        raise ReanchorError(f"{where} answers another prompt than number {index} now; resume with the same prompts")
    return index
