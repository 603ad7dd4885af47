"""Loading of targets and drafters."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from reanchor_jax.checkpoint import kinds, vocab_map
from reanchor_jax.checkpoint.drafter_config import read_drafter_config
from reanchor_jax.checkpoint.fill import Fit, TensorSource, compare, fill, named_parameters
from reanchor_jax.checkpoint.gguf_source import GGUFSource, is_gguf
from reanchor_jax.checkpoint.hf_config import read_target_config
from reanchor_jax.checkpoint.hub import MASK_EMBEDDING_FILE, resolve
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
from reanchor_jax.target import Target

_DTYPES = ("float32", "bfloat16", "float16")
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

    def run(self) -> M:
        """Reads the tensors into a new module; errors as in `load_target`."""
        self.check()
        if HEAD_NAME in self.source.tensors and HEAD_NAME not in self.slots:
            _check_tied(self.source, next(name for name, slot in self.slots.items() if slot.path == "embedding"))
        for name, slot in self.slots.items():
            if slot.transform == "offsets_to_ids":
                marks = self.source.read(vocab_map.MARKS) if vocab_map.MARKS in self.source.tensors else None
                vocab_map.check(self.source.name, self.source.read(name), marks, self.abstract.config.vocab_size)
        return fill(self.abstract, self.source, self.slots, self.abstract.config.layer)


def load_target(source: str | Path, *, dtype: DTypeLike = jnp.float32, revision: str | None = None) -> Target:
    """Loads a target.

    Args:
      source: a Hugging Face folder (`llama`, `qwen3` or Gemma 4, safetensors), a GGUF file (`llama`), or a
        hub id `org/name`.
      dtype: dtype of parameters and activations; the file's dtypes are cast to it.
      revision: branch, tag or commit, for hub ids.

    Raises:
      ReanchorError: the checkpoint is missing, damaged, unsupported, or does not match its config.
    """
    return plan_target(resolve(source, revision), float_dtype(dtype)).run()


def load_drafter(source: str | Path, *, dtype: DTypeLike = jnp.float32, revision: str | None = None) -> Drafter:
    """Loads a DFlash, Domino or DSpark drafter; arguments and errors are those of `load_target`.

    A folder is in the format of its kind's authors (DFlash: z-lab), or holds a DFlash drafter of the
    speculators library.
    """
    return plan_drafter(resolve(source, revision), float_dtype(dtype)).run()


def plan_target(path: Path, dtype: jnp.dtype) -> Plan[Target]:
    """Opens the checkpoint of a target and compares it with its config."""
    copies: tuple[str, ...] = ()
    if path.is_dir():
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
    fit = compare(source.tensors, slots, named_parameters(abstract), source.dtypes, copies)
    return Plan(source, slots, abstract, fit)


def plan_drafter(path: Path, dtype: jnp.dtype) -> Plan[Drafter]:
    """Opens the checkpoint of a drafter and compares it with its config."""
    if not path.is_dir():
        raise ReanchorError(f"{path} is a file; expected a drafter's folder with config.json and safetensors")
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


def _with_own_parts(config: DrafterConfig, path: Path, source: TensorSource) -> DrafterConfig:
    """The config of a DFlash head with the weights that the file holds: its config does not name them."""
    if not isinstance(config.head, LMHeadConfig):
        return config
    own_mask = MASK_EMBEDDING_NAME in source.tensors
    if not own_mask and (path / MASK_EMBEDDING_FILE).exists():
        raise ReanchorError(
            f"{path / MASK_EMBEDDING_FILE} holds a mask embedding, in a pickle, which is never opened; "
            f"move it into the safetensors as tensor {MASK_EMBEDDING_NAME} of {config.layer.hidden_size} numbers"
        )
    rows = config.head.draft_vocab_size
    if rows in (None, config.vocab_size):  # a full head is the file's where it is there, else the target's
        rows = config.vocab_size if OWN_HEAD_NAME in source.tensors else None
    own_embedding = OWN_EMBEDDING_NAME in source.tensors
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
    if not np.array_equal(source.read(HEAD_NAME), source.read(embedding)):
        raise ReanchorError(
            f"{source.name}: {HEAD_NAME} differs from {embedding}, but tie_word_embeddings is true; "
            "expected equal tensors: set it to false if the head is its own"
        )
