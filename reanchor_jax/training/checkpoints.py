"""Orbax checkpoints of a training run: parameters, optimizer state, step.

There is nothing else to save: anchors, data order and learning rate are functions of the step.
Orbax writes a step into a temporary folder and renames it when it is complete, so a run that is
killed at any moment finds its latest complete step.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp

from reanchor_jax.errors import ReanchorError
from reanchor_jax.files import write_whole

T = TypeVar("T")


class Checkpoints:
    """The checkpoints of one run, in `folder`."""

    def __init__(self, folder: Path, keep: int = 2):
        self.folder = folder
        self._manager = ocp.CheckpointManager(
            folder.absolute(),
            options=ocp.CheckpointManagerOptions(max_to_keep=keep, enable_async_checkpointing=False),
        )

    def latest(self) -> int | None:
        """The latest complete step, None where there is none."""
        return self._manager.latest_step()

    def save(self, step: int, state: Any) -> None:
        """Writes the state of `step` if it is not there yet.

        Raises:
          ReanchorError: it cannot be written, as on a full disk.
        """
        if step == self.latest():
            return
        log = logging.getLogger("absl")  # where Orbax's threads print the tracebacks of what is raised here
        try:
            log.disabled = True
            self._manager.save(step, args=ocp.args.StandardSave(_named(state)), force=True)
        except Exception as error:  # tensorstore's are ValueErrors
            raise ReanchorError(
                f"checkpoint {self.folder / str(step)} cannot be written: {' '.join(str(error).split())[:160]}; "
                "make room for it: the same command goes on from the one before"
            ) from error
        finally:
            log.disabled = False

    def restore(self, step: int, like: T) -> T:
        """The state of `step`, on the devices of `like`.

        Raises:
          ReanchorError: the checkpoint does not hold what `like` holds.
        """
        abstract = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(np.shape(x), x.dtype, sharding=getattr(x, "sharding", None)), _named(like)
        )
        try:
            named = self._manager.restore(step, args=ocp.args.StandardRestore(abstract))
        except Exception as error:
            raise ReanchorError(
                f"checkpoint {self.folder / str(step)} cannot be restored: {' '.join(str(error).split())[:160]}; "
                "remove the folder of that step to resume from an earlier one"
            ) from error
        names = list(_named(like))
        return jax.tree.unflatten(jax.tree.structure(like), [named[name] for name in names])

    def close(self) -> None:
        """Ends Orbax's threads."""
        self._manager.close()


def _named(state: Any) -> dict[str, Any]:
    """Leaves by their path: the file depends on names, not on the order of fields."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(state)
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}


def check_settings(
    path: Path, settings: dict[str, Any], *, of: str = "a run", another: str = "--out", write: bool = True
) -> None:
    """Writes settings beside what they are of, or compares them with those that are there.

    Args:
      path: the file, in the folder that the settings are of.
      settings: everything that what the folder holds is a function of.
      of: what that is, for the error.
      another: flag that names another folder.
      write: whether to write them where there are none; False: what they are of may still be refused.

    Raises:
      ReanchorError: a setting differs, which would make what is there another thing.
    """
    settings = json.loads(json.dumps(settings))
    if path.exists():
        try:
            old = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError):
            old = None
        if not isinstance(old, dict):
            raise ReanchorError(f"{path} is damaged; name another folder with {another}")
        for name in sorted({*old, *settings}):
            if old.get(name) != settings.get(name):
                raise ReanchorError(
                    f"{path.parent} holds {of} with {name} {old.get(name)}, got {settings.get(name)}; "
                    f"resume with the same settings, or name another folder with {another}"
                )
        return
    if write:
        write_whole(path, json.dumps(settings, indent=1, sort_keys=True) + "\n")
