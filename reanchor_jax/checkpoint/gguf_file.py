"""One opened GGUF file for all its readers: weights and tokenizer."""

from __future__ import annotations

import functools
from pathlib import Path

import gguf


class _Reader(gguf.GGUFReader):
    """Refuses to read past the end, where the base class goes on with empty arrays: a damaged
    length of 2**60 would keep it busy for ever."""

    def _get(self, offset, dtype, count=1, *args, **kwargs):
        found = super()._get(offset, dtype, count, *args, **kwargs)
        if len(found) != count:
            raise ValueError("it ends too early")
        return found


def open_gguf(path: Path) -> gguf.GGUFReader:
    """The reader of a file, kept for the next call while the file does not change.

    Opening walks the whole vocabulary, which takes seconds; weights and tokenizer share it.
    The reader trusts its input: a damaged file raises anything.
    """
    stat = path.stat()
    return _open(path, stat.st_mtime_ns, stat.st_size)


@functools.lru_cache(maxsize=1)
def _open(path: Path, _mtime: int, _size: int) -> gguf.GGUFReader:
    return _Reader(path)
