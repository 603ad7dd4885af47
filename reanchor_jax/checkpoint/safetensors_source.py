"""Reading of safetensors folders, sharded or not. Pickles are never opened.

A file is opened for every read: the library maps it into memory, and what was read of an open map
stays resident. Read in turn through one map, a checkpoint would fill the memory with itself.
"""

from __future__ import annotations

from pathlib import Path

import ml_dtypes  # noqa: F401  teaches numpy the name bfloat16, by which safetensors asks for it
import numpy as np
from safetensors import SafetensorError, safe_open

from reanchor_jax.checkpoint.fields import read_json
from reanchor_jax.checkpoint.fill import Index, TensorInfo
from reanchor_jax.checkpoint.manifest import AGAIN, MANIFEST, PARAMETERS
from reanchor_jax.errors import ReanchorError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


class SafetensorsSource:
    """An open folder. All headers are read, and checked against the index, before any tensor is."""

    dtypes = frozenset({"F64", "F32", "F16", "BF16"})

    def __init__(self, folder: Path):
        """Opens the folder.

        Raises:
          ReanchorError: no safetensors, a missing or damaged shard, an index that does not fit.
        """
        self.name = str(folder)
        self.tensors: dict[str, TensorInfo] = {}
        self.files: list[Path] = []
        self._file_of: dict[str, Path] = {}
        if (folder / SINGLE).exists():
            self._open(folder / SINGLE)
        elif (folder / INDEX).exists():
            self._open_shards(folder)
        elif any(folder.glob("*.bin")) or any(folder.glob("*.pt")) or any(folder.glob("*.pth")):
            raise ReanchorError(f"{folder} holds pickled weights, which are never opened; convert them to safetensors")
        elif (folder / PARAMETERS).is_dir():
            raise ReanchorError(f"{folder} is a converted checkpoint, but its {MANIFEST} is missing; {AGAIN}")
        else:
            raise ReanchorError(f"{folder} holds neither {SINGLE} nor {INDEX}; expected a safetensors checkpoint")

    def read(self, name: str, index: Index | None = None) -> np.ndarray:
        """One tensor, or a part of it, in the dtype of the file."""
        path = self._file_of[name]
        try:
            with safe_open(str(path), framework="numpy") as file:
                return file.get_tensor(name) if index is None else file.get_slice(name)[index]
        except (SafetensorError, OSError) as error:
            raise ReanchorError(f"{path}: {name} cannot be read: {error}; fetch the file again") from None

    def _open(self, path: Path) -> list[str]:
        try:
            with safe_open(str(path), framework="numpy") as file:
                headers = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  no mapping
                infos = {name: TensorInfo(tuple(h.get_shape()), h.get_dtype()) for name, h in headers.items()}
        except (SafetensorError, OSError) as error:
            raise ReanchorError(f"{path} cannot be read: {error}; fetch the file again") from None
        for name in infos:
            if name in self.tensors:
                raise ReanchorError(
                    f"{path} holds {name}, which another shard holds too; expected each tensor once: "
                    "fetch the checkpoint again"
                )
        self.tensors |= infos
        self.files.append(path)
        self._file_of |= dict.fromkeys(infos, path)
        return list(infos)

    def _open_shards(self, folder: Path) -> None:
        path = folder / INDEX
        self.files.append(path)
        shard_of = read_json(path).get("weight_map")
        if not isinstance(shard_of, dict) or not all(isinstance(shard, str) for shard in shard_of.values()):
            raise ReanchorError(f"{path}: weight_map is missing or damaged; expected tensor names and their shards")
        shards = sorted(set(shard_of.values()))
        for shard in shards:
            if Path(shard).name != shard or not shard.endswith(".safetensors"):
                raise ReanchorError(
                    f"{path} names the shard {shard!r}; expected a .safetensors file of the same folder"
                )
        missing = [shard for shard in shards if not (folder / shard).exists()]
        if missing:
            raise ReanchorError(
                f"{folder} lacks {len(missing)} of {len(shards)} shards: {', '.join(missing[:4])}; fetch them"
            )
        held = {name: shard for shard in shards for name in self._open(folder / shard)}
        for name, shard in shard_of.items():
            if held.get(name) != shard:
                found = f"it is in {held[name]}" if name in held else "no shard holds it"
                raise ReanchorError(f"{path} says that {name} is in {shard}, but {found}; fetch the checkpoint again")
        extra = [name for name in held if name not in shard_of]
        if extra:
            raise ReanchorError(
                f"{path} does not name {extra[0]}, which {held[extra[0]]} holds; fetch the checkpoint again"
            )
