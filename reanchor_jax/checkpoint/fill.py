"""Strict filling of a module: every tensor used once, every parameter filled, every shape right."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import jax
import numpy as np
from flax import nnx

from reanchor_jax.checkpoint.rules import IGNORED, TRANSFORMS, Slot
from reanchor_jax.config import LayerConfig
from reanchor_jax.errors import ReanchorError

M = TypeVar("M", bound=nnx.Module)
Index = tuple[slice, ...]
"""A part of a tensor: one slice an axis, all of step 1."""
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
    files: list[Path]
    """What it is read from, without configs."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """The headers."""
        ...

    def read(self, name: str, index: Index | None = None) -> np.ndarray:
        """The tensor, or the part of it: numbers that the transforms and the model's dtype still change."""
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

    A parameter with a sharding is read device by device, each its part: the host holds one part and,
    where a transform needs it whole, one tensor. A parameter without one is allocated once in its
    final dtype and filled tensor by tensor.

    Args:
      abstract: the module with shapes, dtypes and perhaps shardings in place of weights.
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
        tensors = {name: slots[name] for name in names[path]}
        if leaf.sharding is None:
            whole = tuple(slice(0, size) for size in leaf.shape)
            leaves.append(jax.device_put(_read_part(leaf, whole, source, tensors, layer)))
            continue
        parts, last, host = [], None, None
        for device, index in leaf.sharding.addressable_devices_indices_map(leaf.shape).items():
            index = tuple(slice(*s.indices(size)[:2]) for s, size in zip(index, leaf.shape, strict=True))
            if index != last:  # devices that hold the same part follow each other where all hold the whole
                last, host = index, _read_part(leaf, index, source, tensors, layer)
            parts.append(jax.block_until_ready(jax.device_put(host, device)))
        leaves.append(jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, parts))
    return jax.tree_util.tree_unflatten(jax.tree.structure(abstract), leaves)


def read_tensor(
    source: TensorSource, name: str, slot: Slot, dtype: np.dtype, layer: LayerConfig, index: Index
) -> np.ndarray:
    """A part of a tensor as the model holds it: transformed, and cast to the parameter's dtype.

    Raises:
      ReanchorError: it cannot be read, or holds numbers that float16 cannot hold.
    """
    if slot.transform == "copy":  # the only one under which a part stands for itself
        values = source.read(name, index)
    else:
        values = TRANSFORMS[slot.transform](source.read(name), layer)[index]
    with np.errstate(over="ignore"):
        cast = values.astype(dtype, copy=False)
    if dtype == np.float16 and not np.isfinite(cast).all():
        raise ReanchorError(
            f"{source.name}: {name} holds {np.abs(values.astype(np.float32)).max():g}; expected at most 65504 for "
            "float16: take bfloat16 or float32"
        )
    return cast


def tensor_pieces(
    source: TensorSource, name: str, slot: Slot, leaf: jax.ShapeDtypeStruct, layer: LayerConfig, rows: int
) -> Iterator[tuple[Index, np.ndarray]]:
    """A tensor as the model holds it, `rows` rows at a time, each piece with its place in the tensor.

    Args:
      source, name, slot, layer: as in `read_tensor`.
      leaf: the parameter that it fills.
      rows: on the tensor's first axis; a tensor without axes is one piece.
    """
    dtype, shape = np.dtype(leaf.dtype), leaf.shape if slot.layer is None else leaf.shape[1:]
    rest = tuple(slice(0, size) for size in shape[1:])
    places = [(slice(n, min(n + rows, shape[0])), *rest) for n in range(0, shape[0], rows)] if shape else [()]
    whole = None
    if slot.transform != "copy":  # not again for every piece
        whole = read_tensor(source, name, slot, dtype, layer, tuple(slice(0, size) for size in shape))
    for place in places:
        yield place, read_tensor(source, name, slot, dtype, layer, place) if whole is None else whole[place]


def _read_part(
    leaf: jax.ShapeDtypeStruct, index: Index, source: TensorSource, tensors: Mapping[str, Slot], layer: LayerConfig
) -> np.ndarray:
    """The part of a parameter, from all tensors that fill it."""
    part = np.empty([s.stop - s.start for s in index], leaf.dtype)
    for name, slot in tensors.items():
        if slot.layer is None:  # it is the parameter's only tensor
            return read_tensor(source, name, slot, part.dtype, layer, index)
        if slot.layer in range(index[0].start, index[0].stop):
            part[slot.layer - index[0].start] = read_tensor(source, name, slot, part.dtype, layer, index[1:])
    return part


def _ignored(name: str) -> bool:
    return any(pattern.fullmatch(name) for pattern in IGNORED)


def _show(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "a scalar"
