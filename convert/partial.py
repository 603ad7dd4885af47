"""A folder that is there as a whole or not at all."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from reanchor_jax.checkpoint.manifest import MANIFEST, is_converted
from reanchor_jax.errors import ReanchorError

MARK = ".reanchor_partial"
"""Marks a folder as ours before anything else is in it."""


def check_out(out: Path, force: bool) -> None:
    """Raises ReanchorError where `out` holds something that must not be replaced, or lies within such."""
    try:
        around = next((folder for folder in out.absolute().parents if is_converted(folder)), None)
        if around is not None:
            raise ReanchorError(f"{out} lies in the converted checkpoint {around}; choose an --out beside it")
        if not os.path.lexists(out) or (out.is_dir() and not out.is_symlink() and not any(out.iterdir())):
            return
        if out.is_dir() and is_converted(out):
            if not force:
                raise ReanchorError(f"{out} holds a converted checkpoint already; choose another --out or add --force")
            return
    except OSError as error:
        raise ReanchorError(f"{out} cannot be read: {error.strerror}; choose another --out") from None
    raise ReanchorError(
        f"{out} exists and is no converted checkpoint (it has no {MANIFEST}); expected a folder that does not exist: "
        "choose another --out or remove it yourself"
    )


@contextlib.contextmanager
def partial_folder(out: Path, force: bool) -> Iterator[Path]:
    """An empty folder beside `out`, which takes its place if all goes well and is removed otherwise.

    What a killed process left there is removed first.

    Raises:
      ReanchorError: `out` must not be replaced, cannot be written, or is being written.
    """
    check_out(out, force)
    out = Path(os.path.realpath(out))  # of a link, what it points to is replaced
    partial, replaced = (out.with_name(out.name + end) for end in (".partial", ".replaced"))
    with _os_errors(out):
        partial.mkdir(parents=True, exist_ok=True)
        lock = os.open(partial, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ReanchorError(
                f"{partial} is being written by another process; wait for it or choose another --out"
            ) from None
        with _os_errors(out):
            _empty(partial)
        try:
            yield partial
            with _os_errors(out):
                (partial / MARK).unlink(missing_ok=True)
                if is_converted(replaced):  # left by a process that was killed between the next lines
                    shutil.rmtree(replaced)
                if is_converted(out):
                    os.rename(out, replaced)
                os.rename(partial, out)
                if is_converted(replaced):
                    shutil.rmtree(replaced)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    finally:
        os.close(lock)


def _empty(partial: Path) -> None:
    """Makes the folder empty but for its mark. One that is neither marked nor empty is someone else's."""
    held = list(partial.iterdir())
    if held and not (partial / MARK).exists() and not is_converted(partial):
        raise ReanchorError(f"{partial} is in the way and not of this program; remove it or choose another --out")
    (partial / MARK).touch()
    for path in held:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != MARK:
            path.unlink()


@contextlib.contextmanager
def _os_errors(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ReanchorError(f"{out} cannot be written: {error.strerror}; choose another --out") from None
