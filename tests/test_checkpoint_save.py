"""Saving: loads back bit by bit, in the formats of others, and never half."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors import safe_open

from reanchor_jax.checkpoint import load_drafter, load_target, save_drafter, save_target
from reanchor_jax.checkpoint.fill import named_parameters
from reanchor_jax.config import (
    DominoConfig,
    DrafterConfig,
    DSparkConfig,
    HeadConfig,
    LayerConfig,
    Llama3Scaling,
    LMHeadConfig,
    MarkovHead,
    RopeConfig,
    TargetConfig,
)
from reanchor_jax.drafter import Drafter
from reanchor_jax.errors import ReanchorError
from reanchor_jax.target import Target
from tests.checkpoint_folders import refuses

GOLDEN = Path(__file__).parent / "golden"
LAYER = LayerConfig(
    hidden_size=32,
    intermediate_size=48,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    rms_norm_eps=1e-6,
    rope=RopeConfig(theta=1e6, scaling=None),
    qk_norm=True,
)
SCALING = Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)


def target_of(
    model_type: str, tied: bool, scaling: Llama3Scaling | None, eos: tuple[int, ...], seed: int = 0
) -> Target:
    layer = LayerConfig(**{**vars(LAYER), "qk_norm": model_type == "qwen3"})
    config = TargetConfig(
        model_type=model_type,
        vocab_size=50,
        num_layers=3,
        pattern=(dataclasses.replace(layer, rope=RopeConfig(theta=12345.678, scaling=scaling)),),
        tie_word_embeddings=tied,
        max_position_embeddings=99,
        bos_token_id=None if tied else 1,
        eos_token_ids=eos,
    )
    return Target(config, dtype=jnp.float32, rngs=nnx.Rngs(seed))


LM_HEAD = LMHeadConfig()
DOMINO = DominoConfig(emb_dim=3, gru_hidden_dim=4, shift_label=True, pure_draft_prefix_len=2)
DSPARK = [
    DSparkConfig(
        markov_rank=3 if kind else 0,
        markov_head_type=kind,
        enable_confidence_head=kind != "rnn",
        confidence_head_with_markov=kind == "gated",
    )
    for kind in (None, *get_args(MarkovHead))
]


def drafter_of(
    num_target_layers: int | None = 7, dtype: jnp.dtype = jnp.float32, seed: int = 0, head: HeadConfig = LM_HEAD
) -> Drafter:
    config = DrafterConfig(
        block_size=5,
        mask_token_id=49,
        target_layer_ids=(4, 0, 6),
        target_num_layers=num_target_layers,
        vocab_size=50,
        num_layers=2,
        layer=LAYER
        if num_target_layers is None
        else dataclasses.replace(LAYER, rope=RopeConfig(theta=1e6, scaling=SCALING)),
        head=head,
    )
    return Drafter(config, dtype=dtype, rngs=nnx.Rngs(seed))


def same(a, b, dtype: jnp.dtype = jnp.float32) -> None:
    assert a.config == b.config
    for name, leaf in named_parameters(a).items():
        other = named_parameters(b)[name]
        np.testing.assert_array_equal(np.asarray(leaf.astype(dtype)), np.asarray(other.astype(dtype)), err_msg=name)


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
@pytest.mark.parametrize(("tied", "scaling", "eos"), [(True, None, ()), (False, SCALING, (2,)), (True, None, (2, 9))])
def test_targets_load_back(tmp_path, model_type, tied, scaling, eos):
    target = target_of(model_type, tied, scaling, eos)
    save_target(target, tmp_path / "a" / "b", dtype=jnp.float32)
    assert files(tmp_path / "a" / "b") == ["config.json", "model.safetensors"]
    same(load_target(tmp_path / "a" / "b"), target)
    save_target(target, tmp_path / "half")
    half = load_target(tmp_path / "half")
    same(half, target, jnp.bfloat16)
    assert float(jnp.abs(half.embedding[...] - target.embedding[...]).max()) > 0, "saved in bfloat16 by default"


@pytest.mark.parametrize("num_target_layers", [7, None])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_drafters_load_back(tmp_path, num_target_layers, dtype):
    drafter = drafter_of(num_target_layers, dtype)
    save_drafter(drafter, tmp_path, dtype=dtype)
    same(load_drafter(tmp_path, dtype=dtype), drafter)


@pytest.mark.parametrize("head", [DOMINO, *DSPARK])
def test_heads_load_back(tmp_path, head):
    drafter = drafter_of(head=head)
    save_drafter(drafter, tmp_path, dtype=jnp.float32)
    same(load_drafter(tmp_path), drafter)


@pytest.mark.parametrize(
    "name", ["target_llama3_rope", "target_llama_tied", "target_qwen3_untied", "trained_qwen3_target"]
)
def test_golden_targets_are_written_as_they_were(tmp_path, name):
    """The same tensors under the same names as the file they came from."""
    golden = GOLDEN / name / "model"
    save_target(load_target(golden), tmp_path, dtype=jnp.float32)
    same(load_target(tmp_path), load_target(golden))
    same_files(tmp_path, golden)


@pytest.mark.parametrize("name", ["dflash_qwen3_b16", "dflash_llama_b10"])
def test_golden_drafters_are_written_as_they_were(tmp_path, name):
    golden = GOLDEN / name / "drafter"
    save_drafter(load_drafter(golden), tmp_path, dtype=jnp.float32)
    same(load_drafter(tmp_path), load_drafter(golden))
    same_files(tmp_path, golden)
    ours, theirs = (json.loads((folder / "config.json").read_text()) for folder in (tmp_path, golden))
    differing = {key for key in ours if ours[key] != theirs[key]}
    assert not differing, "whatever is written says what z-lab's config says"
    left_out = {"attention_dropout", "auto_map", "bos_token_id", "eos_token_id", "initializer_range"}
    left_out |= {"max_position_embeddings", "max_window_layers", "transformers_version", "use_cache"}
    assert set(theirs) - set(ours) == left_out


def same_files(a: Path, b: Path) -> None:
    with safe_open(a / "model.safetensors", "numpy") as ours, safe_open(b / "model.safetensors", "numpy") as theirs:
        assert set(ours.keys()) == set(theirs.keys())
        for name in ours.keys():  # noqa: SIM118  a safetensors file is no mapping
            np.testing.assert_array_equal(ours.get_tensor(name), theirs.get_tensor(name))
        assert ours.metadata() == {"format": "pt"}, "transformers demands it"


def test_written_dtype(tmp_path):
    save_drafter(drafter_of(), tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    with safe_open(tmp_path / "model.safetensors", "numpy") as file:
        assert {file.get_slice(name).get_dtype() for name in file.keys()} == {"BF16"}  # noqa: SIM118
    refuses(lambda: save_drafter(drafter_of(), tmp_path, dtype=jnp.int8), "dtype is")


def test_a_drafter_that_the_format_cannot_hold(tmp_path):
    config = drafter_of().config
    plain = DrafterConfig(**{**vars(config), "layer": LayerConfig(**{**vars(LAYER), "qk_norm": False})})
    drafter = Drafter(plain, dtype=jnp.float32, rngs=nnx.Rngs(0))
    refuses(lambda: save_drafter(drafter, tmp_path / "x"), "qk_norm")
    assert not (tmp_path / "x").exists()


def test_sharded_parameters_are_written_whole(tmp_path):
    """A model that lies on several devices."""
    drafter = drafter_of()
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
    placed = jax.device_put(drafter, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    placed.fc = nnx.Param(jax.device_put(drafter.fc[...], split))
    save_drafter(placed, tmp_path, dtype=jnp.float32)
    same(load_drafter(tmp_path), drafter)


def test_both_files_may_be_read_by_the_same_people(tmp_path):
    save_target(target_of("llama", True, None, ()), tmp_path)
    (tmp_path / "other").touch()
    modes = {path.name: path.stat().st_mode for path in tmp_path.iterdir()}
    assert modes["model.safetensors"] == modes["config.json"] == modes["other"]


def test_other_files_of_the_folder_stay(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    save_target(target_of("qwen3", True, None, ()), tmp_path)
    save_target(target_of("qwen3", True, None, (), seed=1), tmp_path)
    assert files(tmp_path) == ["config.json", "model.safetensors", "tokenizer.json"]


class Killed(BaseException):
    """Stands for the end of the process: nothing catches it."""


@pytest.mark.parametrize("earlier", [True, False])
def test_stopped_at_any_step_never_loads_half(tmp_path, monkeypatch, earlier):
    """Cuts before each change of the folder: the old model, the new one, or an error, never a mix.

    The two models differ in their config (mask id), so that a mix would load without an error."""
    new = drafter_of(seed=1)
    old_config = DrafterConfig(**{**vars(new.config), "mask_token_id": 3})
    old = Drafter(old_config, dtype=jnp.float32, rngs=nnx.Rngs(2))
    outcomes = []
    for step in range(20):
        folder = tmp_path / str(step)
        if earlier:
            save_drafter(old, folder, dtype=jnp.float32)
        stopped = False
        with monkeypatch.context() as patched:
            left = [step]

            def cut(function, left=left):
                def wrapper(*args, **kwargs):
                    if left[0] == 0:
                        raise Killed
                    left[0] -= 1
                    return function(*args, **kwargs)

                return wrapper

            for owner, name in ((os, "replace"), (os, "fsync"), (Path, "unlink"), (Path, "write_text")):
                patched.setattr(owner, name, cut(getattr(owner, name)))
            try:
                save_drafter(new, folder, dtype=jnp.float32)
            except Killed:
                stopped = True
        try:
            found = load_drafter(folder)
        except ReanchorError:
            outcomes.append("error")
        else:
            outcomes.append("old" if found.config == old_config else "new")
            same(found, old if outcomes[-1] == "old" else new)
        # The next attempt succeeds whatever the last one left behind.
        save_drafter(new, folder, dtype=jnp.float32)
        same(load_drafter(folder), new)
        assert files(folder) == ["config.json", "model.safetensors"]
        if not stopped:
            break
    assert not stopped and outcomes[-1] == "new"
    assert outcomes == sorted(outcomes, key=["old", "error", "new"].index)
    assert (outcomes[0] == "old") == earlier and "error" in outcomes


def test_a_full_disk_leaves_the_earlier_checkpoint(tmp_path, monkeypatch):
    import reanchor_jax.checkpoint.save as save

    old = drafter_of()
    save_drafter(old, tmp_path, dtype=jnp.float32)

    def full(*args, **kwargs):
        Path(args[1]).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(save, "save_file", full)
    refuses(lambda: save_drafter(drafter_of(seed=1), tmp_path), "cannot be written", "No space left")
    assert files(tmp_path) == ["config.json", "model.safetensors"]
    same(load_drafter(tmp_path), old)


def test_places_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("x")
    refuses(lambda: save_drafter(drafter_of(), tmp_path / "file"), "cannot be written")
    refuses(lambda: save_drafter(drafter_of(), tmp_path / "file" / "below"), "cannot be written")
    (tmp_path / "taken" / ".model.safetensors.partial").mkdir(parents=True)
    refuses(lambda: save_drafter(drafter_of(), tmp_path / "taken"), "cannot be written")
    assert files(tmp_path) == ["file", "taken"]
