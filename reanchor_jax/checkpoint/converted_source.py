"""Reading of converted checkpoints, each device's part by itself.

The arrays are zarr3 files in Orbax's layout, which Orbax restores as well; read through TensorStore
alone they give one error for a damaged chunk, and any part without the rest.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore

from reanchor_jax.checkpoint.fill import Index, TensorInfo
from reanchor_jax.checkpoint.manifest import MANIFEST, PARAMETERS, check_files, read_manifest
from reanchor_jax.errors import ReanchorError

_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "int32": "I32"}
"""The spellings of safetensors, by JAX's."""
_STEP_BYTES = 1 << 26
"""Of all columns of the rows that one step reads."""


class ConvertedSource:
    """An open converted checkpoint; its tensors are the model's own parameters, by their names."""

    dtypes = frozenset({"F32", "F16", "BF16"})

    def __init__(self, folder: Path):
        """Opens the folder and holds its files against its manifest.

        Raises:
          ReanchorError: files that are missing, damaged, or more than the manifest names.
        """
        self.name = str(folder)
        self.manifest = read_manifest(folder)
        check_files(folder, self.manifest.files)
        self.files = [folder / name for name in (MANIFEST, *self.manifest.files)]
        self.tensors = {
            path: TensorInfo(record.shape, _DTYPES.get(record.dtype, record.dtype))
            for path, record in self.manifest.parameters.items()
        }
        self._folder = folder
        self._open: dict[str, Any] = {}

    def read(self, name: str, index: Index | None = None) -> np.ndarray:
        """One parameter, or a part of it, in its stored dtype."""
        try:
            if name not in self._open:
                self._open[name] = tensorstore.open(
                    {
                        "driver": "zarr3",
                        "kvstore": {"driver": "file", "path": str((self._folder / PARAMETERS / name).absolute())},
                        "fill_missing_data_reads": False,  # a chunk that is not there is an error, not zeros
                    },
                    read=True,
                    open=True,
                ).result()
            store, record = self._open[name], self.manifest.parameters[name]
            if store.shape != record.shape or store.dtype.name != record.dtype:
                raise ReanchorError(
                    f"{self.name}: {name} is {store.dtype.name} {list(store.shape)}; expected {record.dtype} "
                    f"{list(record.shape)}, as in {MANIFEST}: convert the source again"
                )
            return _read(store, index or tuple(slice(0, size) for size in store.shape))
        except ReanchorError:
            raise
        except Exception as error:  # TensorStore gives every status of its own one of a few built-in types
            reason = " ".join(str(error).split())[:160]
            raise ReanchorError(f"{self.name}: {name} cannot be read: {reason}; convert the source again") from None


def _read(store: Any, index: Index) -> np.ndarray:
    """A part, read step by step: chunks that reach beyond it are decoded whole, all those of a step at once."""
    if not index:
        return store.read().result()
    start, stop = index[0].start, index[0].stop
    part = np.empty([s.stop - s.start for s in index], store.dtype.numpy_dtype)
    step = max(1, _STEP_BYTES // max(1, math.prod(store.shape[1:]) * part.itemsize))
    for row in range(start, stop, step):
        rows = slice(row, min(row + step, stop))
        part[rows.start - start : rows.stop - start] = store[(rows, *index[1:])].read().result()
    return part
