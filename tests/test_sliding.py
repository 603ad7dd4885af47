"""Drafters that mix sliding and full attention, in the three readings of a window."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reanchor_jax.cache import KVCache
from reanchor_jax.checkpoint import load_drafter, load_target, save_drafter
from reanchor_jax.checkpoint.drafter_config import read_drafter_config
from reanchor_jax.checkpoint.hf_config import read_target_config
from reanchor_jax.config import LMHeadConfig, SlidingAttention
from reanchor_jax.drafter import Drafter
from reanchor_jax.windows import window_mask
from tests.checkpoint_folders import drafter_config, drafter_tensors, refuses, target_config, write_folder
from tests.golden_heads import check_random_pair
from tests.numpy_drafter import NumpyDrafter, sees

CASE = Path(__file__).parent / "golden" / "dflash_mixed_sliding"
TOLERANCE = 2e-4
READINGS = get_args(SlidingAttention)
RECORDED = {"causal": "causal_window", "ignored": "window_ignored", "symmetric": "symmetric_window"}
SLIDING = {"layer_types": ["full_attention", "sliding_attention"], "use_sliding_window": True, "sliding_window": 5}
TAPS = {"mask_token_id": 150, "target_layer_ids": [0, 2]}
LONGEST, SUFFIX = 40, 5


@jax.jit
def features(drafter: Drafter, x: jax.Array, context: jax.Array, start: jax.Array, cut: jax.Array) -> jax.Array:
    """Features [T, D] of a block x at `start`, behind features of positions 0 .. start - 1.

    Positions 0 .. cut - 1 are in the cache, the others in the suffix; garbage is in all other slots.
    """
    kv = drafter.context(context, jnp.arange(LONGEST))

    def slots(first: jax.Array | int, num: int, end: jax.Array) -> KVCache:
        at = first + jnp.arange(num)
        garbage = (at >= end)[None, None, :, None]
        return jax.tree.map(lambda a: jnp.where(garbage, 50.0, a[:, :, jnp.minimum(at, LONGEST - 1)]), kv)

    positions = start + jnp.arange(x.shape[0])
    return drafter(x, positions, slots(0, LONGEST + 3, cut), cut, slots(cut, SUFFIX, start), start - cut)


def run(drafter: Drafter, x: np.ndarray, context: np.ndarray, num_suffix: int = 0) -> np.ndarray:
    start = len(context)
    padded = np.pad(context, ((0, LONGEST - start), (0, 0)), constant_values=9.0)
    return np.asarray(features(drafter, x, padded, jnp.int32(start), jnp.int32(start - num_suffix)))


@pytest.mark.parametrize("attention", READINGS)
def test_recorded_steps(tmp_path, attention):
    """Each reading as recorded; what published files mean where they say nothing is `causal`."""
    shutil.copytree(CASE / "drafter", tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    if attention != "causal":
        config["dflash_config"]["sliding_attention"] = attention
    (tmp_path / "config.json").write_text(json.dumps(config))
    drafter, target = load_drafter(tmp_path), load_target(CASE.parent / "target_qwen3_untied" / "model")
    assert drafter.config.sliding_layers == (True, False, True) and drafter.config.sliding_window == 8
    z = np.load(CASE / "expected.npz")
    for step in range(3):
        x = np.asarray(target.embed(jnp.asarray(z[f"s{step}_block_ids"])))
        context = z[f"s{step}_ctx"]
        for num_suffix in (0, 3):
            hidden = run(drafter, x, context, num_suffix)
            recorded = z[f"s{step}_hidden_{RECORDED[attention]}"]
            np.testing.assert_allclose(hidden, recorded, rtol=0, atol=TOLERANCE)
        if attention != "symmetric":
            logits = np.asarray(target.logits(jnp.asarray(hidden[1:])))
            np.testing.assert_allclose(logits, z[f"s{step}_logits_{RECORDED[attention]}"], rtol=0, atol=TOLERANCE)
        others = [z[f"s{step}_hidden_{RECORDED[other]}"] for other in READINGS if other != attention]
        assert all(np.abs(other - recorded).max() > 100 * TOLERANCE for other in others), "readings are told apart"


def test_recorded_mask():
    z = np.load(CASE / "expected.npz")
    for step in range(3):
        recorded = z[f"s{step}_sliding_mask"]
        keys = jnp.arange(recorded.shape[1])
        np.testing.assert_array_equal(window_mask(keys[-6:], keys, 8, "causal"), recorded)


@pytest.mark.parametrize("window", [1, 2, 7])
def test_masks_of_shifted_blocks(window):
    """Committed slots, suffix slots and the block's own, against a mask that is written out."""
    queries = np.arange(20, 26)
    for keys in (np.arange(17), np.arange(17, 20), queries):
        for attention in ("causal", "symmetric"):
            want = [[sees(int(q), int(k), window, attention) for k in keys] for q in queries]
            got = window_mask(jnp.asarray(queries), jnp.asarray(keys), window, attention)
            np.testing.assert_array_equal(got, np.array(want))


@pytest.mark.parametrize("attention", READINGS)
@pytest.mark.parametrize("window", [1, 5, 9])
def test_features_equal_plain_numpy(tmp_path, attention, window):
    """Random weights, every split of the context into cache and suffix."""
    config = drafter_config(
        **SLIDING | {"sliding_window": window, "dflash_config": TAPS | {"sliding_attention": attention}}
    )
    folder = write_folder(tmp_path, config, drafter_tensors(config))
    drafter, oracle = load_drafter(folder), NumpyDrafter(folder)
    rng = np.random.default_rng(window)
    x, context = rng.normal(size=(6, 64)).astype(np.float32), rng.normal(size=(17, 128)).astype(np.float32)
    want = oracle.features(x, 17, context, attention)
    for num_suffix in (0, 1, SUFFIX):
        np.testing.assert_allclose(run(drafter, x, context, num_suffix), want, rtol=1e-4, atol=1e-4)


def test_without_windows_the_program_is_the_same(tmp_path):
    """Full layers cost no masks, and an ignored window is none."""

    def program(name: str, **changes) -> str:
        config = drafter_config(**changes)
        drafter = load_drafter(write_folder(tmp_path / name, config, drafter_tensors(config)))
        shapes = (jnp.zeros((6, 64)), jnp.zeros((LONGEST, 128)), jnp.int32(9), jnp.int32(7))
        return features.lower(drafter, *shapes).as_text()

    full = program("full")
    assert program("all", layer_types=["full_attention"] * 2, sliding_window=7, use_sliding_window=True) == full
    assert program("ignored", **SLIDING, dflash_config=TAPS | {"sliding_attention": "ignored"}) == full
    assert program("causal", **SLIDING) != full


def test_pairs_equal_plain_decoding():
    check_random_pair(6, LMHeadConfig(), sliding_layers=(True, False), sliding_window=4)


@pytest.mark.parametrize(
    ("changes", "want"),
    [
        ({}, "causal"),
        ({"causal": False}, "symmetric"),
        ({"sliding_attention": "causal"}, "causal"),
        ({"sliding_attention": "ignored"}, "ignored"),
        ({"sliding_attention": "symmetric", "causal": False}, "symmetric"),
    ],
)
def test_readings_are_read_and_written_back(tmp_path, changes, want):
    config = drafter_config(**SLIDING, dflash_config=TAPS | changes)
    drafter = load_drafter(write_folder(tmp_path / "a", config, drafter_tensors(config)))
    assert drafter.config.sliding_attention == want
    save_drafter(drafter, tmp_path / "b")
    assert read_drafter_config(tmp_path / "b") == drafter.config
    saved = json.loads((tmp_path / "b" / "config.json").read_text())
    assert {name: saved[name] for name in SLIDING} == SLIDING


def test_bad_windows_are_refused(tmp_path):
    def read(nested=TAPS, **changes):
        config = drafter_config(**SLIDING | changes, dflash_config=nested)
        return lambda: read_drafter_config(write_folder(tmp_path, config, {}))

    read()()
    refuses(read(sliding_window=...), "sliding_window is missing")
    refuses(read(sliding_window=0), "sliding_window is 0")
    refuses(read(use_sliding_window=False), "use_sliding_window", "true")
    refuses(read(layer_types=["sliding_attention"]), "layer_types", "each of the 2 layers")
    refuses(read(layer_types=["sliding_attention", "chunked_attention"]), "layer_types", "each of the 2 layers")
    refuses(read(layer_types=["sliding_attention", {}]), "layer_types")
    refuses(read(TAPS | {"sliding_attention": "none"}), "sliding_attention", "causal, ignored, symmetric")
    refuses(read(TAPS | {"sliding_attention": "causal", "causal": False}), "sliding_attention", "against causal")
    refuses(read(TAPS | {"causal": True}), "causal", "full attention is not supported")
    refuses(read(TAPS | {"causal": True}, layer_types=["full_attention"] * 2), "causal")
    refuses(read(TAPS | {"sliding_attention": "causal"}, layer_types=["full_attention"] * 2), "unknown field")
    read(TAPS | {"causal": True}, layer_types=["sliding_attention"] * 2)()
    read(TAPS | {"causal": False}, layer_types=["full_attention"] * 2)()
    qwen3 = target_config("qwen3", **SLIDING, num_hidden_layers=2)
    refuses(lambda: read_target_config(write_folder(tmp_path, qwen3, {})), "sliding-window attention is not supported")
