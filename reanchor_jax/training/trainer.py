"""The training loop: step, log, evaluate, checkpoint, resume."""

from __future__ import annotations

import dataclasses
import hashlib
import json
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
from reanchor_jax.files import write_whole
from reanchor_jax.pair import Pair, check_pair
from reanchor_jax.target import Target
from reanchor_jax.training.blocks import Batch
from reanchor_jax.training.calibrate import Outcomes, fit_temperatures, outcomes, with_temperatures
from reanchor_jax.training.checkpoints import Checkpoints, check_settings
from reanchor_jax.training.data import Text, batch_index, frequent_tokens, make_batches
from reanchor_jax.training.evaluate import HeldOut, make_decoder, summary
from reanchor_jax.training.features import FeatureSource, fold_scale
from reanchor_jax.training.loss import make_vocab
from reanchor_jax.training.optimizer import OptimizerConfig
from reanchor_jax.training.step import TrainState, evaluate_batch, init_optimizer, train_step
from reanchor_jax.training.trainable import is_trained

_REPORTED = (
    *("memo_gb", "log_every", "checkpoint_every", "eval_every", "eval_first"),
    *("tau_prompts", "tau_tokens"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Settings of a run. The first group decides the result, the second only what is reported."""

    optimizer: OptimizerConfig
    num_rows: int = 4
    """R: texts of a step."""
    num_anchors: int = 16
    """K: blocks of a text and step."""
    gamma: float = 4.0
    """Draft k has weight exp(-(k - 1) / gamma)."""
    train_vocab: int | None = None
    """Size of the restricted LM head of training; None: the whole vocabulary."""
    freeze_backbone: bool = False
    """Train the head alone."""
    feature_dtype: str = "float32"
    seed: int = 0

    memo_gb: float = 4.0
    """Memory for the target's features of batches seen before."""
    log_every: int = 10
    eval_every: int = 200
    eval_first: bool = False
    """Evaluate before the first step too."""
    checkpoint_every: int = 200
    tau_prompts: int = 8
    """Held-out prompts that are really decoded at each evaluation; 0: none."""
    tau_tokens: int = 64

    def result_settings(self) -> dict[str, Any]:
        """The settings that a resumed run must share."""
        return {name: value for name, value in dataclasses.asdict(self).items() if name not in _REPORTED}


def train(
    target: Target,
    start: Drafter,
    texts: Sequence[Text],
    held_out: Sequence[Text],
    config: TrainConfig,
    folder: Path,
    *,
    start_is_scaled: bool = False,
    echo: Callable[[str], None] = print,
    on_step: Callable[[int, float], None] = lambda step, loss: None,
) -> Drafter:
    """Trains a drafter, or resumes the run in `folder`.

    `folder` gets `train.json` (settings), `log.jsonl`, `checkpoints/`, and two drafters in
    their kind's format: `drafter/`, written with each checkpoint, and `best/`, the one of the highest
    held-out proxy tau. On CPU a resumed run gives bit for bit the parameters of one that was
    never stopped.

    Args:
      target: frozen; float32 on CPU.
      start: float32 drafter to start from.
      texts: training texts.
      held_out: others, for evaluation.
      config: settings.
      folder: of the run.
      start_is_scaled: whether `start` was made for scaled features (`new_drafter`).
      echo: gets a line now and then.
      on_step: gets the number of finished steps, and the last logged loss.

    Returns:
      The drafter, for the target's own features.

    Raises:
      ReanchorError: settings that do not fit, or a run of other settings in `folder`.
      KeyboardInterrupt: after SIGINT or SIGTERM, once the last step's checkpoint is written.
    """
    config.optimizer.validate()
    vocab_size = target.config.vocab_size
    check_pair(target, start)
    if target.config.logit_softcap is not None:
        raise ReanchorError(
            f"the target's logits have a softcap, {target.config.logit_softcap:g}; expected a target without one: "
            "the losses do not know it"
        )
    if isinstance(start.config.head, LMHeadConfig) and start.config.head.draft_vocab_size not in (None, vocab_size):
        raise ReanchorError(
            f"the drafter has an LM head over {start.config.head.draft_vocab_size} of {vocab_size} tokens; "
            "expected one over all: reduced vocabularies are not trained"
        )
    if not any(jax.tree.leaves(is_trained(start, config.freeze_backbone))):
        raise ReanchorError("--freeze-backbone leaves nothing to train: the head has no weights; expected none here")
    batches = make_batches(texts, config.num_rows, config.seed)
    smallest = min(batch.tokens.shape[1] for batch in [*batches, *make_batches(held_out, config.num_rows, 0)])
    if not 1 <= config.num_anchors <= smallest:
        raise ReanchorError(f"--anchors is {config.num_anchors}; expected 1 to {smallest}, the shortest padded text")
    folder.mkdir(parents=True, exist_ok=True)
    check_settings(
        folder / "train.json",
        {**config.result_settings(), "drafter": dataclasses.asdict(start.config), "texts": _digest(texts)},
    )
    run = _Run(target, start, texts, held_out, batches, config, folder, start_is_scaled, echo)
    try:
        return run.loop(on_step)
    finally:
        run.checkpoints.close()


class _Run:
    def __init__(
        self,
        target: Target,
        start: Drafter,
        texts: Sequence[Text],
        held_out: Sequence[Text],
        batches: list[Batch],
        config: TrainConfig,
        folder: Path,
        start_is_scaled: bool,
        echo: Callable[[str], None],
    ):
        self.target, self.config, self.folder, self.batches, self.echo = target, config, folder, batches, echo
        self.held_out = held_out
        self.held_out_batches = make_batches(held_out, config.num_rows, 0)
        memo = int(config.memo_gb * 1e9)
        self.features = FeatureSource(target, start.config.target_layer_ids, config.feature_dtype, memo)
        self.features.measure_scale(batches)
        ids = None if config.train_vocab is None else frequent_tokens(texts, config.train_vocab)
        vocab_size = target.config.vocab_size
        self.vocab, self.whole_vocab = make_vocab(vocab_size, ids), make_vocab(vocab_size, None)
        self.sizes = {"num_anchors": config.num_anchors, "gamma": config.gamma}
        self.key = jax.random.key(config.seed)
        self.decode = make_decoder(DecodeConfig(method="dflash"), config.tau_tokens)
        # A copy: `train_step` donates its state, and the caller keeps `start`.
        drafter = fold_scale(start, jnp.ones_like(self.features.scale) if start_is_scaled else self.features.scale)
        self.settings = {"optimizer": config.optimizer, "freeze_backbone": config.freeze_backbone}
        self.state = TrainState(drafter, init_optimizer(drafter, **self.settings))
        self.temperatures, self.calibrated = (), -1
        """Of the confidence, and the step that they were fitted at."""
        self.checkpoints = Checkpoints(folder / "checkpoints")
        self.done = self.checkpoints.latest() or 0
        echo(f"{len(texts)} texts in {len(batches)} batches, {len(held_out)} texts held out")
        if self.done:
            self.state = self.checkpoints.restore(self.done, self.state)
            self.echo(f"resumed {folder} at step {self.done}")
        earlier = _keep_log_until(folder / "log.jsonl", self.done)
        self.best = max((row["held_out"]["proxy_tau"] for row in earlier if "held_out" in row), default=0.0)

    def loop(self, on_step: Callable[[int, float], None]) -> Drafter:
        """Steps until the end or a signal."""
        config, steps = self.config, self.config.optimizer.steps
        since, first, losses, loss = time.monotonic(), self.done, [], float("nan")
        with _signals() as stopped:
            if config.eval_first and not self.done:
                self.report(loss)
                since = time.monotonic()
            while self.done < steps and not stopped:
                losses.append(self.step(self.done))
                self.done += 1
                if self.done % config.log_every == 0 or self.done == steps:
                    loss = float(np.mean(jax.device_get(losses)))
                    seconds = time.monotonic() - since
                    rate = (self.done - first) * config.num_rows * config.num_anchors / seconds
                    self.log({"step": self.done, "loss": loss, "blocks_per_second": round(rate, 2)})
                    since, first, losses = time.monotonic(), self.done, []
                on_step(self.done, loss)
                ends = self.done == steps
                if self.done % config.checkpoint_every == 0 or ends:
                    self.save()
                if self.done % config.eval_every == 0 or ends:
                    self.report(loss)
                    since, first, losses = time.monotonic(), self.done, []
        if stopped:
            self.save()
            raise KeyboardInterrupt
        return self.exported()

    def step(self, number: int) -> jax.Array:
        """One step; everything in it is a function of its number."""
        config = self.config
        index = batch_index(number, len(self.batches), config.seed)
        batch, key = self.batches[index], jax.random.fold_in(self.key, number)
        features = self.features(index, batch)
        self.state, loss = train_step(
            self.state, self.target, self.vocab, batch, features, key, **self.settings, **self.sizes
        )
        return loss

    def drafter(self) -> Drafter:
        """The drafter for the target's own features."""
        return fold_scale(self.state.drafter, 1.0 / self.features.scale)

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

    def report(self, loss: float) -> None:
        """Evaluates, logs, and keeps the drafter if it is the best so far."""
        result = self.evaluate()
        self.log({"step": self.done, "held_out": result})
        tau = f", tau {result['tau']:.3f}" if "tau" in result else ""
        self.echo(
            f"step {self.done} of {self.config.optimizer.steps}: loss {loss:.3f}, held-out {result['loss']:.3f}, "
            f"accuracy {' '.join(f'{a:.2f}' for a in result['accuracy'][:4])} .., "
            f"proxy tau {result['proxy_tau']:.3f}{tau}"
        )
        if result["proxy_tau"] > self.best:
            self.best = result["proxy_tau"]
            save_drafter(self.exported(), self.folder / "best")

    def held_out_blocks(self) -> Iterator[tuple[Batch, Any, jax.Array]]:
        """Held-out batches, their features, and keys for anchors that never change."""
        for i, batch in enumerate(self.held_out_batches):
            # Behind the training batches' numbers, so that held-out features are remembered too.
            yield batch, self.features(len(self.batches) + i, batch), jax.random.fold_in(jax.random.key(0), i)

    def evaluate(self) -> dict[str, Any]:
        """Held-out sums at fixed anchors, and tau of real decoding."""
        sums = None
        for held_out in self.held_out_blocks():
            part = evaluate_batch(self.state.drafter, self.target, self.whole_vocab, *held_out, **self.sizes)
            part = jax.device_get(part)
            sums = part if sums is None else HeldOut(*(a + b for a, b in zip(sums, part, strict=True)))
        assert sums is not None
        result = summary(sums)
        if self.config.tau_prompts:
            prompts = [text.prompt_ids for text in self.held_out[: self.config.tau_prompts]]
            result["tau"] = self.decode(Pair(self.target, self.drafter()), prompts).tau
        return result

    def log(self, record: dict[str, Any]) -> None:
        """Appends one line to log.jsonl."""
        with (self.folder / "log.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


def _digest(texts: Sequence[Text]) -> str:
    """Fingerprint of the training texts."""
    data = json.dumps([[text.prompt_ids, text.answer_ids] for text in texts])
    return hashlib.sha256(data.encode()).hexdigest()[:16]


def _keep_log_until(path: Path, step: int) -> list[dict[str, Any]]:
    """Forgets what was logged beyond the checkpoint, so that no step is logged twice; returns the rest."""
    if not path.exists():
        return []
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
            if row["step"] <= step:
                kept.append(row)
        except (ValueError, KeyError, TypeError):
            continue  # half a line, from a run that was killed
    write_whole(path, "".join(json.dumps(row) + "\n" for row in kept))
    return kept


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
