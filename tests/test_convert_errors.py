"""Conversions that cannot be: one line each, nothing left behind, nothing of anybody else's touched."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType
from safetensors.numpy import load_file, save_file

from convert.__main__ import main as convert
from convert.partial import MARK
from reanchor_jax.checkpoint import load_drafter, load_target
from reanchor_jax.checkpoint.manifest import MANIFEST, PARAMETERS
from tests.checkpoint_folders import refuses, target_config, target_tensors, write_folder, write_sharded

CONFIG = target_config("qwen3")


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> tuple[Path, Path]:
    """A folder and what it converts to; tests change copies."""
    root = tmp_path_factory.mktemp("convert_errors")
    write_sharded(root / "source", CONFIG, target_tensors(CONFIG))
    assert convert([str(root / "source"), "--out", str(root / "out")]) == 0
    return root / "source", root / "out"


@pytest.fixture
def source(made, tmp_path) -> Path:
    return Path(shutil.copytree(made[0], tmp_path / "source"))


@pytest.fixture
def out(made, tmp_path) -> Path:
    return Path(shutil.copytree(made[1], tmp_path / "out"))


def fails(capsys, *arguments: Any) -> str:
    """Demands exit code 2 and one line on stderr; returns the line."""
    capsys.readouterr()
    assert convert([str(argument) for argument in arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("error: ") and captured.err.count("\n") == 1, captured
    return captured.err


# ---------------------------------------------------------------- sources


def cut(folder: Path) -> None:
    path = folder / "model-00002-of-00003.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def lose(folder: Path) -> None:
    (folder / "model-00003-of-00003.safetensors").unlink()


def double(folder: Path) -> None:
    first, second = (folder / f"model-0000{n}-of-00003.safetensors" for n in (1, 2))
    tensors = load_file(first)
    save_file({**tensors, next(iter(load_file(second))): np.zeros(2, np.float32)}, first)


def reshape(folder: Path) -> None:
    path = folder / "model-00001-of-00003.safetensors"
    tensors = load_file(path)
    tensors["model.embed_tokens.weight"] = np.ascontiguousarray(tensors["model.embed_tokens.weight"].T)
    save_file(tensors, path)


def quantize(folder: Path) -> None:
    path = folder / "model-00001-of-00003.safetensors"
    tensors = load_file(path)
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].astype(np.int8)
    save_file(tensors, path)


def rename(folder: Path) -> None:
    (folder / "config.json").write_text(
        json.dumps(CONFIG | {"model_type": "mamba", "architectures": ["MambaForCausalLM"]})
    )


@pytest.mark.parametrize(
    ("damage", "flags", "says"),
    [
        (cut, (), ("model-00002-of-00003.safetensors cannot be read", "fetch the file again")),
        (lose, (), ("lacks 1 of 3 shards: model-00003-of-00003.safetensors", "fetch them")),
        (double, (), ("which another shard holds too", "expected each tensor once", "fetch the checkpoint again")),
        (reshape, (), ("embed_tokens.weight is 64x160, expected 160x64", "use files that belong together")),
        (quantize, (), ("unsupported dtypes: model.embed_tokens.weight is I8",)),
        (rename, (), ("model_type", "mamba", "expected")),
        (None, ("--mesh", 3), ("expected a multiple of the 3 devices",)),
        (None, ("--mesh", 0), ("--mesh", "got 0, expected an integer from 1")),
        (None, ("--dtype", "int8"), ("--dtype", "int8", "float32")),
        (None, ("--revision", "main"), ("local path; expected no revision",)),
        (None, ("--drafter",), ("--drafter tells the two models of smollm2-135m apart",)),
    ],
)
def test_sources_that_do_not_convert(source, tmp_path, capsys, damage, flags, says):
    if damage is not None:
        damage(source)
    line = fails(capsys, source, "--out", tmp_path / "new", *flags)
    assert all(text in line for text in says), line
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_float16_holds_no_large_numbers(tmp_path, capsys):
    tensors = target_tensors(CONFIG)
    tensors["model.layers.2.mlp.up_proj.weight"][5, 5] = 7e4
    folder = write_folder(tmp_path / "source", CONFIG, tensors)
    line = fails(capsys, folder, "--out", tmp_path / "new", "--dtype", "float16")
    assert "model.layers.2.mlp.up_proj.weight holds 70000; expected at most 65504" in line and "take bfloat16" in line
    refuses(lambda: load_target(folder, dtype="float16"), "up_proj.weight holds 70000")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_command_lines(source, tmp_path, capsys):
    assert "--out" in fails(capsys, source)
    assert "--out" in fails(capsys, source, "--out", "")
    assert "does not exist; expected a checkpoint folder" in fails(capsys, "look", "--out", tmp_path / "x")
    assert "unrecognized arguments: --fast" in fails(capsys, source, "--out", tmp_path / "x", "--fast")
    assert "is no converted checkpoint" in fails(capsys, "verify", source, source)
    assert "does not exist" in fails(capsys, "verify", tmp_path / "none", source)
    assert "see --help" in fails(capsys)


# ---------------------------------------------------------------- where it is written


def test_nothing_of_others_is_replaced(source, out, tmp_path, capsys):
    before = (out / MANIFEST).read_bytes()
    assert "holds a converted checkpoint already; choose another --out or add --force" in fails(
        capsys, source, "--out", out
    )
    assert (out / MANIFEST).read_bytes() == before
    for name in ("file", "folder", "link"):
        place = tmp_path / name
        if name == "file":
            place.write_text("mine")
        elif name == "folder":
            place.mkdir()
            (place / "mine").touch()
        else:
            place.symlink_to(tmp_path / "nowhere")
        for flags in ([], ["--force"]):
            line = fails(capsys, source, "--out", place, *flags)
            assert f"{place} exists and is no converted checkpoint" in line and "remove it yourself" in line
        assert os.path.lexists(place)
    assert (tmp_path / "file").read_text() == "mine"
    line = fails(capsys, source, "--out", out / PARAMETERS / "new")
    assert f"lies in the converted checkpoint {out}" in line and "beside it" in line
    (tmp_path / "new.partial").mkdir()
    (tmp_path / "new.partial" / "mine").touch()
    assert "new.partial is in the way and not of this program" in fails(capsys, source, "--out", tmp_path / "new")
    assert (tmp_path / "new.partial" / "mine").exists()


def test_an_empty_folder_is_filled_and_ours_is_forced(source, out, tmp_path):
    (tmp_path / "new").mkdir()
    assert convert([str(source), "--out", str(tmp_path / "new")]) == 0
    (tmp_path / "link").symlink_to(out)
    assert convert([str(source), "--out", str(tmp_path / "link"), "--force", "--dtype", "bfloat16"]) == 0
    assert (tmp_path / "link").is_symlink() and load_target(out, dtype="bfloat16").config.num_layers == 3
    assert {path.name for path in tmp_path.iterdir()} == {"source", "out", "new", "link"}


def test_killed_while_it_takes_its_place(source, out, tmp_path):
    """Between the two renames of --force: the old one is set aside, the new one complete, neither in place."""
    os.rename(out, tmp_path / "out.replaced")
    shutil.copytree(tmp_path / "out.replaced", tmp_path / "out.partial")
    assert convert([str(source), "--out", str(out)]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"source", "out"}


def test_two_at_a_time(source, tmp_path, capsys):
    partial = tmp_path / "new.partial"
    partial.mkdir()
    lock = os.open(partial, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    assert "is being written by another process" in fails(capsys, source, "--out", tmp_path / "new")
    os.close(lock)
    assert convert([str(source), "--out", str(tmp_path / "new")]) == 0


@contextlib.contextmanager
def largest_file(num_bytes: int):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_no_space(source, tmp_path, capsys, monkeypatch):
    """Too little from the start, and a disk that gives up on the way: real writes that fail."""
    with largest_file(20_000):
        line = fails(capsys, source, "--out", tmp_path / "new")
    assert "cannot be written" in line and "free space or choose another folder" in line
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    line = fails(capsys, source, "--out", tmp_path / "deep" / "new")
    assert "0.00 GB free; expected" in line and "choose another --out or a smaller --dtype" in line
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_places_that_cannot_be(source, tmp_path, capsys):
    (tmp_path / "file").touch()
    line = fails(capsys, source, "--out", tmp_path / "file" / "new")
    assert "Not a directory" in line and "choose another --out" in line
    assert "choose another --out" in fails(capsys, source, "--out", "/proc/new")
    assert "choose another --out" in fails(capsys, source, "--out", tmp_path / ("x" * 300))


def test_killed_half_way(source, tmp_path):
    """SIGKILL in the middle of the parameters: no folder, and a second run has no trace of the first."""
    new = tmp_path / "new"
    program = f"""
import contextlib, os, signal
from convert import convert as module
from convert.__main__ import main

@contextlib.contextmanager
def killing(total):
    done = []
    def advance(size):
        done.append(size)
        if sum(done) > 400_000:
            os.kill(os.getpid(), signal.SIGKILL)
    yield advance

module.progress = killing
main(["{source}", "--out", "{new}"])
"""
    killed = subprocess.run([sys.executable, "-c", program], cwd=Path(__file__).parent.parent, capture_output=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert not new.exists()
    partial = tmp_path / "new.partial"
    assert (partial / MARK).exists() and sum(path.is_file() for path in partial.rglob("*")) > 5
    (partial / "stray").touch()
    assert convert([str(source), "--out", str(new)]) == 0
    assert not partial.exists() and not (new / "stray").exists() and not (new / MARK).exists()
    assert convert(["verify", str(new), str(source)]) == 0


# ---------------------------------------------------------------- converted checkpoints


def chunk(folder: Path) -> Path:
    return folder / PARAMETERS / "layers.0.up_proj" / "c" / "1" / "0" / "0"


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def set_manifest(folder: Path, **changes: Any) -> None:
    data = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps({k: v for k, v in (data | changes).items() if v is not ...}))


DAMAGES: list[tuple[Callable[[Path], Any], tuple[str, ...]]] = [
    (lambda f: chunk(f).unlink(), ("lacks 1 of", "layers.0.up_proj/c/1/0/0", "convert the source again")),
    (lambda f: chunk(f).write_bytes(b"x"), ("layers.0.up_proj/c/1/0/0 has 1 bytes; expected", "again")),
    (lambda f: flip(chunk(f)), ("layers.0.up_proj cannot be read", "convert the source again")),
    (lambda f: flip(f / "config.json"), ("config.json has SHA-256", "expected")),
    (lambda f: flip(f / PARAMETERS / "embedding" / "zarr.json"), ("zarr.json has SHA-256", "expected")),
    (lambda f: (f / "notes.txt").touch(), ("holds 1 files that its manifest does not name: notes.txt", "move them")),
    (lambda f: (f / MANIFEST).write_text("{"), (f"{MANIFEST} is not valid JSON",)),
    (lambda f: (f / MANIFEST).unlink(), (f"its {MANIFEST} is missing", "convert the source again")),
    (lambda f: set_manifest(f, version=2), ("version is 2; expected 1", "with this version")),
    (lambda f: set_manifest(f, format="other"), ("format is 'other'; expected",)),
    (lambda f: set_manifest(f, files=[]), ("files is []; expected an object",)),
    (lambda f: set_manifest(f, mesh=...), ("mesh is missing",)),
    (lambda f: set_manifest(f, kind=3), ("kind is 3; expected a text",)),
    (lambda f: set_manifest(f, magic=3), ("unknown field magic",)),
]


@pytest.mark.parametrize("number", range(len(DAMAGES)))
def test_damaged_checkpoints(out, number, capsys):
    damage, says = DAMAGES[number]
    damage(out)
    refuses(lambda: load_target(out), *says)
    captured = capsys.readouterr()
    assert captured.err == "" and captured.out == ""


def test_parameters_of_another_model(out):
    data = json.loads((out / MANIFEST).read_text())
    parameters = dict(data["parameters"])
    parameters["extra"] = parameters.pop("final_norm")
    parameters["embedding"]["shape"] = [3, 64]
    parameters["layers.0.q_proj"]["dtype"] = "int8"
    set_manifest(out, parameters=parameters)
    refuses(
        lambda: load_target(out),
        "missing tensors: final_norm",
        "no place for: extra",
        "embedding is 3x64, expected 160x64",
        "layers.0.q_proj is int8",
    )
    parameters = data["parameters"]
    parameters["embedding"]["shape"], parameters["layers.0.q_proj"]["dtype"] = [160, 64], "bfloat16"
    set_manifest(out, parameters=parameters)
    refuses(lambda: load_target(out), "layers.0.q_proj is float32 [3, 64, 64]; expected bfloat16 [3, 64, 64]")


def test_what_is_asked_of_a_checkpoint(out):
    refuses(lambda: load_drafter(out), "describes no supported drafter")
    for model, says in ((3, "expected a multiple of the 3 devices"), (8, "num_heads is 4")):
        mesh = jax.make_mesh((model,), ("model",), axis_types=(AxisType.Auto,))
        refuses(lambda mesh=mesh: load_target(out, mesh=mesh), says)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    refuses(lambda: load_target(out, mesh=mesh), "mesh axis 'model' does not exist")
    refuses(lambda: load_target(out, revision="main"), "no revision")
    refuses(lambda: load_target(out, dtype="int8"), "dtype is 'int8'; expected one of")
