"""A tiny pair on disk with a byte-level tokenizer, and the command line called in this process."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental.compilation_cache import compilation_cache
from transformers import PreTrainedTokenizerFast

from reanchor_jax.checkpoint import save_drafter, save_target
from reanchor_jax.cli.main import main
from reanchor_jax.gguf_tokenizer import read_gguf_tokenizer
from reanchor_jax.pair import Pair
from tests.test_tokenizer import write_gguf
from tests.tiny import make_pair

VOCAB_SIZE = 268
BLOCK_SIZE = 4
MAX_POSITIONS = 512


class Folders(NamedTuple):
    """Where the pair lies, and the pair itself."""

    target: Path
    drafter: Path
    bare_target: Path  # the same target without a tokenizer
    pair: Pair

    @property
    def flags(self) -> list[str]:
        return ["--target", str(self.target), "--drafter", str(self.drafter)]


@contextlib.contextmanager
def folders_and_cache(root: Path) -> Iterator[Folders]:
    """The pair, with a cache folder of its own for compiled programs: many calls compile the same ones."""
    jax.config.update("jax_disable_most_optimizations", True)  # compiles twice as fast
    with mock.patch.dict(os.environ, REANCHOR_CACHE=str(root / "cache")):
        yield make_folders(root)
    jax.config.update("jax_disable_most_optimizations", False)
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()


@functools.cache  # once per test process: all modules ask for the same root
def make_folders(root: Path) -> Folders:
    """A float32 pair whose target has bytes as tokens (id = byte) and a chat template.

    Its texts are mostly printable, and hardly repeat themselves: no tied head, small logits for all
    tokens but printable ASCII.
    """
    root.mkdir()
    pair = make_pair(BLOCK_SIZE, vocab_size=VOCAB_SIZE, tied=False, seed=2)
    printable = np.isin(np.arange(VOCAB_SIZE), np.arange(32, 127))
    head = pair.target.lm_head[...]
    pair.target.lm_head = nnx.Param(jnp.where(printable[:, None], head, head * 0.3))
    folders = Folders(root / "target", root / "drafter", root / "bare", pair)
    for folder in (folders.target, folders.bare_target):
        save_target(pair.target, folder, dtype=pair.target.dtype)
    save_drafter(pair.drafter, folders.drafter, dtype=pair.target.dtype)
    tokenizer, _ = read_gguf_tokenizer(write_gguf(root / "tokenizer.gguf"))
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    tokenizer.save_pretrained(folders.target)
    return folders


@dataclasses.dataclass
class Result:
    """What a call of the command line left behind."""

    code: int
    out: str
    err: str

    @property
    def records(self) -> list[dict[str, Any]]:
        """The JSON objects of stdout, which holds nothing else."""
        return [json.loads(line) for line in self.out.splitlines()]


def call(capsys, *argv: Any) -> Result:
    """Runs the command line in this process."""
    code = main([str(argument) for argument in argv])
    captured = capsys.readouterr()
    return Result(code, captured.out, captured.err)


def untimed(record: dict[str, Any]) -> dict[str, Any]:
    """A record without what differs from run to run."""
    record = {name: value for name, value in record.items() if name not in ("seconds", "tokens_per_second")}
    if "turns" in record:
        record["turns"] = [untimed(turn) for turn in record["turns"]]
    return record
