"""What the flags of both command lines share."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from reanchor_jax.errors import ReanchorError

LARGEST = 2**31 - 1
"""Of integers without a bound of their own: on the device sizes and counts are int32."""


class Parser(argparse.ArgumentParser):
    """Shows an epilog as it is written, takes no abbreviated flags, and raises ReanchorError on bad ones."""

    def __init__(self, *, prog: str, description: str, epilog: str):
        super().__init__(
            prog=prog,
            description=description,
            epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        raise ReanchorError(f"{message}; see --help")


def whole(least: int, most: int | None = None) -> Callable[[str], int]:
    """argparse type of an integer within bounds."""

    def convert(text: str) -> int:
        expected = f"an integer from {least} to {most}" if most else f"an integer >= {least}, at most {LARGEST}"
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"got {text!r:.60}, expected {expected}") from None
        if not least <= value <= (most or LARGEST):
            raise argparse.ArgumentTypeError(f"got {value!s:.60}, expected {expected}")
        return value

    return convert


def number(text: str) -> float:
    """argparse type of a number; its range is the caller's."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"got {text!r:.60}, expected a number") from None


def folder(text: str) -> Path:
    """argparse type of a folder; an empty text, as from an unset shell variable, is not the current one."""
    if not text:
        raise argparse.ArgumentTypeError("got nothing, expected a folder")
    return Path(text)
