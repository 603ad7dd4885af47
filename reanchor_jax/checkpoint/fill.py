"""Strict filling of a module: every tensor used once, every parameter filled, every shape right."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol, TypeVar

import jax
import numpy as np
from flax import nnx

from reanchor_jax.checkpoint.rules import IGNORED, TRANSFORMS, Slot
from reanchor_jax.config import LayerConfig
from reanchor_jax.errors import ReanchorError

M = TypeVar("M", bound=nnx.Module)
_INTEGERS = ("I64", "I32")
_NAMED = 4  # how many tensors of one kind an error names


class TensorInfo(NamedTuple):
    """What a file's header says about a tensor."""

    shape: tuple[int, ...]
    dtype: str


class TensorSource(Protocol):
    """An open checkpoint: headers known, contents read one tensor at a time."""

    name: str
    dtypes: frozenset[str]

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """The headers."""
        ...

    def read(self, name: str) -> np.ndarray:
        """The tensor as a floating-point array."""
        ...


class Fit(NamedTuple):
    """Comparison of a file with a model."""

    missing: list[str]
    unexpected: list[str]
    shapes: list[str]
    dtypes: list[str]
    unfilled: list[str]

    def check(self, name: str) -> None:
        """One error for all faults together, or none."""
        faults = []
        for title, entries in (
            ("missing tensors", self.missing),
            ("tensors that the model has no place for", self.unexpected),
            ("wrong shapes", self.shapes),
            ("unsupported dtypes", self.dtypes),
            ("parameters that no rule fills", self.unfilled),
        ):
            if entries:
                more = f" and {len(entries) - _NAMED} more" if len(entries) > _NAMED else ""
                faults.append(f"{title}: {', '.join(entries[:_NAMED])}{more}")
        if faults:
            raise ReanchorError(
                f"{name} does not match its config: {'; '.join(faults)}; use files that belong together"
            )


def named_parameters(module: nnx.Module) -> dict[str, Any]:
    """Parameters of a module (arrays, or shapes of an abstract one) by dotted path, in tree order."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(module)
    named = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}
    return {name.removesuffix(".value"): leaf for name, leaf in named.items()}


def compare(
    tensors: Mapping[str, TensorInfo],
    slots: Mapping[str, Slot],
    parameters: Mapping[str, jax.ShapeDtypeStruct],
    dtypes: frozenset[str],
    copies: tuple[str, ...] = (),
) -> Fit:
    """Compares the names, shapes and dtypes of a file with what the model demands.

    Args:
      tensors: the file's headers.
      slots: what the rules demand.
      parameters: the model's parameters.
      dtypes: dtypes that can be read.
      copies: names that may be there besides, as copies of others (the caller compares them).
    """
    shapes, bad_dtypes = [], []
    for name, slot in slots.items():
        if name not in tensors:
            continue
        found, expected = tensors[name], parameters[slot.path].shape
        expected = expected if slot.layer is None else expected[1:]
        if found.shape != expected:
            shapes.append(f"{name} is {_show(found.shape)}, expected {_show(expected)}")
        whole = np.issubdtype(parameters[slot.path].dtype, np.integer)
        if found.dtype not in (_INTEGERS if whole else dtypes):
            bad_dtypes.append(f"{name} is {found.dtype}")
    filled = {slot.path for slot in slots.values()}
    return Fit(
        missing=[name for name in slots if name not in tensors],
        unexpected=[n for n in tensors if not (n in slots or n in copies or _ignored(n))],
        shapes=shapes,
        dtypes=bad_dtypes,
        unfilled=[path for path in parameters if path not in filled],
    )


def fill(abstract: M, source: TensorSource, slots: Mapping[str, Slot], layer: LayerConfig) -> M:
    """Builds the module from the file, one parameter at a time.

    Each stacked parameter is allocated once in its final dtype and filled tensor by tensor, so that
    the peak is the model, one parameter and one tensor.

    Args:
      abstract: the module with shapes and dtypes in place of weights.
      source: the open file, already compared with the model.
      slots: where each tensor goes.
      layer: what the transforms need to know.
    """
    parameters = named_parameters(abstract)
    names: dict[str, list[str]] = {path: [] for path in parameters}
    for name, slot in slots.items():
        names[slot.path].append(name)
    leaves = []
    for path, leaf in parameters.items():
        array = np.empty(leaf.shape, leaf.dtype)
        for name in names[path]:
            slot = slots[name]
            weight = TRANSFORMS[slot.transform](source.read(name), layer)
            array[... if slot.layer is None else slot.layer] = weight
        leaves.append(jax.device_put(array))
    return jax.tree_util.tree_unflatten(jax.tree.structure(abstract), leaves)


def _ignored(name: str) -> bool:
    return any(pattern.fullmatch(name) for pattern in IGNORED)


def _show(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "a scalar"
