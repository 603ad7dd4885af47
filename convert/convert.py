"""From any checkpoint to an Orbax checkpoint with a manifest."""

from __future__ import annotations

import json
import math
import shutil
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from convert.partial import MARK, check_out, partial_folder
from convert.progress import Advance, progress
from convert.write import write_parameters
from reanchor_jax.checkpoint.drafter_config import is_drafter
from reanchor_jax.checkpoint.fields import read_json
from reanchor_jax.checkpoint.fill import named_parameters
from reanchor_jax.checkpoint.gguf_source import GGUFSource
from reanchor_jax.checkpoint.hub import commit_of
from reanchor_jax.checkpoint.load import Plan, plan_drafter, plan_target
from reanchor_jax.checkpoint.manifest import (
    PARAMETERS,
    FileRecord,
    Manifest,
    ParameterRecord,
    list_files,
    package_versions,
    record_file,
)
from reanchor_jax.checkpoint.save import target_fields
from reanchor_jax.errors import ReanchorError
from reanchor_jax.gguf_tokenizer import read_gguf_tokenizer
from reanchor_jax.placement import check_divides

_TRAVEL = (
    "config.json", "generation_config.json", "chat_template.jinja", "chat_template.json", "tokenizer.json",
    "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "vocab.txt",
    "tokenizer.model", "spiece.model",
)  # fmt: skip
"""Files of the source that the converted checkpoint holds too: configs and the tokenizer, never code."""
_SOURCE_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def open_plan(path: Path, dtype: jnp.dtype) -> Plan:
    """An opened target or drafter, whichever it is."""
    return plan_drafter(path, dtype) if path.is_dir() and is_drafter(path) else plan_target(path, dtype)


def convert(
    path: Path, out: Path, *, source: str, revision: str | None, dtype: jnp.dtype | None, mesh: int, force: bool
) -> Manifest:
    """Converts a checkpoint.

    Args:
      path: the checkpoint on this machine.
      out: the folder to write.
      source, revision: what the user called it, for the manifest.
      dtype: of the parameters; None: the source's, float32 where it has several or others.
      mesh: number of devices whose parts the chunks become.
      force: replace a converted checkpoint in `out`.

    Raises:
      ReanchorError: the source cannot be read or does not fit its config; `out` cannot be written or
        must not be replaced; the devices do not divide the model.
    """
    check_out(out, force)
    plan = open_plan(path, jnp.dtype("float32"))
    dtype = _own_dtype(plan) if dtype is None else dtype
    plan = open_plan(path, dtype)
    plan.check()
    check_divides(plan.abstract, mesh)
    plan.check_contents()
    travelling = [path / name for name in _TRAVEL if path.is_dir() and (path / name).is_file()]
    read = [*travelling, *plan.source.files]
    size = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in named_parameters(plan.abstract).values())
    _check_space(out, size)
    with partial_folder(out, force) as folder, progress(size + sum(file.stat().st_size for file in read)) as advance:
        records = write_parameters(folder / PARAMETERS, plan, mesh, advance)
        try:
            for file in travelling:
                shutil.copyfile(file, folder / file.name)
            if isinstance(plan.source, GGUFSource):
                write_gguf_files(path, folder, plan, dtype)
        except OSError as error:
            raise ReanchorError(f"{out} cannot be written: {error.strerror}; choose another --out") from None
        root = path if path.is_dir() else path.parent
        manifest = Manifest(
            kind="drafter" if is_drafter(folder) else "target",
            source=source,
            revision=revision,
            commit=commit_of(path),
            source_files={file.relative_to(root).as_posix(): _hashed(file, advance) for file in read},
            config=read_json(folder / "config.json"),
            dtype=dtype.name,
            mesh=mesh,
            packages=package_versions(),
            parameters={
                name: ParameterRecord(shape=leaf.shape, dtype=np.dtype(leaf.dtype).name)
                for name, leaf in named_parameters(plan.abstract).items()
            },
            tensors=records,
            files=_own_files(folder),
        )
        manifest.write(folder)
        (folder / MARK).unlink()
        _check_written(folder, plan, dtype)
    return manifest


def _own_dtype(plan: Plan) -> jnp.dtype:
    found = {info.dtype for name, info in plan.source.tensors.items() if name in plan.slots} - {"I32", "I64"}
    name = found.pop() if len(found) == 1 else ""
    return jnp.dtype(_SOURCE_DTYPES.get(name, "float32"))


def _check_space(out: Path, size: int) -> None:
    parent = next(parent for parent in out.absolute().parents if parent.exists())
    free = shutil.disk_usage(parent).free
    if free < size:
        raise ReanchorError(
            f"{parent} has {free / 1e9:.2f} GB free; expected {size / 1e9:.2f} GB for the parameters: "
            "free space, choose another --out or a smaller --dtype"
        )


def write_gguf_files(path: Path, folder: Path, plan: Plan, dtype: jnp.dtype) -> None:
    """config.json and the tokenizer in Hugging Face's format, out of a GGUF file."""
    fields = {**target_fields(plan.abstract.config), "dtype": dtype.name}
    (folder / "config.json").write_text(json.dumps(fields, indent=1) + "\n", encoding="utf-8")
    try:
        tokenizer, _ = read_gguf_tokenizer(path)  # the ids that end a text are in the config
    except ReanchorError as error:
        print(f"no tokenizer is converted: {error}", file=sys.stderr)
        return
    tokenizer.save_pretrained(folder)


def _hashed(file: Path, advance: Advance) -> FileRecord:
    record = record_file(file, hashed=True)
    advance(record.bytes)
    return record


def _own_files(folder: Path) -> dict[str, FileRecord]:
    """Records of all files but the mark of an unfinished folder."""
    names = [name for name in list_files(folder) if name != MARK]
    return {name: record_file(folder / name, hashed=not is_chunk(name)) for name in names}


def is_chunk(name: str) -> bool:
    """Whether it is a chunk of a parameter, which has its checksum inside: parameters/NAME/c/0/0."""
    parts = name.split("/")
    return len(parts) > 2 and parts[0] == PARAMETERS and parts[2] == "c"


def _check_written(folder: Path, plan: Plan, dtype: jnp.dtype) -> None:
    """What was written must open as what was read."""
    written = open_plan(folder, dtype)
    written.check()
    if written.abstract.config != plan.abstract.config:
        raise ReanchorError(f"{plan.source.name}: its config does not survive as config.json; use its safetensors")
