"""Conversion: what comes back is what went in, on any mesh, and through plain Orbax as well."""

from __future__ import annotations

import hashlib
import io
import json
import socket
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AxisType, Mesh

from convert import write
from convert.__main__ import main as convert
from reanchor_jax.checkpoint import converted_source, load_drafter, load_target
from reanchor_jax.checkpoint.converted_source import ConvertedSource
from reanchor_jax.checkpoint.fill import named_parameters
from reanchor_jax.checkpoint.manifest import MANIFEST, PARAMETERS, read_manifest
from reanchor_jax.checkpoint.rules import Slot
from reanchor_jax.checkpoint.safetensors_source import SafetensorsSource
from reanchor_jax.pair import load_pair
from reanchor_jax.tokenizer import load_tokenizer
from tests.checkpoint_folders import (
    drafter_config,
    drafter_tensors,
    target_config,
    target_tensors,
    write_folder,
    write_sharded,
)
from tests.tiny import make_pair

CONFIG = target_config("qwen3", tie_word_embeddings=False)


def mesh(**axes: int) -> Mesh:
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def same(a, b) -> None:
    """Two modules of one config, bit by bit."""
    assert a.config == b.config
    left, right = named_parameters(a), named_parameters(b)
    assert left.keys() == right.keys()
    for name in left:
        assert left[name].dtype == right[name].dtype
        np.testing.assert_array_equal(np.asarray(left[name]), np.asarray(right[name]), err_msg=name)


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """A sharded qwen3 folder with its own head, a tokenizer's files, and files that must not travel."""
    folder = tmp_path_factory.mktemp("source") / "model"
    write_sharded(folder, CONFIG, target_tensors(CONFIG))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7]}))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    for name in ("modeling.py", "pytorch_model.bin", "optimizer.json", "mask.pkl"):
        (folder / name).write_text("import os")
    return folder


@pytest.fixture(scope="module")
def converted(source) -> Path:
    out = source.with_name("converted")
    assert convert([str(source), "--out", str(out)]) == 0
    return out


def test_a_target_comes_back(source, converted, capsys):
    target = load_target(source)
    assert target.config.eos_token_ids == (2, 7)
    same(load_target(converted), target)
    same(load_target(converted, dtype=jnp.bfloat16), load_target(source, dtype=jnp.bfloat16))
    assert convert(["verify", str(converted), str(source)]) == 0
    assert capsys.readouterr().out == "equal\n"
    held = {path.name for path in converted.iterdir()}
    assert held == {PARAMETERS, MANIFEST, "config.json", "generation_config.json", "chat_template.jinja"}
    assert not converted.with_name("converted.partial").exists()


def test_the_manifest_says_where_everything_is_from(source, converted):
    manifest = read_manifest(converted)
    assert (manifest.kind, manifest.source, manifest.revision, manifest.commit) == ("target", str(source), None, None)
    assert (manifest.dtype, manifest.mesh, manifest.config) == ("float32", 1, CONFIG)
    names = {path.name for path in source.glob("*.safetensors*")} | {"generation_config.json", "config.json"}
    assert manifest.source_files.keys() == names | {"chat_template.jinja"}
    for name, record in manifest.source_files.items():
        assert record.sha256 == hashlib.sha256((source / name).read_bytes()).hexdigest()
    assert manifest.packages["jax"] == jax.__version__ and "orbax-checkpoint" in manifest.packages
    tensors = target_tensors(CONFIG)
    assert manifest.tensors.keys() == tensors.keys()
    for name, record in manifest.tensors.items():
        assert record.sha256 == hashlib.sha256(tensors[name].tobytes()).hexdigest()
    assert manifest.tensors["model.layers.2.mlp.up_proj.weight"].row == 2
    assert manifest.tensors["lm_head.weight"].row is None


def test_pieces_and_chunks(tmp_path, source, converted, monkeypatch):
    """A tensor that is written in many pieces is the one that is written in one."""
    monkeypatch.setattr(write, "CHUNK_BYTES", 4000)
    monkeypatch.setattr(converted_source, "_STEP_BYTES", 5000)  # which is no whole number of chunks
    out = tmp_path / "out"
    assert convert([str(source), "--out", str(out), "--mesh", "2"]) == 0
    same(load_target(out), load_target(source))
    same(load_target(out, mesh=mesh(model=2)), load_target(source))
    embedding = json.loads((out / PARAMETERS / "embedding" / "zarr.json").read_text())
    assert embedding["chunk_grid"]["configuration"]["chunk_shape"] == [10, 64]  # 15 rows fit; 10 divide each half
    assert read_manifest(out).tensors == read_manifest(converted).tensors


def test_chunks_are_parts_of_one_layer_and_one_device():
    leaf = jax.ShapeDtypeStruct((36, 4096, 4096), jnp.bfloat16)
    slots = {"a": Slot("layers.o_proj", 0, "copy")}
    plan = make_pair(4).target
    assert write.chunk_shape(plan, "layers.0.o_proj", leaf, slots, 2) == (1, 4096, 2048)
    leaf = jax.ShapeDtypeStruct((151936, 2048), jnp.bfloat16)
    slots = {"a": Slot("embedding", None, "copy")}
    assert write.chunk_shape(plan, "embedding", leaf, slots, 1) == (4748, 2048)  # 8192 rows have 32 MiB; 32 parts
    assert write.chunk_shape(plan, "embedding", leaf, slots, 8) == (4748, 2048)
    assert write.chunk_shape(plan, "final_norm", jax.ShapeDtypeStruct((64,), jnp.float32), slots, 8) == (64,)


# ---------------------------------------------------------------- meshes


@pytest.mark.parametrize("saved", [1, 2])
def test_restored_on_other_meshes(tmp_path, source, saved, monkeypatch):
    """No device reads more than its part of a weight that is split, whatever it was saved for."""
    out = tmp_path / "out"
    assert convert([str(source), "--out", str(out), "--mesh", str(saved)]) == 0
    whole = load_target(source)
    reads = []
    for kind in (ConvertedSource, SafetensorsSource):
        read = kind.read

        def spy(self, name, index=None, read=read):
            values = read(self, name, index)
            reads.append((name, values.shape))
            return values

        monkeypatch.setattr(kind, "read", spy)
    for on in (mesh(model=1), mesh(model=2), mesh(data=4, model=2)):
        parts = on.shape["model"]
        for path, stacked in ((out, True), (source, False)):
            reads.clear()
            target = load_target(path, mesh=on)
            same(target, whole)
            layers = target.layers[0]
            assert layers.q_proj[...].addressable_shards[0].data.shape == (3, 64 // parts, 64)
            assert layers.down_proj[...].addressable_shards[0].data.shape == (3, 64, 96 // parts)
            assert len(target.lm_head[...].sharding.device_set) == on.size
            rows = [shape for name, shape in reads if "up_proj" in name]
            assert set(rows) == {((3,) if stacked else ()) + (96 // parts, 64)}


def test_restored_by_plain_orbax(source, converted):
    target = load_target(source, mesh=mesh(model=2))
    abstract = {
        name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
        for name, leaf in named_parameters(target).items()
    }
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(converted / PARAMETERS, abstract)
    for name, leaf in named_parameters(target).items():
        assert restored[name].sharding == leaf.sharding
        np.testing.assert_array_equal(np.asarray(restored[name]), np.asarray(leaf))


def test_a_pair_of_both_kinds_on_a_mesh(tmp_path, source, converted):
    config = drafter_config()
    folder = write_folder(tmp_path / "d", config, drafter_tensors(config))
    pair = load_pair(str(converted), str(folder), mesh=mesh(model=2))
    assert pair.drafter is not None
    assert pair.drafter.layers.q_proj[...].addressable_shards[0].data.shape == (2, 32, 64)
    same(pair.target, load_target(source))
    same(pair.drafter, load_drafter(folder))


# ---------------------------------------------------------------- the command


def test_a_converted_checkpoint_converts_and_verifies_as_a_source(tmp_path, source, converted):
    out = tmp_path / "half"
    assert convert([str(converted), "--out", str(out), "--dtype", "bfloat16"]) == 0
    assert convert(["verify", str(out), str(source)]) == 0
    assert convert([str(source), "--out", str(out), "--dtype", "float32", "--force"]) == 0
    same(load_target(out), load_target(source))
    assert [path.name for path in tmp_path.iterdir()] == ["half"]


def test_verify_names_what_differs(tmp_path, converted, capsys):
    tensors = target_tensors(CONFIG)
    tensors["model.layers.1.self_attn.o_proj.weight"][3, 5] += 1
    other = write_folder(tmp_path / "other", CONFIG | {"rope_theta": 5e5}, tensors)
    (other / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7]}))
    assert convert(["verify", str(converted), str(other)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 and lines[0].startswith("config: pattern (") and lines[2] == "2 differences"
    assert lines[1] == "model.layers.1.self_attn.o_proj.weight -> layers.0.o_proj[1]: values differ"
    tied = target_config("qwen3", vocab_size=80)
    assert convert(["verify", str(converted), str(write_folder(tmp_path / "tied", tied, target_tensors(tied)))]) == 1
    out = capsys.readouterr().out
    assert "config: vocab_size 160 differs from 80" in out
    assert f"lm_head: only in {converted}" in out and "embedding: [160, 64] differs from [80, 64]" in out

    assert convert(["verify", str(converted), "smollm2-135m", "--drafter"]) == 1
    assert f"config: {converted} is a target, " in capsys.readouterr().out


def test_verify_does_not_believe_the_manifest(tmp_path, source, capsys):
    """A value that was changed together with its checksum, or a hash in the manifest."""
    import tensorstore

    out = tmp_path / "out"
    assert convert([str(source), "--out", str(out)]) == 0
    kvstore = {"driver": "file", "path": str(out / PARAMETERS / "final_norm")}
    store = tensorstore.open({"driver": "zarr3", "kvstore": kvstore}, open=True).result()
    value = store[3].read().result()
    store[3].write(value + 1).result()
    assert convert(["verify", str(out), str(source)]) == 1
    assert "model.norm.weight -> final_norm: values differ" in capsys.readouterr().out
    store[3].write(value).result()
    assert convert(["verify", str(out), str(source)]) == 0
    data = json.loads((out / MANIFEST).read_text())
    data["tensors"]["model.norm.weight"]["sha256"] = "0" * 64
    (out / MANIFEST).write_text(json.dumps(data))
    capsys.readouterr()
    assert convert(["verify", str(out), str(source)]) == 1
    assert "final_norm: values are the source's, but not what the manifest recorded" in capsys.readouterr().out


def test_no_network_for_local_paths(tmp_path, source, monkeypatch):
    def connect(*args):
        raise AssertionError("the network was touched")

    monkeypatch.setattr(socket.socket, "connect", connect)
    monkeypatch.setattr(socket, "getaddrinfo", connect)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    assert convert([str(source), "--out", str(tmp_path / "out")]) == 0
    load_tokenizer(tmp_path / "out")
    load_target(tmp_path / "out")


def test_a_bar_on_a_terminal_only(tmp_path, source, capsys, monkeypatch):
    assert convert([str(source), "--out", str(tmp_path / "a")]) == 0
    captured = capsys.readouterr()
    assert captured.err == "" and captured.out.startswith(f"{tmp_path / 'a'}: target, float32, 14 parameters, ")

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    assert convert([str(source), "--out", str(tmp_path / "b")]) == 0
    assert "━" in terminal.getvalue() and "/s" in terminal.getvalue()
    assert capsys.readouterr().err == ""


def test_help_is_one_text(capsys):
    for arguments in (["--help"], ["convert", "--help"], ["verify", "-h"]):
        with pytest.raises(SystemExit) as caught:
            convert(arguments)
        assert caught.value.code == 0
        assert "python -m convert verify DIR SOURCE" in capsys.readouterr().out
