"""Writing of files that are there as a whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from reanchor_jax.errors import ReanchorError


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """A file beside the place, to be written in the block; moved there at its end, or removed by an error.

    What a link points to is replaced, not the link. Two processes may write the same place.

    Raises:
      ReanchorError: the place cannot be written.
    """
    path = Path(os.path.realpath(path))
    aside = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield aside
        os.replace(aside, path)
    except OSError as error:
        reason = error.strerror or error
        raise ReanchorError(f"{path} cannot be written: {reason}; make room for it, or name another place") from None
    finally:
        aside.unlink(missing_ok=True)


def write_whole(path: Path, text: str) -> None:
    """Writes a text, whole or not at all."""
    with written_whole(path) as aside:
        aside.write_text(text, encoding="utf-8")
