"""TensorBoard's event files of a training run. Needs tensorboardX (extra `tensorboard`), not TensorFlow."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path

from reanchor_jax.errors import ReanchorError


def check_installed() -> None:
    """Raises ReanchorError where event files cannot be written."""
    if importlib.util.find_spec("tensorboardX") is None:
        raise ReanchorError("--tensorboard needs tensorboardX, which is not installed; pip install tensorboardX")


class EventFile:
    """The one event file in `folder`, from nothing.

    A resumed run writes all of its records again instead of adding a second file: TensorBoard would
    have to be told which steps of the first one are void, and other readers of such files ask no one.
    """

    def __init__(self, folder: Path):
        check_installed()
        from tensorboardX import SummaryWriter

        for earlier in folder.glob("events.out.tfevents.*"):
            earlier.unlink()
        self._writer = SummaryWriter(str(folder))

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Adds `log.scalars` of a record; accuracies of all positions share a group, `accuracy/K`."""
        for name, value in values.items():
            self._writer.add_scalar(name.replace("accuracy_", "accuracy/"), value, step)

    def flush(self) -> None:
        """Puts on disk what has been added."""
        self._writer.flush()

    def close(self) -> None:
        """Flushes, and ends the writer's thread."""
        self._writer.close()
