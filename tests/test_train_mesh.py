"""Training on meshes of 8 host devices equals training on one; what should be split is split."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tests.tiny as tiny
from reanchor_jax.checkpoint import load_drafter, save_target
from reanchor_jax.pair import Pair
from reanchor_jax.placement import SPLIT_AXIS
from reanchor_jax.training import loss as loss_module
from reanchor_jax.training.checkpoints import Checkpoints
from reanchor_jax.training.data import Text, make_batches
from reanchor_jax.training.features import TextFeatures, texts_forward
from reanchor_jax.training.loss import make_vocab
from reanchor_jax.training.main import main
from reanchor_jax.training.mesh import MeshShape, make_mesh, num_data_parts, place_network, split_texts
from reanchor_jax.training.optimizer import OptimizerConfig
from reanchor_jax.training.step import TrainState, init_optimizer, train_step

BLOCK, ROWS, STEPS = 4, 8, 3
OPTIMIZER = OptimizerConfig(steps=STEPS, learning_rate=3e-3, warmup=0)
pytestmark = pytest.mark.usefixtures("quick_compiles")


@pytest.fixture(scope="module", autouse=True)
def several_chunks():
    """Drafts in four chunks on one device and in one to four on a mesh, the last ones padded."""
    with mock.patch.object(loss_module, "CHUNK_ROWS", 25):
        yield


@functools.cache
def pair() -> Pair:
    """8 heads over 4 key/value heads, so that heads can be split 8 ways."""
    wide = lambda **sizes: dataclasses.replace(layer_config(**sizes), num_heads=8, num_kv_heads=4)
    layer_config = tiny.layer_config
    with mock.patch.object(tiny, "layer_config", wide):
        return tiny.make_pair(BLOCK, tied=False)


def texts(count: int) -> list[Text]:
    rng = np.random.default_rng(5)
    rows = [(rng.integers(0, 15, 5).tolist(), rng.integers(0, 15, 20 + 3 * i).tolist()) for i in range(count)]
    return [Text(tuple(prompt), tuple(answer)) for prompt, answer in rows]


def steps(num_steps: int = STEPS) -> tuple[TrainState, list[float]]:
    """The state after some steps on the mesh in context, and the losses."""
    target, drafter = place_network(pair().target), place_network(jax.tree.map(jnp.copy, pair().drafter))
    state = TrainState(drafter, init_optimizer(drafter, optimizer=OPTIMIZER))
    batch = split_texts(make_batches(texts(ROWS), ROWS, 0)[0])
    taps = drafter.config.target_layer_ids
    text = TextFeatures(*texts_forward(target, batch.tokens, tap_ids=taps, num_top=3, dtype="float32"))
    sizes: Any = {"num_anchors": 4, "gamma": 4.0, "distill": 0.5, "optimizer": OPTIMIZER}
    losses = []
    for number in range(num_steps):
        key = jax.random.key(number)
        state, loss = train_step(state, target, make_vocab(16, None), batch, text, key, **sizes)
        losses.append(float(loss))
    return state, losses


@functools.cache
def one_device() -> tuple[TrainState, list[float]]:
    state, losses = steps()
    return jax.device_get(state), losses


def assert_split(state: TrainState, num_model: int) -> None:
    """Each device holds its part of every parameter and moment that the table of decoding splits, and no more."""
    seen = 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        parts = jax.tree_util.keystr(path, simple=True, separator=".").split(".")
        name = next((part for part in parts if part in SPLIT_AXIS), None)
        shape = list(leaf.shape)
        if name is not None and not (name in ("k_proj", "v_proj") and num_model > 4):
            shape[SPLIT_AXIS[name]] //= num_model
            seen += 1
        assert all(shard.data.shape == tuple(shape) for shard in leaf.addressable_shards), (path, shape)
    assert seen == 3 * (7 if num_model <= 4 else 5)  # of parameters, first and second moments


def assert_near(got: TrainState, want: TrainState) -> None:
    """Within 2e-5 of weights around 0.2, that three steps have moved by up to 9e-3."""
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(jax.device_get(a), b, rtol=2e-5, atol=2e-5, err_msg=jax.tree_util.keystr(path))


@pytest.mark.parametrize("shape", [MeshShape(8, 1), MeshShape(2, 4), MeshShape(1, 8)], ids=str)
def test_mesh_equals_one_device(shape: MeshShape, tmp_path: Path):
    """Losses within 2e-6, relatively; a checkpoint of the mesh is one of a single device, and the reverse."""
    want, wanted = one_device()
    with jax.set_mesh(make_mesh(shape)):
        assert num_data_parts() == shape.data
        state, losses = steps()
    np.testing.assert_allclose(losses, wanted, rtol=2e-6)
    assert losses[-1] < losses[0] - 0.01
    assert_near(state, want)
    assert_split(state, shape.model)

    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, state)
    alone = checkpoints.restore(1, jax.device_put(want, jax.devices()[0]))
    checkpoints.save(2, alone)
    back = checkpoints.restore(2, state)
    checkpoints.close()
    assert {leaf.sharding.num_devices for leaf in jax.tree.leaves(alone)} == {1}
    assert_split(back, shape.model)
    for a, b, c in zip(*(jax.tree.leaves(jax.device_get(x)) for x in (state, alone, back)), strict=True):
        np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(a, c)


def test_chunks_have_some_of_every_device():
    """The example of `in_chunks`, small: 10 drafts on two devices, chunks of at most 3 of each."""
    with mock.patch.object(loss_module, "CHUNK_ROWS", 3), jax.set_mesh(make_mesh(MeshShape(2, 1))):
        (chunks,), count = loss_module.in_chunks(jnp.arange(10))
        assert chunks.tolist() == [[0, 1, 2, 6, 7, 8], [3, 4, 5, 9, 0, 0]]
        assert loss_module.from_chunks(chunks, count).tolist() == list(range(10))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    save_target(pair().target, folder / "target", dtype=jnp.dtype(jnp.float32))
    prompts = [json.dumps({"prompt_ids": [1, 2, i]}) + "\n" for i in range(6)]
    (folder / "prompts.jsonl").write_text("".join(prompts))
    return folder


def flags(folder: Path, more: str) -> list[str]:
    line = f"--target {folder / 'target'} --prompts {folder / 'prompts.jsonl'} --mask-token-id 15 --rows 2 --anchors 4"
    line += " --steps 4 --held-out 2 --max-new-tokens 12 --block-size 4 --layers 1 --tau-prompts 0 --answer-rows 2"
    return [*line.split(), *more.split()]


def test_command_line(folder: Path, tmp_path: Path, capsys):
    """A run that starts on a mesh and ends on one device."""
    out = tmp_path / "out"
    assert main(flags(folder, f"--out {out} --mesh 2x4 --checkpoint-every 2")) == 0
    on_mesh = load_drafter(out / "drafter")
    (out / "checkpoints" / "4").rename(tmp_path / "4")  # back to step 2, as if the run had been killed there
    assert main(flags(folder, f"--out {out} --checkpoint-every 2")) == 0
    assert "at step 2" in capsys.readouterr().err
    for a, b in zip(jax.tree.leaves(on_mesh), jax.tree.leaves(load_drafter(out / "drafter")), strict=True):
        np.testing.assert_allclose(a, b, rtol=2**-7, atol=1e-4)  # saved in bfloat16: a rounding may go the other way


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("--mesh 2", "--mesh: got '2', expected DATAxMODEL, such as 4x2"),
        ("--mesh 0x2", "at least one device"),
        ("--mesh 2x8", "--mesh is 2x8, 16 devices; expected at most the 8 there are"),
        ("--mesh 4x1", "--rows is 2; expected a multiple of 4"),
        ("--mesh 2x1 --answer-rows 3", "--answer-rows is 3; expected a multiple of 2"),
        ("--mesh 1x3", "vocab_size is 16; expected a multiple of the 3 devices"),
        ("--mesh 2x1 --recipe draft-opd --init x", "--mesh does not go with --recipe draft-opd"),
        ("--mesh 2x1 --recipe tiny-pair", "does not go with --recipe tiny-pair"),
    ],
)
def test_what_does_not_fit_is_one_line(folder: Path, more: str, message: str, tmp_path: Path, capsys):
    assert main(flags(folder, f"--out {tmp_path / 'out'} {more}")) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()
