"""How far a run is, on stderr: a bar on a terminal, elsewhere a plain line a minute."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from reanchor_jax.training.log import OnStep

LINE_SECONDS = 60.0
"""Time between two plain lines, at least."""
WINDOW_SECONDS = 600.0
"""The time left follows from the speed of so many seconds: steps may take ten of them, and evaluations longer."""


def status(latest: Mapping[str, float]) -> str:
    """The numbers that one watches, of `log.scalars`; those that are not there yet are left out."""
    shown = {
        "loss": "loss {:.3f}",
        "blocks_per_second": "{:,.0f} blocks/s",
        "proxy_tau": "held-out proxy tau {:.3f}",
        "tau": "tau {:.3f}",
    }
    return ", ".join(text.format(latest[name]) for name, text in shown.items() if name in latest)


def plain_line(name: str, done: int, total: int, seconds_left: float | None, latest: Mapping[str, float]) -> str:
    """Example: `training 120 of 900, 0:12:30 left, loss 3.214, 412 blocks/s`."""
    left = "" if seconds_left is None else f"{datetime.timedelta(seconds=round(seconds_left))} left"
    return ", ".join(filter(None, (f"{name} {done} of {total}", left, status(latest))))


class _Bar(Progress):
    """The bar, and below it `status`: both do not fit into 80 columns."""

    below = ""

    def get_renderables(self) -> Iterator[RenderableType]:
        yield from super().get_renderables()
        if self.below:
            yield Text(self.below, overflow="ellipsis", no_wrap=True)


@contextmanager
def progress(
    name: str, total: int, *, console: Console | None = None, clock: Callable[[], float] = time.monotonic
) -> Iterator[tuple[OnStep, Callable[[str], None]]]:
    """A function to call after each step, and one that prints a line beside the bar.

    Args:
      name: what is going on.
      total: steps of it.
      console: where to; None: stderr.
      clock: seconds.
    """
    console = Console(stderr=True) if console is None else console
    columns = [
        TextColumn(name), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("left"),
        TimeRemainingColumn(),
    ]  # fmt: skip
    last = clock()

    def echo(line: str) -> None:
        console.print(line, markup=False, highlight=False, soft_wrap=True)

    bar = _Bar(
        *columns,
        console=console,
        disable=not console.is_terminal,
        get_time=clock,
        speed_estimate_period=WINDOW_SECONDS,
    )
    with bar:
        task = bar.add_task(name, total=total)

        def on_step(done: int, latest: Mapping[str, float]) -> None:
            nonlocal last
            bar.below = status(latest)
            bar.update(task, completed=done)
            if not console.is_terminal and clock() - last >= LINE_SECONDS:
                last = clock()
                echo(plain_line(name, done, total, bar.tasks[0].time_remaining, latest))

        yield on_step, echo
