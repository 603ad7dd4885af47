"""The target's forward over training texts, on disk."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
import safetensors.numpy

from reanchor_jax.errors import ReanchorError
from reanchor_jax.pair import Pair
from reanchor_jax.target import forward_text
from reanchor_jax.training.data import Text, make_batch
from reanchor_jax.training.features import FeatureSource
from tests.tiny import make_pair

pytestmark = pytest.mark.usefixtures("quick_compiles")
TEXTS = [Text(tuple(range(1, 6)), (7, 2, 9)), Text((4, 4), (1, 2, 3, 4, 5))]
TAPS = (0, 1)


@pytest.fixture(scope="module")
def pair() -> Pair:
    return make_pair(5, tied=False)


def source(pair: Pair, folder: Path, num_top: int = 3, dtype: str = "float32") -> FeatureSource:
    return FeatureSource(pair.target, TAPS, folder, dtype=dtype, num_top=num_top)


def test_what_is_read_is_what_the_target_says(pair: Pair, tmp_path: Path):
    batch = make_batch(TEXTS, 3)
    features = source(pair, tmp_path)
    assert "15 tokens" in features.check_room([batch])
    features.measure_scale([batch])
    got = features(batch)
    for row, text in enumerate(TEXTS):
        tokens = np.array(text.prompt_ids + text.answer_ids)
        output = jax.jit(forward_text, static_argnums=2)(pair.target, tokens, TAPS)
        probs = jax.nn.softmax(pair.target.logits(output.hidden), axis=-1)
        size = len(tokens)
        np.testing.assert_allclose(got.features[row, :size], output.features / features.scale[None], atol=1e-5)
        order = np.argsort(-np.asarray(probs), axis=1)[:, :3]
        np.testing.assert_array_equal(got.top.ids[row, :size], order)
        np.testing.assert_allclose(got.top.probs[row, :size], np.take_along_axis(probs, order, 1), rtol=1e-3)
        assert not np.any(got.features[row, size:]) and not np.any(got.top.probs[row, size:])
    assert not np.any(got.features[2])


def test_files_are_shared_whatever_the_batches(pair: Pair, tmp_path: Path):
    first = source(pair, tmp_path)(make_batch(TEXTS, 2))
    assert len(list(tmp_path.glob("*.safetensors"))) == 2
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.safetensors")}
    again = source(pair, tmp_path)
    assert "0.00 GB" in again.check_room([make_batch(TEXTS, 2)])
    alone = again(make_batch(TEXTS[1:], 1))
    np.testing.assert_array_equal(alone.features[0], first.features[1])
    assert {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.safetensors")} == before


@pytest.mark.parametrize("damage", ["truncated", "empty", "foreign", "shorter", "another width", "a folder"])
def test_a_damaged_file_is_named(pair: Pair, tmp_path: Path, damage: str):
    features, batch = source(pair, tmp_path), make_batch(TEXTS, 2)
    features(batch)
    path = min(tmp_path.glob("*.safetensors"))
    whole = path.read_bytes()
    arrays = safetensors.numpy.load(whole)
    if damage == "a folder":
        path.unlink()
        path.mkdir()
    else:
        shorter = {name: x[:-1] for name, x in arrays.items()}
        narrow = {**arrays, "features": arrays["features"][:, :1].copy()}
        data = {"truncated": whole[:-1], "empty": b"", "foreign": b"no tensors" * 9}
        data |= {"shorter": safetensors.numpy.save(shorter), "another width": safetensors.numpy.save(narrow)}
        path.write_bytes(data[damage])
    with pytest.raises(ReanchorError, match=f"{path.name} is damaged: .*; remove it"):
        features(batch)


def test_a_disk_that_fills_up_leaves_no_half_file(pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    features = source(pair, tmp_path)

    def fill(path: Path, data: bytes) -> None:
        path.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", fill)
    with pytest.raises(ReanchorError, match="safetensors cannot be written: No space left on device; make room"):
        features(make_batch(TEXTS, 2))
    assert [path.name for path in tmp_path.iterdir()] == ["features.json"]


def test_bfloat16_takes_half(pair: Pair, tmp_path: Path):
    whole, half = source(pair, tmp_path / "whole"), source(pair, tmp_path / "half", dtype="bfloat16")
    assert whole.token_bytes - half.token_bytes == 2 * whole.scale.shape[0]
    a, b = whole(make_batch(TEXTS, 2)).features, half(make_batch(TEXTS, 2)).features
    np.testing.assert_allclose(a, b, rtol=2**-8)


def test_another_target_or_setting_is_refused(pair: Pair, tmp_path: Path):
    source(pair, tmp_path)(make_batch(TEXTS, 2))
    with pytest.raises(ReanchorError, match="num_top 3, got 4"):
        source(pair, tmp_path, num_top=4)
    other = make_pair(5, tied=False, seed=7)
    with pytest.raises(ReanchorError, match=r"holds features with target .* another folder with --features"):
        source(other, tmp_path)


def test_a_full_disk_is_seen_before_the_first_step(pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    features = source(pair, tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 9, 1))
    with pytest.raises(ReanchorError, match=r"0\.00 GB are free"):
        features.check_room([make_batch(TEXTS, 2)])
    assert not list(tmp_path.iterdir())  # nothing that would refuse what the error advises
    source(pair, tmp_path, dtype="bfloat16")
