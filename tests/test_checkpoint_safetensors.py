"""Safetensors folders: strict in names, shapes and dtypes; sharded or not; local or from the hub."""

from __future__ import annotations

import fnmatch
import json
import pickle
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from convert.__main__ import main as convert
from reanchor_jax.checkpoint import hub, load_drafter, load_target
from reanchor_jax.checkpoint.fill import named_parameters
from tests.checkpoint_folders import (
    drafter_config,
    drafter_tensors,
    refuses,
    target_config,
    target_tensors,
    write_folder,
    write_index,
    write_sharded,
)

CONFIG = target_config("qwen3", tie_word_embeddings=False)


@pytest.fixture
def tensors() -> dict[str, np.ndarray]:
    return target_tensors(CONFIG)


def same(a, b) -> None:
    assert a.config == b.config
    for name, leaf in named_parameters(a).items():
        np.testing.assert_array_equal(np.asarray(leaf), np.asarray(named_parameters(b)[name]), err_msg=name)


# ---------------------------------------------------------------- values and dtypes


def test_every_tensor_lands_in_its_parameter(tmp_path, tensors):
    target = load_target(write_folder(tmp_path, CONFIG, tensors))
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(target))
    np.testing.assert_array_equal(target.embedding[...], tensors["model.embed_tokens.weight"])
    assert target.lm_head is not None
    np.testing.assert_array_equal(target.lm_head[...], tensors["lm_head.weight"])
    np.testing.assert_array_equal(target.layers[0].up_proj[...][2], tensors["model.layers.2.mlp.up_proj.weight"])
    np.testing.assert_array_equal(target.layers[0].k_norm[...][1], tensors["model.layers.1.self_attn.k_norm.weight"])
    total = sum(t.size for t in tensors.values())
    assert sum(leaf.size for leaf in jax.tree.leaves(target)) == total
    given = np.sort(np.concatenate([t.ravel() for t in tensors.values()]))
    held = np.sort(np.concatenate([np.asarray(leaf).ravel() for leaf in jax.tree.leaves(target)]))
    np.testing.assert_array_equal(held, given)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, "bfloat16"])
def test_mixed_dtypes_are_cast_to_the_one_asked_for(tmp_path, tensors, dtype):
    """bfloat16, float16 and float64 tensors in one file, each cast once and exactly."""
    kinds = [ml_dtypes.bfloat16, np.float16, np.float64, np.float32]
    mixed = {name: t.astype(kinds[n % 4]) for n, (name, t) in enumerate(tensors.items())}
    target = load_target(write_folder(tmp_path, CONFIG, mixed), dtype=dtype)
    assert {leaf.dtype for leaf in jax.tree.leaves(target)} == {jnp.dtype(dtype)}
    for layer in range(3):
        name = f"model.layers.{layer}.self_attn.q_proj.weight"
        np.testing.assert_array_equal(target.layers[0].q_proj[...][layer], mixed[name].astype(jnp.dtype(dtype)))


@pytest.mark.parametrize("dtype", ["int8", "float7", jnp.int32, None, "float64"])
def test_dtypes_that_cannot_be_asked_for(tmp_path, tensors, dtype):
    refuses(lambda: load_target(write_folder(tmp_path, CONFIG, tensors), dtype=dtype), "dtype is", "bfloat16")


def test_dtypes_that_cannot_be_read(tmp_path, tensors):
    tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(np.int8)
    tensors["lm_head.weight"] = tensors["lm_head.weight"].astype(ml_dtypes.float8_e4m3fn)
    folder = write_folder(tmp_path, CONFIG, tensors)
    refuses(lambda: load_target(folder), "unsupported dtypes", "model.norm.weight is I8", "lm_head.weight is F8_E4M3")


# ---------------------------------------------------------------- strict, both ways


def test_all_faults_come_in_one_error(tmp_path, tensors):
    del tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["model.layers.0.self_attn.q_proj.bias"] = np.zeros(64, np.float32)
    tensors["model.norm.weight"] = np.ones(63, np.float32)
    line = refuses(lambda: load_target(write_folder(tmp_path, CONFIG, tensors)))
    assert "missing tensors: model.layers.1.mlp.up_proj.weight;" in line
    assert "no place for: model.layers.0.self_attn.q_proj.bias;" in line
    assert "model.norm.weight is 63, expected 64;" in line


def test_many_faults_are_counted(tmp_path, tensors):
    kept = {name: t for name, t in tensors.items() if "mlp" not in name}
    refuses(lambda: load_target(write_folder(tmp_path, CONFIG, kept)), "gate_proj.weight", "and 5 more")


@pytest.mark.parametrize("name", ["model.layers.3.mlp.up_proj.weight", "layers.0.mlp.up_proj.weight", "a\nb", ""])
def test_unknown_tensors_are_refused(tmp_path, tensors, name):
    tensors[name] = np.zeros(3, np.float32)
    refuses(lambda: load_target(write_folder(tmp_path, CONFIG, tensors)), "no place for", " ".join(name.split()))


@pytest.mark.parametrize("shape", [(96 * 64,), (64, 96), (1, 96, 64), ()])
def test_wrong_shapes_are_refused(tmp_path, tensors, shape):
    """The same number of values in another shape is as wrong."""
    tensors["model.layers.1.mlp.up_proj.weight"] = np.zeros(shape, np.float32)
    refuses(lambda: load_target(write_folder(tmp_path, CONFIG, tensors)), "up_proj.weight is", "expected 96x64")


def test_rotary_buffers_are_ignored(tmp_path, tensors):
    plain = load_target(write_folder(tmp_path / "plain", CONFIG, tensors))
    buffers = {f"model.layers.{n}.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32) for n in range(3)}
    same(load_target(write_folder(tmp_path / "more", CONFIG, tensors | buffers)), plain)


def test_tied_head_in_the_file(tmp_path):
    config = target_config()
    tensors = target_tensors(config)
    head = tensors["model.embed_tokens.weight"].copy()
    plain = load_target(write_folder(tmp_path / "a", config, tensors))
    assert plain.lm_head is None
    same(load_target(write_folder(tmp_path / "b", config, tensors | {"lm_head.weight": head})), plain)
    head[7, 3] += 1
    refuses(lambda: load_target(write_folder(tmp_path / "c", config, tensors | {"lm_head.weight": head})), "differs")
    short = write_folder(tmp_path / "d", config, tensors | {"lm_head.weight": head[1:]})
    refuses(lambda: load_target(short), "lm_head.weight", "differs")


def test_drafter_with_an_unknown_tensor_is_refused(tmp_path):
    config = drafter_config()
    tensors = drafter_tensors(config) | {"embed_positions.weight": np.zeros((160, 64), np.float32)}
    refuses(lambda: load_drafter(write_folder(tmp_path, config, tensors)), "no place for: embed_positions.weight")


def test_drafter_with_another_number_of_taps_is_refused(tmp_path):
    tensors = drafter_tensors(drafter_config())
    config = drafter_config(dflash_config={"mask_token_id": 150, "target_layer_ids": [0, 1, 2]})
    refuses(lambda: load_drafter(write_folder(tmp_path, config, tensors)), "fc.weight is 64x128, expected 64x192")


# ---------------------------------------------------------------- files


def test_damaged_files_are_refused(tmp_path, tensors):
    folder = write_folder(tmp_path, CONFIG, tensors)
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    for size in (0, 4, 8, 200, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        refuses(lambda: load_target(folder), "model.safetensors cannot be read")
    path.write_bytes(whole + b"x")
    refuses(lambda: load_target(folder), "model.safetensors cannot be read")
    path.write_bytes(b"\xff" * 100)
    refuses(lambda: load_target(folder), "model.safetensors cannot be read")
    path.unlink()
    path.mkdir()
    refuses(lambda: load_target(folder), "model.safetensors cannot be read")


class Bomb:
    """Unpickling it writes a file."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth"])
def test_pickles_are_never_opened(tmp_path, name):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / name).write_bytes(pickle.dumps(Bomb(tmp_path / "exploded")))
    refuses(lambda: load_target(tmp_path), "convert them to safetensors")
    assert not (tmp_path / "exploded").exists()


def test_folders_without_weights_and_files_of_another_kind(tmp_path):
    refuses(lambda: load_target(tmp_path), "config.json is missing")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    refuses(lambda: load_target(tmp_path), "holds neither model.safetensors nor")
    refuses(lambda: load_target(tmp_path / "config.json"), "no GGUF file")
    refuses(lambda: load_drafter(tmp_path / "config.json"), "expected a drafter's folder")
    refuses(lambda: load_target(tmp_path / "absent"), "does not exist")


# ---------------------------------------------------------------- shards


def test_sharded_equals_single(tmp_path, tensors):
    write_sharded(tmp_path / "shards", CONFIG, tensors)
    same(load_target(tmp_path / "shards"), load_target(write_folder(tmp_path / "single", CONFIG, tensors)))


def test_missing_and_truncated_shards(tmp_path, tensors):
    write_sharded(tmp_path, CONFIG, tensors)
    shard = tmp_path / "model-00002-of-00003.safetensors"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-10])
    refuses(lambda: load_target(tmp_path), "model-00002-of-00003.safetensors cannot be read")
    shard.unlink()
    refuses(lambda: load_target(tmp_path), "lacks 1 of 3 shards: model-00002-of-00003.safetensors")
    shard.mkdir()
    refuses(lambda: load_target(tmp_path), "model-00002-of-00003.safetensors cannot be read")


def test_tensor_in_two_shards(tmp_path, tensors):
    from safetensors.numpy import load_file, save_file

    write_sharded(tmp_path, CONFIG, tensors)
    shard = tmp_path / "model-00003-of-00003.safetensors"
    name = "model.embed_tokens.weight"
    save_file(load_file(shard) | {name: tensors[name]}, shard)
    refuses(lambda: load_target(tmp_path), "model-00003-of-00003.safetensors", name, "another shard")


def test_index_that_does_not_fit_its_shards(tmp_path, tensors):
    index = write_sharded(tmp_path, CONFIG, tensors)
    shard_of = index["weight_map"]
    run = lambda: load_target(tmp_path)
    first = "model-00001-of-00003.safetensors"
    write_index(tmp_path, {"weight_map": shard_of | {"model.ghost.weight": first}})
    refuses(run, "model.ghost.weight is in model-00001-of-00003.safetensors, but no shard holds it")
    write_index(tmp_path, {"weight_map": shard_of | {"model.norm.weight": "model-00003-of-00003.safetensors"}})
    refuses(run, "model.norm.weight", "but it is in")
    write_index(tmp_path, {"weight_map": {n: s for n, s in shard_of.items() if n != "model.norm.weight"}})
    refuses(run, "does not name model.norm.weight")
    for broken in ({}, {"weight_map": []}, {"weight_map": {"a": 1}}, {"weight_map": None}):
        write_index(tmp_path, broken)
        refuses(run, "weight_map is missing or damaged")
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(f'{{"weight_map": {{"model.norm.weight": "{first}", "model.norm.weight": "b.safetensors"}}}}')
    refuses(run, "index.json", "'model.norm.weight' twice")
    path.write_text("{")
    refuses(run, "index.json is not valid JSON")
    write_index(tmp_path, {"weight_map": {}})
    refuses(run, "missing tensors")


def test_index_does_not_lead_out_of_the_folder(tmp_path, tensors):
    write_folder(tmp_path / "secret", CONFIG, tensors)
    folder = tmp_path / "model"
    write_sharded(folder, CONFIG, tensors)
    escapes = ["../secret/model.safetensors", str(tmp_path / "secret" / "model.safetensors"), "..", "", "x.bin", "a\0b"]
    for escape in escapes:
        write_index(folder, {"weight_map": dict.fromkeys(tensors, escape)})
        refuses(lambda: load_target(folder), "names the shard", "same folder")


# ---------------------------------------------------------------- hub ids


def test_hub_is_asked_for_ids_only(tmp_path, tensors, monkeypatch):
    """A local folder never touches the network; an id is fetched without code and pickles."""
    import huggingface_hub

    folder = write_folder(tmp_path / "snapshot", CONFIG, tensors)
    calls = []

    def snapshot(repository, *, revision, allow_patterns):
        calls.append((repository, revision, allow_patterns))
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    plain = load_target(str(folder))
    assert not calls
    same(load_target("some-org/Some.Model-1", revision="abc123"), plain)
    repository, revision, patterns = calls.pop()
    assert (repository, revision) == ("some-org/Some.Model-1", "abc123")
    fetched = lambda name: any(fnmatch.fnmatch(name, pattern) for pattern in patterns)
    assert all(map(fetched, ("config.json", "model-1.safetensors", "tokenizer.json", "merges.txt")))
    assert not any(map(fetched, ("model.py", "tokenizer.py", "pytorch_model.bin", "tokenizer.pkl", "a.pth")))
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    refuses(lambda: load_target("org/name"), "config.json is missing")
    for source in ("nothing", "./a/b", "/a/b", "a/b/c", "../a", "a/..", "", "org/na me", "org/name\n"):
        refuses(lambda source=source: load_target(source), "does not exist")
    refuses(lambda: load_target(Path("org/absent")), "does not exist")
    refuses(lambda: load_target("x" * 500 + "/y"), "cannot be opened")
    refuses(lambda: load_target("~no-such-user-here/model"), "cannot be opened")
    refuses(lambda: load_target(folder, revision="main"), "no revision")
    assert not calls


def test_offline_hub_says_what_to_do(tmp_path, monkeypatch):
    """The real client, offline by the tests' environment: one line, and no attempt to connect."""
    import socket

    def connect(*args):
        raise AssertionError("the network was touched")

    monkeypatch.setattr(socket.socket, "connect", connect)
    refuses(lambda: load_target("reanchor-test/absent"), "reanchor-test/absent", "cannot be fetched", "pass the folder")


@pytest.mark.parametrize("error", [OSError("disk\nfull"), KeyError("x"), RuntimeError("a" * 900)])
def test_any_failure_of_the_hub_is_one_line(monkeypatch, error):
    import huggingface_hub

    def snapshot(*args, **kwargs):
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    refuses(lambda: hub.resolve("org/name"), "org/name", type(error).__name__, "pass the folder")


# ---------------------------------------------------------------- inspect


def test_inspect_prints_both_sides(tmp_path, tensors, capsys):
    folder = write_folder(tmp_path / "t", CONFIG, tensors)
    assert convert(["inspect", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "model.layers.2.mlp.up_proj.weight  [96, 64] F32  ->  layers.0.up_proj[2]" in out
    assert "layers.0.up_proj  [3, 96, 64]" in out
    del tensors["model.norm.weight"]
    tensors["extra"] = np.zeros(2, np.float32)
    assert convert(["inspect", str(write_folder(tmp_path / "t", CONFIG, tensors))]) == 1
    out = capsys.readouterr().out
    assert "missing: model.norm.weight" in out and "unexpected: extra" in out and "does not fit" in out
    config = drafter_config()
    assert convert(["inspect", str(write_folder(tmp_path / "d", config, drafter_tensors(config)))]) == 0
    assert "fc.weight  [64, 128] F32  ->  fc" in capsys.readouterr().out
    capsys.readouterr()
    for arguments in (["inspect", str(tmp_path / "absent")], ["inspect"], ["look", "x"], ["inspect", "x" * 999]):
        assert convert(arguments) == 2
        captured = capsys.readouterr()
        assert captured.out == "" and captured.err.startswith("error: ") and captured.err.count("\n") == 1
