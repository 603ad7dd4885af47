"""What the target says about each text, kept on disk: features for the drafter, top tokens for the loss.

The target is frozen and its forward over a text costs more than the drafter's step on it, so it
is done once. Each text has a file of its own, named by a hash of its tokens and written when a
step first needs it: a stopped run goes on with what is there, and another run with other batches
can share the folder. The files hold real tokens alone, no padding.

Residual streams have a few massive dimensions (SmolLM2: norms of 25,000 beside 400). Adam moves
every weight by about the learning rate, so on raw features the weights behind such a dimension
would jump and the others hardly move. Training therefore sees `features / scale` with
`fc * scale`, which is the same function, and a drafter is exported with `fc / scale`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.flax
import safetensors.numpy
from flax import nnx
from jax.sharding import PartitionSpec

from reanchor_jax.drafter import Drafter
from reanchor_jax.errors import ReanchorError
from reanchor_jax.files import written_whole
from reanchor_jax.target import Target, forward_text
from reanchor_jax.training.blocks import Batch
from reanchor_jax.training.checkpoints import check_settings
from reanchor_jax.training.mesh import DATA, num_data_parts, split_texts

SCALE_BATCHES = 4
"""Batches that the scale is measured on."""


class TopTokens(NamedTuple):
    """The target's most probable tokens behind each position of some texts."""

    ids: Any  # [R, T, k] int32
    probs: Any  # [R, T, k] f32; they sum to less than 1


class TextFeatures(NamedTuple):
    """The target's forward over a batch of texts; zeros where there is no token."""

    features: Any  # [R, T, C*D] f32, divided by the scale
    top: TopTokens


@partial(jax.jit, static_argnames=("tap_ids", "num_top", "dtype"))
def texts_forward(
    target: Target, tokens: jax.Array, *, tap_ids: tuple[int, ...], num_top: int, dtype: str
) -> tuple[jax.Array, TopTokens]:
    """Raw features [R, T, C*D] of texts [R, T] as `dtype`, and the k = `num_top` tokens of highest logits."""

    def one_text(target: Target, row: jax.Array) -> tuple[jax.Array, TopTokens]:
        output = forward_text(target, row, tap_ids)
        features = output.features.astype(dtype)
        if not num_top:
            none = jnp.zeros((row.shape[0], 0))
            return features, TopTokens(none.astype(jnp.int32), none)
        logits = target.logits(output.hidden)
        top, ids = jax.lax.top_k(logits, num_top)
        probs = jnp.exp(top - jax.nn.logsumexp(logits, axis=-1, keepdims=True))
        return features, TopTokens(ids.astype(jnp.int32), probs)

    # One after another: logits of a whole vocabulary exist for one text at a time, on each device.
    in_turn = lambda target, tokens: jax.lax.map(partial(one_text, target), tokens)
    if num_data_parts() > 1:
        # Each device its own texts. (XLA would gather the logits of all of them to find the top ones.)
        own = PartitionSpec(DATA)
        in_turn = jax.shard_map(
            in_turn, in_specs=(PartitionSpec(), own), out_specs=own, axis_names={DATA}, check_vma=False
        )
    return in_turn(target, tokens)


def token_bytes(width: int, dtype: str, num_top: int) -> int:
    """What a token takes on disk: C*D = `width` features, and k = `num_top` int32 ids with float16 probabilities."""
    return width * np.dtype(dtype).itemsize + num_top * (4 + 2)


class FeatureSource:
    """The target's forward over the texts of one run, from disk where it is there already.

    Read or computed again, the numbers of a text in a batch are the same bits.
    """

    def __init__(self, target: Target, tap_ids: tuple[int, ...], folder: Path, *, dtype: str, num_top: int = 0):
        """Opens or makes `folder`.

        Args:
          target: frozen.
          tap_ids: layers whose outputs are the features.
          folder: of the files.
          dtype: of features on disk, "float32" or "bfloat16".
          num_top: k tokens kept per position; 0: none.

        Raises:
          ReanchorError: the folder is of another target or other settings.
        """
        self.folder, self.scale = folder, jnp.ones(len(tap_ids) * target.config.layer.hidden_size, jnp.float32)
        self._target, self._settings = target, {"tap_ids": tap_ids, "num_top": num_top, "dtype": dtype}
        folder.mkdir(parents=True, exist_ok=True)
        settings = {**self._settings, "target": fingerprint(target)}
        self._check = partial(check_settings, folder / "features.json", settings, of="features", another="--features")
        self._check(write=False)
        self.token_bytes = token_bytes(self.scale.shape[0], dtype, num_top)

    def check_room(self, batches: Sequence[Batch]) -> str:
        """How much the batches' files take, in words.

        Raises:
          ReanchorError: the disk has less room than those that are missing take.
        """
        texts = [text for batch in batches for text in _texts(batch)]
        missing = sum(len(text) for text in texts if not self._path(text).exists()) * self.token_bytes
        free = shutil.disk_usage(self.folder).free
        needed = f"{missing / 1e9:.2f} GB ({self.token_bytes:,} bytes a token) in {self.folder}"
        if missing > 0.95 * free:
            raise ReanchorError(
                f"the target's features take {needed}, where {free / 1e9:.2f} GB are free; "
                "expected enough room: use --feature-dtype bfloat16, fewer texts, or --features DIR on another disk"
            )
        return f"features of {len(texts)} texts, {sum(map(len, texts)):,} tokens: {needed} to be written"

    def measure_scale(self, batches: Sequence[Batch]) -> None:
        """Sets the scale to each dimension's root mean square over some batches."""
        total, count = np.zeros(self.scale.shape[0]), 0
        for batch in batches[:: -(-len(batches) // SCALE_BATCHES)]:
            rows = np.asarray(self._padded(batch).features, np.float64)
            total += np.sum(rows**2, axis=(0, 1))
            count += int(batch.lengths.sum())
        self.scale = jnp.asarray(np.sqrt(total / max(count, 1)) + 1e-6, jnp.float32)

    def __call__(self, batch: Batch) -> TextFeatures:
        """Scaled features and top tokens of a batch."""
        padded = split_texts(self._padded(batch))
        return padded._replace(features=_scaled(padded.features, self.scale))

    def _padded(self, batch: Batch) -> TextFeatures:
        """Unscaled, in the dtype of the disk."""
        texts = _texts(batch)
        if not all(self._path(text).exists() for text in texts):
            self._write(batch)
        files = [self._read(text) for text in texts]
        size, empty = batch.tokens.shape[1], batch.tokens.shape[0] - len(texts)

        def pad(name: str) -> np.ndarray:
            rows = [np.pad(file[name], ((0, size - len(file[name])), (0, 0))) for file in files]
            return np.stack([*rows, *[np.zeros_like(rows[0])] * empty])

        return TextFeatures(pad("features"), TopTokens(pad("top_ids"), pad("top_probs").astype(np.float32)))

    def _read(self, text: np.ndarray) -> dict[str, np.ndarray]:
        """What `_write` has written for a text; ReanchorError where it is anything else."""
        path, num_top = self._path(text), self._settings["num_top"]
        expected = {
            "features": ((len(text), len(self.scale)), self._settings["dtype"]),
            "top_ids": ((len(text), num_top), "int32"),
            "top_probs": ((len(text), num_top), "float16"),
        }
        try:
            arrays = {name: np.asarray(x) for name, x in safetensors.flax.load_file(path).items()}
            found = {name: (x.shape, str(x.dtype)) for name, x in arrays.items()}
            reason = "" if found == expected else f"it holds {found}, expected {expected}"
        except (OSError, safetensors.SafetensorError) as error:
            arrays, reason = {}, str(error)
        if reason:
            raise ReanchorError(f"{path} is damaged: {reason}; remove it, a run writes it again")
        return arrays

    def _write(self, batch: Batch) -> None:
        """Computes the whole batch, whatever part of it is there, so that its programs stay few."""
        self._check()  # with the first file, not before: a run whose features find no room leaves nothing
        features, top = jax.device_get(texts_forward(self._target, split_texts(batch.tokens), **self._settings))
        for row, text in enumerate(_texts(batch)):
            path, real = self._path(text), slice(0, len(text))
            if path.exists():
                continue  # as it was first written: the same bits for all runs
            probs = top.probs[row, real].astype(np.float16)
            arrays = {"features": features[row, real], "top_ids": top.ids[row, real], "top_probs": probs}
            with written_whole(path) as aside:
                aside.write_bytes(safetensors.numpy.save({n: np.ascontiguousarray(x) for n, x in arrays.items()}))

    def _path(self, text: np.ndarray) -> Path:
        return self.folder / f"{hashlib.sha256(text.tobytes()).hexdigest()[:24]}.safetensors"


@jax.jit
def _scaled(features: jax.Array, scale: jax.Array) -> jax.Array:
    return features.astype(jnp.float32) / scale[None, None]


def _texts(batch: Batch) -> list[np.ndarray]:
    """The real tokens of every text; empty rows, which stand last, have none."""
    return [row[:length] for row, length in zip(batch.tokens, batch.lengths, strict=True) if length]


def fingerprint(target: Target) -> str:
    """Hash of the config and of at most 1,024 numbers of every parameter, spread over it."""
    sha = hashlib.sha256(repr(dataclasses.asdict(target.config)).encode())
    for leaf in jax.tree.leaves(target):
        sha.update(np.asarray(leaf.reshape(-1)[:: max(1, leaf.size // 1024)]).tobytes())
    return sha.hexdigest()[:16]


def fold_scale(drafter: Drafter, scale: jax.Array) -> Drafter:
    """The same drafter with `fc * scale`: as training sees it (or back, with `1 / scale`)."""
    folded = jax.tree.map(lambda x: jnp.array(x, copy=True), drafter)
    folded.fc = nnx.Param(drafter.fc[...] * scale[None, :])
    return folded
