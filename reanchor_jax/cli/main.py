"""One run of the command line: check, load, answer, report."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TextIO

import jax.numpy as jnp

from reanchor_jax.cli.answer import Answer, overall
from reanchor_jax.cli.arguments import Options, parse
from reanchor_jax.cli.compile_cache import use_compile_cache
from reanchor_jax.cli.models import default_dtype, first_device, open_models
from reanchor_jax.cli.output import ResultFile, check_writable, make_record
from reanchor_jax.cli.process import INTERRUPTED, run
from reanchor_jax.cli.prompts import one_prompt, read_prompts
from reanchor_jax.cli.report import make_report
from reanchor_jax.cli.session import Session, Turns
from reanchor_jax.cli.trace import Trace

DIFFERENT = 1
"""Exit code: --check found other ids than plain decoding."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code (see `--help`)."""
    return run(lambda: _Run(parse(argv)).run(), smaller="--max-new-tokens or --max-len")


class _Run:
    """The state of one run: what is asked, what was answered so far."""

    def __init__(self, options: Options):
        self.options = options
        self.prompts = read_prompts(options.prompts) if options.prompts else one_prompt(options.prompt or "")
        self.settings = {**options.settings(), "dtype": options.dtype or default_dtype()}
        self.results = None
        if options.output is not None:
            self.results = ResultFile(options.output, options.resume, self.prompts, self.settings)
        if options.trace is not None:
            check_writable("--trace", options.trace)
        done = self.results.done if self.results else set()
        self.pending = [prompt for prompt in self.prompts if prompt.index not in done]
        self.answered: list[Turns] = []
        self.done = 0
        """Prompts whose results are kept."""
        self.load_seconds = 0.0
        device = first_device()
        self.device = device.platform if device.platform == "cpu" else f"{device.platform} ({device.device_kind})"

    def run(self) -> int:
        if not self.pending:
            print(f"all {len(self.prompts)} prompts have their results in {self.options.output}", file=sys.stderr)
            return 0
        if self.options.compile_cache:
            use_compile_cache()
        start = time.perf_counter()
        models = open_models(self.options, jnp.dtype(self.settings["dtype"]))
        ids = {prompt.index: models.encode(prompt) for prompt in self.pending}
        for prompt in self.pending:
            if len(prompt.turns) > 1:  # what does not fit with empty answers will not with any
                models.encode(prompt, [""] * (len(prompt.turns) - 1))
        session = Session(models, models.load())
        self.load_seconds = time.perf_counter() - start
        try:
            with self._trace(models.tokenizer) as trace, self._progress() as advance:
                for prompt in self.pending:
                    turns = Turns(prompt)
                    self.answered.append(turns)
                    streamed = self.options.prompts is None and not self.options.json
                    session.answer(turns, ids[prompt.index], _write if streamed else None, trace)
                    self._keep(turns, streamed)
                    advance()
        except KeyboardInterrupt:
            # Where stdout is for JSON alone, the statistics go the other way.
            self._report(sys.stderr if self.options.json else sys.stdout)
            return INTERRUPTED
        finally:
            if self.results is not None:
                self.results.close()
        if not self.options.json:
            self._report(sys.stdout)
        equal = all(check.equal for turns in self.answered for check in turns.checks)
        return 0 if equal else DIFFERENT

    def _keep(self, turns: Turns, streamed: bool) -> None:
        """Writes a prompt's result where results go."""
        line = json.dumps(make_record(turns, self.settings, self.load_seconds, self.device))
        if self.results is not None:
            self.results.append(line)
        self.done += 1
        if self.options.json:
            _write(line + "\n")
        elif self.options.output is None and not streamed:
            for number, answer in enumerate(turns.answers):
                name = f"[{turns.prompt.index}]" if len(turns.answers) == 1 else f"[{turns.prompt.index}.{number}]"
                _write(f"{name} {answer.token_ids if answer.text is None else answer.text}\n")

    def _answers(self) -> list[Answer]:
        return [answer for turns in self.answered for answer in turns.answers]

    def _report(self, file: TextIO) -> None:
        checks = [check for turns in self.answered for check in turns.checks]
        before = len(self.prompts) - len(self.pending)
        prompts = ""
        if self.options.prompts is not None:
            prompts = f"{self.done} of {len(self.prompts)}" + (f", {before} done before" if before else "")
        report = make_report(self._answers(), checks, self.settings, self.load_seconds, self.device, prompts)
        print(f"\n\n{report}" if not self.options.prompts else f"\n{report}", file=file, flush=True)

    @contextlib.contextmanager
    def _trace(self, tokenizer: Any) -> Iterator[Trace | None]:
        if self.options.trace is None:
            yield None
            return
        trace = Trace(self.options.trace, self.settings, tokenizer)
        try:
            yield trace
        except KeyboardInterrupt:
            trace.close()
            raise
        except BaseException:
            trace.discard()
            raise
        trace.close()

    @contextlib.contextmanager
    def _progress(self) -> Iterator[Callable[[], None]]:
        """Yields what is to be called after each prompt."""
        texts_on_terminal = not self.options.json and self.options.output is None and sys.stdout.isatty()
        if self.options.prompts is None or texts_on_terminal:
            yield lambda: None
            return
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True)) as bar:
            task = bar.add_task("", total=len(self.prompts), completed=len(self.prompts) - len(self.pending))

            def advance() -> None:
                bar.update(task, advance=1, description=f"tau {overall(self._answers()).tau:.2f}")

            yield advance


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
