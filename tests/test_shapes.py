"""Drafters shaped unlike their target, with biases, and with scaled rotary embeddings."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reanchor_jax.cache import init_cache
from reanchor_jax.checkpoint import load_drafter, load_target, save_drafter, save_target
from reanchor_jax.checkpoint.fill import named_parameters
from reanchor_jax.config import LayerConfig, LinearScaling, LMHeadConfig, RopeConfig
from reanchor_jax.drafter import Drafter
from reanchor_jax.pair import check_pair
from tests.checkpoint_folders import (
    LLAMA3,
    YARN,
    drafter_config,
    drafter_tensors,
    random_tensors,
    target_config,
    target_tensors,
    write_folder,
)
from tests.golden_heads import check_random_pair
from tests.numpy_drafter import NumpyDrafter
from tests.test_rope import GIVEN, PLAIN
from tests.tiny import ROPE, layer_config, make_pair

OTHER_SHAPE = LayerConfig(
    hidden_size=32,
    intermediate_size=40,
    num_heads=3,
    num_kv_heads=1,
    head_dim=12,
    rms_norm_eps=1e-6,
    rope=ROPE,
    qk_norm=True,
    attention_bias=True,
)
"""The target of `make_pair` has 4 heads over 2 of dim 8, an MLP of 64, no biases."""


def same(a, b) -> None:
    assert a.config == b.config
    for name, leaf in named_parameters(a).items():
        np.testing.assert_array_equal(leaf, named_parameters(b)[name], err_msg=name)


def biases(config: dict, prefix: str = "") -> dict[str, np.ndarray]:
    queries, keys = (config[name] * config["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))
    sizes = {"q": queries, "k": keys, "v": keys, "o": config["hidden_size"]}
    shapes = {
        f"{prefix}layers.{layer}.self_attn.{name}_proj.bias": (size,)
        for layer in range(config["num_hidden_layers"])
        for name, size in sizes.items()
    }
    return random_tensors(shapes, seed=5)


@jax.jit
def features(drafter: Drafter, x: jax.Array, context: jax.Array) -> jax.Array:
    start = context.shape[0]
    none = init_cache(drafter.config.layer, drafter.config.num_layers, 0, jnp.float32)
    cache = drafter.context(context, jnp.arange(start))
    return drafter(x, start + jnp.arange(x.shape[0]), cache, jnp.int32(start), none, jnp.int32(0))


def test_biases_equal_plain_numpy(tmp_path):
    config = drafter_config(attention_bias=True)
    folder = write_folder(tmp_path, config, drafter_tensors(config) | biases(config))
    rng = np.random.default_rng(0)
    x, context = rng.normal(size=(6, 64)).astype(np.float32), rng.normal(size=(9, 128)).astype(np.float32)
    want = NumpyDrafter(folder).features(x, 9, context, "ignored")
    drafter = load_drafter(folder)
    np.testing.assert_allclose(features(drafter, x, context), want, rtol=1e-4, atol=1e-4)
    save_drafter(drafter, tmp_path / "again", dtype=jnp.float32)
    same(load_drafter(tmp_path / "again"), drafter)


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_targets_with_biases_load_back(tmp_path, model_type):
    config = target_config(model_type, attention_bias=True)
    folder = write_folder(tmp_path / "a", config, target_tensors(config) | biases(config, "model."))
    target = load_target(folder)
    assert target.config.layer.attention_bias
    save_target(target, tmp_path / "b", dtype=jnp.float32)
    same(load_target(tmp_path / "b"), target)


@pytest.mark.parametrize("scaling", [LLAMA3, YARN, YARN | {"beta_fast": 9.0, "mscale": 0.7, "mscale_all_dim": 0.3},
                                     YARN | {"attention_factor": 1.5, "truncate": False},
                                     {"rope_type": "linear", "factor": 2.0}])  # fmt: skip
def test_scaled_drafters_and_targets_load_back(tmp_path, scaling):
    config = drafter_config(rope_scaling=scaling)
    drafter = load_drafter(write_folder(tmp_path / "a", config, drafter_tensors(config)))
    save_drafter(drafter, tmp_path / "b", dtype=jnp.float32)
    same(load_drafter(tmp_path / "b"), drafter)
    config = target_config(rope_scaling=scaling)
    target = load_target(write_folder(tmp_path / "c", config, target_tensors(config)))
    assert target.config.layer.rope == drafter.config.layer.rope and target.config.layer.rope.scaling is not None
    save_target(target, tmp_path / "d", dtype=jnp.float32)
    same(load_target(tmp_path / "d"), target)


@pytest.mark.parametrize(
    ("block_size", "rope"),
    [
        (10, RopeConfig(theta=5e5, scaling=PLAIN)),
        (16, RopeConfig(theta=1e4, scaling=dataclasses.replace(GIVEN, original_max_position_embeddings=8))),
    ],
)
def test_other_shapes_round_trip_and_decode(tmp_path: Path, block_size: int, rope: RopeConfig):
    changes = {"layer": dataclasses.replace(OTHER_SHAPE, rope=rope), "num_layers": 1}
    pair = make_pair(block_size, drafter=changes)
    assert pair.drafter is not None and pair.drafter.config.block_size == block_size
    check_pair(pair.target, pair.drafter)
    save_drafter(pair.drafter, tmp_path, dtype=jnp.float32)
    same(load_drafter(tmp_path), pair.drafter)
    check_random_pair(block_size, LMHeadConfig(), **changes)


def test_linear_scaling_slows_every_position():
    """Twice the position at half the speed is the same place."""
    slowed = RopeConfig(theta=1e4, scaling=LinearScaling(factor=2.0))
    pair = make_pair(4, drafter={"layer": dataclasses.replace(layer_config(qk_norm=True), rope=slowed)})
    plain = make_pair(4)
    assert pair.drafter is not None and plain.drafter is not None
    x = jax.random.normal(jax.random.key(0), (5, 64))
    slow, fast = pair.drafter.context(x, 2 * jnp.arange(5)), plain.drafter.context(x, jnp.arange(5))
    np.testing.assert_allclose(slow.k, fast.k, atol=1e-5)
