"""Writing of an Orbax checkpoint piece by piece: memory holds a few megabytes of one tensor, never a model.

Orbax asks a type handler to write the leaves of a tree. Ours are descriptions, whose handler reads
the tensor, transforms it, hashes it and writes it into the array's chunks.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore

from reanchor_jax.checkpoint.fill import named_parameters, tensor_pieces
from reanchor_jax.checkpoint.load import Plan
from reanchor_jax.checkpoint.manifest import TensorRecord
from reanchor_jax.checkpoint.rules import Slot
from reanchor_jax.drafter import Drafter
from reanchor_jax.errors import ReanchorError
from reanchor_jax.placement import split_axis
from reanchor_jax.target import Target

CHUNK_BYTES = 1 << 25
"""Of the largest chunk; a row longer than that is a chunk."""


@dataclasses.dataclass(frozen=True)
class Parameter:
    """A leaf of the tree that Orbax saves: what to read, and how to store it."""

    leaf: jax.ShapeDtypeStruct
    slots: dict[str, Slot]
    chunk: tuple[int, ...]


class _Writer(ocp.type_handlers.TypeHandler):
    """Writes parameters; Orbax restores them as the arrays that they are."""

    def __init__(self, plan: Plan, advance: Callable[[int], None]):
        self.records: dict[str, TensorRecord] = {}
        self._plan, self._advance = plan, advance

    def typestr(self) -> str:
        return "np.ndarray"

    async def metadata(self, infos: Sequence[Any]) -> Sequence[Any]:
        raise NotImplementedError("parameters are only written")

    async def deserialize(self, infos: Sequence[Any], args: Sequence[Any] | None = None) -> Sequence[Any]:
        raise NotImplementedError("parameters are only written")

    async def serialize(self, values: Sequence[Any], infos: Sequence[Any], args: Sequence[Any] | None = None) -> list:
        for parameter, info in zip(values, infos, strict=True):
            self._write(parameter, Path(info.path))
        return []

    def _write(self, parameter: Parameter, path: Path) -> None:
        store = tensorstore.open(_array_spec(parameter, path), create=True, open=True).result()
        for name, slot in parameter.slots.items():
            at = () if slot.layer is None else (slot.layer,)
            rows = (*parameter.chunk, 1)[len(at)]
            digest = hashlib.sha256()
            layer = self._plan.abstract.config.layer
            for place, piece in tensor_pieces(self._plan.source, name, slot, parameter.leaf, layer, rows):
                digest.update(as_bytes(piece))
                store[(*at, *place)].write(piece).result()
                self._advance(piece.nbytes)
            self.records[name] = TensorRecord(parameter=slot.path, row=slot.layer, sha256=digest.hexdigest())


def write_parameters(
    folder: Path, plan: Plan, num_devices: int, advance: Callable[[int], None]
) -> dict[str, TensorRecord]:
    """Writes all parameters of an opened checkpoint.

    Args:
      folder: of the Orbax checkpoint; it must not exist.
      plan: the source, compared with its model.
      num_devices: chunks are parts of these, so that each can read its own alone.
      advance: is told the bytes of each piece written.

    Returns:
      What each tensor became.

    Raises:
      ReanchorError: a tensor cannot be read or cast, or the folder cannot be written.
    """
    slots: dict[str, dict[str, Slot]] = {}
    for name, slot in plan.slots.items():
        slots.setdefault(slot.path, {})[name] = slot
    tree = {
        path: Parameter(leaf, slots[path], chunk_shape(plan.abstract, path, leaf, slots[path], num_devices))
        for path, leaf in named_parameters(plan.abstract).items()
    }
    writer = _Writer(plan, advance)
    registry = ocp.type_handlers.create_type_handler_registry((Parameter, writer))
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_zarr3=True, type_handler_registry=registry)
    try:
        with ocp.Checkpointer(handler) as checkpointer:
            checkpointer.save(folder.absolute(), tree)
    except ReanchorError:
        raise
    except Exception as error:  # TensorStore gives every status of its own one of a few built-in types
        reason = " ".join(str(error).split())[:200]
        raise ReanchorError(f"{folder} cannot be written: {reason}; free space or choose another folder") from None
    return writer.records


def chunk_shape(
    network: Target | Drafter, path: str, leaf: jax.ShapeDtypeStruct, slots: Mapping[str, Slot], num_devices: int
) -> tuple[int, ...]:
    """Chunks of a parameter: within one layer, within one device's part, of at most `CHUNK_BYTES`.

    Example: o_proj [L, 4096, 4096] in bfloat16, split along axis 2 over 4 devices: a row of all devices
    has 8 KiB, 4096 rows fit into 32 MiB, so chunks are [1, 4096, 1024].
    """
    chunk, split = list(leaf.shape), split_axis(network, path, num_devices)
    rows = 1 if any(slot.layer is not None for slot in slots.values()) else 0
    if rows:
        chunk[0] = 1
    if split is not None:
        chunk[split] //= num_devices
    if rows < len(chunk):
        row_bytes = math.prod(leaf.shape[rows + 1 :]) * np.dtype(leaf.dtype).itemsize
        parts = math.ceil(chunk[rows] * row_bytes / CHUNK_BYTES)
        # Rather a few chunks more than one that lies in two devices' parts.
        parts = next((n for n in range(parts, 2 * parts) if chunk[rows] % n == 0), parts)
        chunk[rows] = math.ceil(chunk[rows] / parts)
    return tuple(chunk)


def as_bytes(piece: np.ndarray) -> memoryview:
    """Its bytes in row-major order, of any dtype and shape."""
    return np.ascontiguousarray(piece).reshape(-1).view(np.uint8).data


def _array_spec(parameter: Parameter, path: Path) -> dict[str, Any]:
    """A zarr3 array where Orbax expects it; each chunk ends with its checksum."""
    metadata = {
        "shape": list(parameter.leaf.shape),
        "data_type": np.dtype(parameter.leaf.dtype).name,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(parameter.chunk)}},
        "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}],
    }
    return {
        "driver": "zarr3",
        "kvstore": {"driver": "file", "path": str(path)},
        "metadata": metadata,
        "store_data_equal_to_fill_value": True,  # a chunk of zeros is stored too: what is not there is damage
    }
