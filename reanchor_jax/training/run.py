"""A training run: step, log, evaluate, checkpoint, resume. What a step minimizes, its subclasses say."""

from __future__ import annotations

import abc
import dataclasses
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from reanchor_jax.checkpoint import save_drafter
from reanchor_jax.config import DecodeConfig, LMHeadConfig
from reanchor_jax.drafter import Drafter
from reanchor_jax.errors import ReanchorError
from reanchor_jax.pair import Pair, check_pair
from reanchor_jax.target import Target
from reanchor_jax.training.blocks import Batch
from reanchor_jax.training.calibrate import Outcomes, fit_temperatures, outcomes, with_temperatures
from reanchor_jax.training.checkpoints import Checkpoints
from reanchor_jax.training.data import Text, make_batches
from reanchor_jax.training.evaluate import HeldOut, make_decoder, summary
from reanchor_jax.training.features import FeatureSource, fold_scale
from reanchor_jax.training.log import Log, OnStep
from reanchor_jax.training.loss import make_vocab
from reanchor_jax.training.mesh import split_texts
from reanchor_jax.training.optimizer import OptimizerConfig, learning_rate
from reanchor_jax.training.step import TrainState, evaluate_batch, init_optimizer
from reanchor_jax.training.trainable import computing, is_trained

_REPORTED = (
    *("log_every", "checkpoint_every", "eval_every", "eval_first"),
    *("tau_prompts", "tau_tokens", "tensorboard"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Settings of a run. The first group decides the result, the second only what is reported."""

    optimizer: OptimizerConfig
    num_rows: int = 4
    """R: texts of a step."""
    num_anchors: int = 32
    """K: blocks of a text and step at most."""
    gamma: float = 4.0
    """Draft k has weight exp(-(k - 1) / gamma)."""
    train_vocab: int | None = None
    """Size of the restricted LM head of training; None: the whole vocabulary."""
    freeze_backbone: bool = False
    """Train the head alone."""
    distill: float = 0.0
    """Share of each label that is the target's distribution; the rest is the text's token."""
    num_top: int = 8
    """Tokens of that distribution that are kept."""
    feature_dtype: str = "float32"
    """Of the target's features on disk."""
    seed: int = 0

    log_every: int = 10
    eval_every: int = 500
    eval_first: bool = False
    """Evaluate before the first step too."""
    checkpoint_every: int = 250
    tau_prompts: int = 8
    """Held-out prompts that are really decoded at each evaluation; 0: none."""
    tau_tokens: int = 64
    tensorboard: bool = False
    """Write event files for TensorBoard."""

    def result_settings(self) -> dict[str, Any]:
        """The settings that a resumed run must share."""
        return {name: value for name, value in dataclasses.asdict(self).items() if name not in _REPORTED}


def check_start(target: Target, start: Drafter, freeze_backbone: bool) -> None:
    """Raises ReanchorError where the drafter does not fit the target, or cannot be trained."""
    vocab_size = target.config.vocab_size
    check_pair(target, start)
    if isinstance(start.config.head, LMHeadConfig) and start.config.head.draft_vocab_size not in (None, vocab_size):
        raise ReanchorError(
            f"the drafter has an LM head over {start.config.head.draft_vocab_size} of {vocab_size} tokens; "
            "expected one over all: reduced vocabularies are not trained"
        )
    if not any(jax.tree.leaves(is_trained(start, freeze_backbone))):
        raise ReanchorError("--freeze-backbone leaves nothing to train: the head has no weights; expected none here")


def check_anchors(num_anchors: int, batches: Sequence[Batch]) -> None:
    """Raises ReanchorError where no text can have so many anchors; shorter texts have fewer."""
    largest = max(batch.tokens.shape[1] for batch in batches)
    if not 1 <= num_anchors <= largest:
        raise ReanchorError(f"--anchors is {num_anchors}; expected 1 to {largest}, the longest padded text")


class Run(abc.ABC):
    """A run in its folder; what a step does is a subclass's.

    The folder gets `log.jsonl` and what is made from it (see `log`), `checkpoints/`, and two drafters in
    their kind's format: `drafter/`, written with each checkpoint, and `best/`, the one of the highest
    held-out proxy tau.
    """

    def __init__(
        self,
        target: Target,
        start: Drafter,
        held_out: Sequence[Text],
        features: FeatureSource,
        config: TrainConfig,
        folder: Path,
        *,
        start_is_scaled: bool,
        echo: Callable[[str], None],
    ):
        """Arguments as in `trainer.train`; the scale of `features` has been measured."""
        self.target, self.held_out, self.features = target, held_out, features
        self.config, self.folder, self.echo = config, folder, echo
        self.held_out_batches = make_batches(held_out, config.num_rows, 0)
        self.whole_vocab = make_vocab(target.config.vocab_size, None)
        self.key = jax.random.key(config.seed)
        self.decode = make_decoder(DecodeConfig(method="dflash"), config.tau_tokens)
        # A copy: a step donates its state, and the caller keeps `start`.
        drafter = fold_scale(start, jnp.ones_like(features.scale) if start_is_scaled else features.scale)
        self.settings = {"optimizer": config.optimizer, "freeze_backbone": config.freeze_backbone}
        self.state = TrainState(drafter, init_optimizer(drafter, **self.settings))
        self.temperatures, self.calibrated = (), -1
        """Of the confidence, and the step that they were fitted at."""
        self.checkpoints = Checkpoints(folder / "checkpoints")
        self.done = self.checkpoints.latest() or 0
        if self.done:
            self.state = self.checkpoints.restore(self.done, self.state)
            self.echo(f"resumed {folder} at step {self.done}")
        self.blocks_per_step = config.num_rows * config.num_anchors
        self.log = Log(folder, self.done, self.blocks_per_step, tensorboard=config.tensorboard, echo=echo)
        taus = (record["held_out"]["proxy_tau"] for record in self.log.records if "held_out" in record)
        self.best = max(taus, default=0.0)

    @abc.abstractmethod
    def step(self, number: int) -> dict[str, jax.Array]:
        """Takes step `number`, from 0; returns scalars to log, `loss` among them.

        Everything in it is a function of its number and of the state before it.
        """

    def finish(self, on_step: OnStep) -> Drafter:
        """Takes all steps that are left; see `trainer.train`."""
        try:
            return self.loop(on_step)
        finally:
            self.checkpoints.close()
            self.log.close()

    def loop(self, on_step: OnStep) -> Drafter:
        """Steps until the end or a signal."""
        config, steps = self.config, self.config.optimizer.steps
        with _signals() as stopped:
            # A run that was killed between a checkpoint and its evaluation has the latter still before it.
            if self.evaluation_is_due() and not self.log.is_evaluated(self.done):
                self.report()
            since, first, seen = time.monotonic(), self.done, []
            while self.done < steps and not stopped:
                seen.append(self.step(self.done))
                self.done += 1
                if self.done % config.log_every == 0 or self.done == steps:
                    rows = jax.device_get(seen)
                    means = {name: float(np.mean([row[name] for row in rows])) for name in rows[0]}
                    self.check_loss(means["loss"])
                    rate = (self.done - first) * self.blocks_per_step / (time.monotonic() - since)
                    reached = {"learning_rate": learning_rate(config.optimizer, self.done - 1)}
                    self.log.append({"step": self.done, **means, **reached, "blocks_per_second": round(rate, 2)})
                    since, first, seen = time.monotonic(), self.done, []
                on_step(self.done, self.log.latest)
                if self.done % config.checkpoint_every == 0 or self.done == steps:
                    if seen:
                        self.check_loss(float(seen[-1]["loss"]))
                    self.save()
                if self.evaluation_is_due():
                    began = time.monotonic()
                    self.report()
                    since += time.monotonic() - began  # its time is none of the steps'
        if stopped:
            self.save()
            raise KeyboardInterrupt
        return self.exported()

    def evaluation_is_due(self) -> bool:
        """Whether there is an evaluation after the steps that are done."""
        if not self.done:
            return self.config.eval_first
        return self.done % self.config.eval_every == 0 or self.done == self.config.optimizer.steps

    def check_loss(self, loss: float) -> None:
        """Raises ReanchorError for a loss that is no number, before it is logged or a checkpoint kept of it."""
        if not np.isfinite(loss):
            kept = self.checkpoints.latest()
            raise ReanchorError(
                f"the loss is {loss} by step {self.done}; expected a number: start again with a lower --learning-rate, "
                f"or a --gamma nearer to 1 (the last checkpoint is of {'no step' if kept is None else f'step {kept}'})"
            )

    def drafter(self) -> Drafter:
        """The drafter for the target's own features."""
        return fold_scale(self.state.drafter, 1.0 / self.features.scale)

    def pair(self) -> Pair:
        """Target and drafter as they decode."""
        return Pair(self.target, computing(self.drafter(), self.target.dtype))

    def exported(self) -> Drafter:
        """The same, with its confidence, where it has one, fitted to what happens on the held-out texts.

        Like all else a function of the step, so that a resumed run saves the same drafter.
        """
        drafter = self.drafter()
        if not drafter.config.has_confidence:
            return drafter
        if self.calibrated != self.done:
            networks, num_anchors = (self.state.drafter, self.target, self.whole_vocab), self.config.num_anchors
            seen = [outcomes(*networks, *blocks, num_anchors=num_anchors) for blocks in self.held_out_blocks()]
            self.temperatures = fit_temperatures(Outcomes(*(np.concatenate(x) for x in zip(*seen, strict=True))))
            self.calibrated = self.done
        return with_temperatures(drafter, self.temperatures)

    def save(self) -> None:
        """Checkpoint, and the drafter beside it."""
        self.checkpoints.save(self.done, self.state)
        save_drafter(self.exported(), self.folder / "drafter")
        self.log.publish()

    def report(self) -> None:
        """Evaluates, logs, and keeps the drafter if it is the best so far."""
        result = self.evaluate()
        if result["proxy_tau"] > self.best:
            # Before its record: a run that is killed in between evaluates again.
            self.best = result["proxy_tau"]
            save_drafter(self.exported(), self.folder / "best")
        self.log.append({"step": self.done, "held_out": result})
        self.log.publish()
        tau = f", tau {result['tau']:.3f}" if "tau" in result else ""
        loss = f"loss {self.log.latest['loss']:.3f}, " if "loss" in self.log.latest else ""
        self.echo(
            f"step {self.done} of {self.config.optimizer.steps}: {loss}held-out {result['loss']:.3f}, "
            f"accuracy {' '.join(f'{a:.2f}' for a in result['accuracy'][:4])} .., "
            f"proxy tau {result['proxy_tau']:.3f}{tau}"
        )

    def held_out_blocks(self) -> Iterator[tuple[Batch, Any, jax.Array]]:
        """Held-out batches, their features, and keys for anchors that never change."""
        for i, batch in enumerate(self.held_out_batches):
            yield split_texts(batch), self.features(batch).features, jax.random.fold_in(jax.random.key(0), i)

    def evaluate(self) -> dict[str, Any]:
        """Held-out sums at fixed anchors, and tau of real decoding."""
        sums, sizes = None, {"num_anchors": self.config.num_anchors, "gamma": self.config.gamma}
        for held_out in self.held_out_blocks():
            part = evaluate_batch(self.state.drafter, self.target, self.whole_vocab, *held_out, **sizes)
            part = jax.device_get(part)
            sums = part if sums is None else HeldOut(*(a + b for a, b in zip(sums, part, strict=True)))
        assert sums is not None
        result = summary(sums)
        if self.config.tau_prompts:
            prompts = [text.prompt_ids for text in self.held_out[: self.config.tau_prompts]]
            result["tau"] = self.decode(self.pair(), prompts).tau
        return result


@contextmanager
def _signals() -> Iterator[list[int]]:
    """A list that SIGINT and SIGTERM append to: the loop stops between two steps, a second SIGINT at once."""
    received: list[int] = []

    def note(number: int, _: Any) -> None:
        if received:
            raise KeyboardInterrupt
        received.append(number)

    old = {}
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            old[number] = signal.signal(number, note)
    except ValueError:
        pass  # not the main thread: signals are someone else's
    try:
        yield received
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
