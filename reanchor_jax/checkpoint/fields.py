"""Reading of an untrusted JSON config, field by field; what nobody has read is an error."""

from __future__ import annotations

import json
import math
import stat
from pathlib import Path
from typing import Any

from reanchor_jax.errors import ReanchorError

_MAX_BYTES = 1 << 26
MAX_VOCAB, MAX_WIDTH, MAX_LAYERS = 1 << 22, 1 << 17, 1 << 10
MAX_MLP_WIDTH, MAX_HEAD_DIM = 1 << 20, 1 << 14
"""Bounds far above any model, so that a damaged number is named before anything is allocated."""


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object whose keys are unique at every level.

    Raises:
      ReanchorError: no such file, not JSON, not an object, or a key that is there twice.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        data = dict(pairs)
        if len(data) != len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))
            raise ReanchorError(f"{path} holds the key {twice!r} twice; expected each key once")
        return data

    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # a pipe would keep us waiting
            raise ReanchorError(f"{path} cannot be read: it is no regular file; expected a JSON file")
        if status.st_size > _MAX_BYTES:
            raise ReanchorError(f"{path} has {status.st_size} bytes; expected a JSON file below {_MAX_BYTES}")
        data = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=unique)
    except FileNotFoundError:
        raise ReanchorError(f"{path} is missing; expected a checkpoint folder with that file") from None
    except OSError as error:
        raise ReanchorError(f"{path} cannot be read: {error.strerror}") from None
    except ReanchorError:
        raise
    except (ValueError, RecursionError) as error:
        raise ReanchorError(f"{path} is not valid JSON: {_one_line(error)}") from None
    if not isinstance(data, dict):
        raise ReanchorError(f"{path} holds {type(data).__name__}; expected a JSON object")
    return data


class Fields:
    """The fields of one JSON object. Each getter marks its field as read; `finish` names the rest."""

    def __init__(self, data: dict[str, Any], where: str):
        self.data = data
        self.where = where
        self._left = set(data)

    def __contains__(self, name: str) -> bool:
        return name in self.data

    def fail(self, name: str, got: object, expected: str) -> ReanchorError:
        """The error for a field with a bad value."""
        return ReanchorError(f"{self.where}: {name} is {_short(got)}; expected {expected}")

    def get(self, name: str) -> Any:
        """The raw value of a field that must be there."""
        self._left.discard(name)
        if name not in self.data:
            raise ReanchorError(f"{self.where}: {name} is missing; add it, no default is assumed")
        return self.data[name]

    def get_or_none(self, name: str) -> Any:
        """The raw value, or None where the field is missing."""
        return self.get(name) if name in self.data else None

    def integer(self, name: str, low: int, high: int) -> int:
        """An integer in low .. high."""
        return self._integer(name, self.get(name), low, high)

    def integers(self, name: str, low: int, high: int) -> tuple[int, ...]:
        """A list of integers, each in low .. high."""
        value = self.get(name)
        if not isinstance(value, list):
            raise self.fail(name, value, "a list of integers")
        return tuple(self._integer(f"an entry of {name}", entry, low, high) for entry in value)

    def number(self, name: str, *, above: float, below: float) -> float:
        """A finite number strictly between the two bounds."""
        return self._number(name, self.get(name), above, below)

    def numbers(self, name: str, *, above: float, below: float) -> tuple[float, ...]:
        """A list of finite numbers, each strictly between the two bounds."""
        value = self.get(name)
        if not isinstance(value, list):
            raise self.fail(name, value, "a list of numbers")
        return tuple(self._number(f"an entry of {name}", entry, above, below) for entry in value)

    def _number(self, name: str, value: Any, above: float, below: float) -> float:
        fine = isinstance(value, int | float) and not isinstance(value, bool)
        # Compared as it is: an integer of a thousand digits does not become a float.
        if not fine or not math.isfinite(value if isinstance(value, float) else 0) or not above < value < below:
            raise self.fail(name, value, f"a number above {above:g} and below {below:g}")
        return float(value)

    def boolean(self, name: str) -> bool:
        """true or false."""
        value = self.get(name)
        if not isinstance(value, bool):
            raise self.fail(name, value, "true or false")
        return value

    def section(self, name: str) -> Fields:
        """A nested object."""
        value = self.get(name)
        if not isinstance(value, dict):
            raise self.fail(name, value, "an object")
        return Fields(value, f"{self.where}: {name}")

    def only(self, name: str, *allowed: object, why: str = "nothing else is supported") -> None:
        """A field that may be missing, but where it is there has one of these values."""
        if name not in self.data:
            return
        value = self.get(name)
        if not any(type(value) is type(a) and value == a for a in allowed):
            shown = " or ".join(json.dumps(a) for a in allowed)
            raise self.fail(name, value, f"{shown}; {why}")

    def ignore(self, *names: str) -> None:
        """Fields that do not change what the model computes."""
        self._left.difference_update(names)

    def finish(self) -> None:
        """Refuses fields that nothing has read: they may change the model."""
        if self._left:
            names = ", ".join(sorted(self._left)[:6])
            raise ReanchorError(
                f"{self.where}: unknown field {names}, which may change the model; "
                "remove it from the config if it does not"
            )

    def _integer(self, name: str, value: object, low: int, high: int) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise self.fail(name, value, f"an integer from {low} to {high}")
        return value


def _short(value: object) -> str:
    try:
        text = " ".join(repr(value).split())
    except ValueError:  # Python writes at most 4,300 digits
        text = "an integer of thousands of digits"
    return text if len(text) <= 60 else text[:57] + "..."


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
