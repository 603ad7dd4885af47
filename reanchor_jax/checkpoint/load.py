"""Loading of targets and drafters."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike

from reanchor_jax.checkpoint import kinds, vocab_map
from reanchor_jax.checkpoint.converted_source import ConvertedSource
from reanchor_jax.checkpoint.drafter_config import read_drafter_config
from reanchor_jax.checkpoint.fill import Fit, TensorSource, compare, fill, named_parameters
from reanchor_jax.checkpoint.gguf_source import GGUFSource, is_gguf
from reanchor_jax.checkpoint.hf_config import read_target_config
from reanchor_jax.checkpoint.hub import MASK_EMBEDDING_FILE, resolve
from reanchor_jax.checkpoint.manifest import is_converted
from reanchor_jax.checkpoint.rules import (
    HEAD_NAME,
    MASK_EMBEDDING_NAME,
    OLD_HEAD_PREFIX,
    OWN_EMBEDDING_NAME,
    OWN_HEAD_NAME,
    Slot,
    drafter_slots,
    gguf_slots,
    target_slots,
)
from reanchor_jax.checkpoint.safetensors_source import SafetensorsSource
from reanchor_jax.config import DrafterConfig, LMHeadConfig
from reanchor_jax.drafter import Drafter
from reanchor_jax.errors import ReanchorError
from reanchor_jax.placement import place
from reanchor_jax.target import Target

_DTYPES = ("float32", "bfloat16", "float16")
_ROWS = 4096  # compared at a time
M = TypeVar("M", Target, Drafter)


class Plan(NamedTuple, Generic[M]):
    """An opened checkpoint compared with its model: all that is known before any tensor is read."""

    source: TensorSource
    slots: dict[str, Slot]
    abstract: M
    """The module with shapes and dtypes in place of weights."""
    fit: Fit

    def check(self) -> None:
        """Raises ReanchorError where file and model do not match."""
        self.fit.check(self.source.name)

    def run(self, mesh: Mesh | None = None, axis: str = "model") -> M:
        """Reads the tensors into a new module; errors as in `load_target`."""
        self.check()
        abstract = self.abstract if mesh is None else place(self.abstract, mesh, axis)
        self.check_contents()
        return fill(abstract, self.source, self.slots, abstract.config.layer)

    def check_contents(self) -> None:
        """Raises ReanchorError where tensors contradict each other."""
        if HEAD_NAME in self.source.tensors and HEAD_NAME not in self.slots:
            _check_tied(self.source, next(name for name, slot in self.slots.items() if slot.path == "embedding"))
        for name, slot in self.slots.items():
            if slot.transform == "offsets_to_ids":
                marks = self.source.read(vocab_map.MARKS) if vocab_map.MARKS in self.source.tensors else None
                vocab_map.check(self.source.name, self.source.read(name), marks, self.abstract.config.vocab_size)


def load_target(
    source: str | Path,
    *,
    dtype: DTypeLike = jnp.float32,
    revision: str | None = None,
    mesh: Mesh | None = None,
    axis: str = "model",
) -> Target:
    """Loads a target.

    Args:
      source: a Hugging Face folder (`llama`, `qwen3` or Gemma 4, safetensors), a GGUF file (`llama`), a
        folder that `python -m convert` wrote, or a hub id `org/name`.
      dtype: dtype of parameters and activations; the file's dtypes are cast to it.
      revision: branch, tag or commit, for hub ids.
      mesh: lays the weights over its axis `axis`, as `shard_pair` does; each device's part is read
        from the file by itself. None: all on the default device.
      axis: name of the mesh axis.

    Raises:
      ReanchorError: the checkpoint is missing, damaged, unsupported, or does not match its config;
        the mesh does not divide the model.
    """
    return plan_target(resolve(source, revision), float_dtype(dtype)).run(mesh, axis)


def load_drafter(
    source: str | Path,
    *,
    dtype: DTypeLike = jnp.float32,
    revision: str | None = None,
    mesh: Mesh | None = None,
    axis: str = "model",
) -> Drafter:
    """Loads a DFlash, Domino or DSpark drafter; arguments and errors are those of `load_target`.

    A folder is in the format of its kind's authors (DFlash: z-lab), holds a DFlash drafter of the
    speculators library, or is a converted one.
    """
    return plan_drafter(resolve(source, revision), float_dtype(dtype)).run(mesh, axis)


def plan_target(path: Path, dtype: jnp.dtype) -> Plan[Target]:
    """Opens the checkpoint of a target and compares it with its config."""
    copies: tuple[str, ...] = ()
    slots: dict[str, Slot] | None = None  # of a converted checkpoint: each parameter under its own name
    if is_converted(path):
        source, config = ConvertedSource(path), read_target_config(path)
    elif path.is_dir():
        config, source = read_target_config(path), SafetensorsSource(path)
        slots = target_slots(config)
        copies = (HEAD_NAME,) if config.tie_word_embeddings else ()
    elif is_gguf(path):
        source = GGUFSource(path)
        config = source.config
        slots = gguf_slots(config)
    else:
        raise ReanchorError(f"{path} is no GGUF file; expected one, or a folder with config.json and safetensors")
    abstract = jax.eval_shape(lambda: Target(config, dtype=dtype, rngs=nnx.Rngs(0)))
    slots = _own_names(abstract) if slots is None else slots
    fit = compare(source.tensors, slots, named_parameters(abstract), source.dtypes, copies)
    return Plan(source, slots, abstract, fit)


def plan_drafter(path: Path, dtype: jnp.dtype) -> Plan[Drafter]:
    """Opens the checkpoint of a drafter and compares it with its config."""
    if not path.is_dir():
        raise ReanchorError(f"{path} is a file; expected a drafter's folder with config.json and safetensors")
    if is_converted(path):
        source, config = ConvertedSource(path), read_drafter_config(path)
        config = _with_own_parts(config, path, source)
        abstract = jax.eval_shape(lambda: Drafter(config, dtype=dtype, rngs=nnx.Rngs(0)))
        slots = _own_names(abstract)
        return Plan(source, slots, abstract, compare(source.tensors, slots, named_parameters(abstract), source.dtypes))
    config, source = read_drafter_config(path), SafetensorsSource(path)
    kinds.check_tensors(source.name, source.tensors, config)
    config = _with_own_parts(config, path, source)
    old = any(name.startswith(OLD_HEAD_PREFIX) for name in source.tensors)
    slots = drafter_slots(config, OLD_HEAD_PREFIX if old else "")
    if vocab_map.VLLM_OFFSETS in source.tensors and vocab_map.OFFSETS in slots:
        slots[vocab_map.VLLM_OFFSETS] = slots.pop(vocab_map.OFFSETS)
    copies = (vocab_map.MARKS,) if any(slot.transform == "offsets_to_ids" for slot in slots.values()) else ()
    abstract = jax.eval_shape(lambda: Drafter(config, dtype=dtype, rngs=nnx.Rngs(0)))
    fit = compare(source.tensors, slots, named_parameters(abstract), source.dtypes, copies)
    return Plan(source, slots, abstract, fit)


def _own_names(abstract: Target | Drafter) -> dict[str, Slot]:
    """Slots of a converted checkpoint."""
    return {path: Slot(path, None, "copy") for path in named_parameters(abstract)}


def _with_own_parts(config: DrafterConfig, path: Path, source: TensorSource) -> DrafterConfig:
    """The config of a DFlash head with the weights that the file holds: its config does not name them."""
    if not isinstance(config.head, LMHeadConfig):
        return config
    # A converted checkpoint holds parameters, not tensors.
    own_mask = MASK_EMBEDDING_NAME in source.tensors or "head.mask_embedding" in source.tensors
    if not own_mask and (path / MASK_EMBEDDING_FILE).exists():
        raise ReanchorError(
            f"{path / MASK_EMBEDDING_FILE} holds a mask embedding, in a pickle, which is never opened; "
            f"move it into the safetensors as tensor {MASK_EMBEDDING_NAME} of {config.layer.hidden_size} numbers"
        )
    rows = config.head.draft_vocab_size
    if rows in (None, config.vocab_size):  # a full head is the file's where it is there, else the target's
        own_head = OWN_HEAD_NAME in source.tensors or "head.lm_head" in source.tensors
        rows = config.vocab_size if own_head else None
    own_embedding = OWN_EMBEDDING_NAME in source.tensors or "head.embedding" in source.tensors
    head = LMHeadConfig(own_embedding=own_embedding, draft_vocab_size=rows, mask_embedding=own_mask)
    return dataclasses.replace(config, head=head)


def float_dtype(dtype: DTypeLike) -> jnp.dtype:
    """Checks a dtype, or the name of one, that a user asks for."""
    try:
        checked = jnp.dtype(dtype)
    except TypeError:
        checked = None
    if checked is None or checked.name not in _DTYPES:
        raise ReanchorError(f"dtype is {dtype!r}; expected one of {', '.join(_DTYPES)}")
    return checked


def _check_tied(source: TensorSource, embedding: str) -> None:
    """A tied model may carry its head a second time, if it is the same as the tensor `embedding`."""
    shape = source.tensors[embedding].shape
    same = source.tensors[HEAD_NAME].shape == shape
    for start in range(0, shape[0] if same else 0, _ROWS):
        rows = (slice(start, min(start + _ROWS, shape[0])), *(slice(0, size) for size in shape[1:]))
        same = same and np.array_equal(source.read(HEAD_NAME, rows), source.read(embedding, rows))
    if not same:
        raise ReanchorError(
            f"{source.name}: {HEAD_NAME} differs from {embedding}, but tie_word_embeddings is true; "
            "expected equal tensors: set it to false if the head is its own"
        )
