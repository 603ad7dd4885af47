"""Reading of safetensors folders, sharded or not. Pickles are never opened."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes  # noqa: F401  teaches numpy the name bfloat16, by which safetensors asks for it
import numpy as np
from safetensors import SafetensorError, safe_open

from reanchor_jax.checkpoint.fields import read_json
from reanchor_jax.checkpoint.fill import TensorInfo
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
        self._files: dict[str, safe_open] = {}
        if (folder / SINGLE).exists():
            self._open(folder / SINGLE)
        elif (folder / INDEX).exists():
            self._open_shards(folder)
        elif any(folder.glob("*.bin")) or any(folder.glob("*.pt")) or any(folder.glob("*.pth")):
            raise ReanchorError(f"{folder} holds pickled weights, which are never opened; convert them to safetensors")
        else:
            raise ReanchorError(f"{folder} holds neither {SINGLE} nor {INDEX}; expected a safetensors checkpoint")

    def read(self, name: str) -> np.ndarray:
        """One tensor, in the dtype of the file."""
        try:
            return self._files[name].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ReanchorError(f"{self.name}: {name} cannot be read: {error}; fetch the file again") from None

    def _open(self, path: Path) -> list[str]:
        try:
            file = safe_open(str(path), framework="numpy")
        except (SafetensorError, OSError) as error:
            raise ReanchorError(f"{path} cannot be read: {error}; fetch the file again") from None
        names = list(file.keys())
        for name in names:
            if name in self.tensors:
                raise ReanchorError(f"{path} holds {name}, which another shard holds too; expected each tensor once")
            header = file.get_slice(name)
            self.tensors[name] = TensorInfo(tuple(header.get_shape()), header.get_dtype())
            self._files[name] = file
        return names

    def _open_shards(self, folder: Path) -> None:
        path = folder / INDEX
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
