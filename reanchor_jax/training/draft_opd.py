"""The recipe `draft-opd`: on-policy distillation of a drafter by its target (paper, algorithm 4).

Phase after phase, the drafter as it then is decodes some prompts together with the target, and
trains on the blocks that it drafted there. What decoding does stays as it is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import numpy as np

from reanchor_jax.drafter import Drafter
from reanchor_jax.errors import ReanchorError
from reanchor_jax.target import Target
from reanchor_jax.training.blocks import Batch
from reanchor_jax.training.checkpoints import check_settings
from reanchor_jax.training.data import Text, batch_index, digest, make_batches
from reanchor_jax.training.features import FeatureSource
from reanchor_jax.training.log import OnStep, ignore_step
from reanchor_jax.training.replay import replay_states, replay_step, sample_blocks
from reanchor_jax.training.rollout import Rollout, load_rollout, roll_out, rollout_config, save_rollout
from reanchor_jax.training.run import Run, TrainConfig, check_anchors, check_start


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftOPDConfig(TrainConfig):
    """Settings of a run. Of the inherited ones `gamma` weighs the held-out loss alone."""

    replay_gamma: float = 0.9
    """Discarded draft k has weight replay_gamma^(k - 1), the paper's gamma."""
    temperature: float = 0.0
    """Of rollouts. The divergences are those of temperature 1."""
    rollout_tokens: int = 200
    """New tokens of a prompt at most."""
    rollout_batches: int = 8
    """Batches of prompts, `num_rows` each, of a rollout phase."""
    passes: int = 1
    """Steps on each of these batches, before the next phase."""

    def validate(self) -> None:
        """Raises ReanchorError for values out of range."""
        self.optimizer.validate()
        for name, got, fine, expected in (
            ("--gamma", self.replay_gamma, 0 < self.replay_gamma <= 1, "a number above 0, at most 1"),
            ("--max-new-tokens", self.rollout_tokens, self.rollout_tokens >= 2, "at least 2"),
            ("--rollout-batches", self.rollout_batches, self.rollout_batches >= 1, "at least 1"),
            ("--passes", self.passes, self.passes >= 1, "at least 1"),
        ):
            if not fine:
                raise ReanchorError(f"{name} is {got}; expected {expected}")
        rollout_config(self.temperature).validate(block_size=2)  # any size: chains have no setting that depends on it
        if self.train_vocab is not None:
            raise ReanchorError("--train-vocab does not go with --recipe draft-opd, which scores all tokens")


def draft_opd(
    target: Target,
    start: Drafter,
    prompts: Sequence[tuple[int, ...]],
    held_out: Sequence[Text],
    config: DraftOPDConfig,
    folder: Path,
    *,
    features_folder: Path | None = None,
    echo: Callable[[str], None] = print,
    on_step: OnStep = ignore_step,
) -> Drafter:
    """Trains a drafter on its own drafts, or resumes the run in `folder`.

    `folder` gets what `trainer.train` writes, and `rollouts/PHASE/BATCH.npz` with the recorded
    blocks (`rollout.Rollout`). On CPU a resumed run gives bit for bit the parameters of one that was
    never stopped.

    Args:
      target: frozen; float32 on CPU.
      start: float32 drafter to start from.
      prompts: token ids of the prompts of rollouts.
      held_out: the target's own texts, for evaluation.
      config: settings.
      folder: of the run.
      features_folder: where features of held-out texts are kept (None: in `folder`).
      echo: gets a line now and then.
      on_step: called after each step (`log.OnStep`).

    Returns:
      The drafter, for the target's own features.

    Raises:
      ReanchorError: settings that do not fit, or a run of other settings in `folder`.
      KeyboardInterrupt: after SIGINT or SIGTERM, once the last step's checkpoint is written.
    """
    config.validate()
    check_start(target, start, config.freeze_backbone)
    if start.config.has_confidence:
        raise ReanchorError("the drafter has a confidence, which draft-opd does not train; expected one without")
    held_out_batches = make_batches(held_out, config.num_rows, 0)
    check_anchors(config.num_anchors, held_out_batches)
    folder.mkdir(parents=True, exist_ok=True)
    texts = [Text(prompt, ()) for prompt in prompts]
    settings = {"recipe": "draft-opd", "drafter": dataclasses.asdict(start.config), "prompts": digest(texts)}
    settings["compute_dtype"] = str(target.dtype)
    check_settings(folder / "train.json", {**config.result_settings(), **settings})
    batches = make_batches(texts, config.num_rows, config.seed)
    echo(f"{len(prompts)} prompts in {len(batches)} batches, {len(held_out)} texts held out")
    # Of held-out texts alone: a rollout's features are those of its own text, met once.
    tap_ids, held_out_folder = start.config.target_layer_ids, features_folder or folder / "features"
    features = FeatureSource(target, tap_ids, held_out_folder, dtype=config.feature_dtype)
    features.measure_scale(held_out_batches)
    run = _Run(target, start, held_out, features, config, folder, start_is_scaled=False, echo=echo)
    run.batches = batches
    return run.finish(on_step)


class _Run(Run):
    config: DraftOPDConfig
    batches: list[Batch]
    """Prompts."""
    phase = -1
    rollouts: tuple[Rollout, ...] = ()
    """Of the phase."""

    def step(self, number: int) -> dict[str, jax.Array]:
        config = self.config
        size = min(config.rollout_batches, len(self.batches))
        phase, place = divmod(number, size * config.passes)
        if phase != self.phase:
            self.phase, self.rollouts = phase, self.roll_out(phase, size, is_new=place == 0)
            if place == 0:
                self.report_rollouts(number)
        rollout = self.rollouts[batch_index(place, size, config.seed + phase)]
        replay = sample_blocks(rollout, config.num_anchors, np.random.default_rng((config.seed, 5, number)))
        tap_ids = self.state.drafter.config.target_layer_ids
        states = replay_states(self.target, replay, self.features.scale, tap_ids=tap_ids)
        self.state, seen = replay_step(
            self.state, self.target, replay, states, gamma=config.replay_gamma, **self.settings
        )
        return seen

    def roll_out(self, phase: int, size: int, *, is_new: bool) -> tuple[Rollout, ...]:
        """The rollouts of a phase: what is on disk already, and the rest where the phase is new.

        The drafter at the start of a phase is a function of the settings, so files of a run that was
        killed here go on being right.
        """
        config, pair, rollouts = self.config, self.pair(), []
        key = jax.random.fold_in(self.key, phase)
        for place in range(size):
            path = self.folder / "rollouts" / f"{phase:05}" / f"{place:05}.npz"
            if is_new and not path.exists():
                prompts = self.batches[batch_index(phase * size + place, len(self.batches), config.seed)]
                decoding = {"config": rollout_config(config.temperature), "max_new_tokens": config.rollout_tokens}
                save_rollout(roll_out(pair, prompts, jax.random.fold_in(key, place), **decoding), path)
            rollouts.append(load_rollout(path))
        return tuple(rollouts)

    def report_rollouts(self, number: int) -> None:
        """Logs a new phase, under the number of the first step that trains on it."""
        accepted = np.concatenate([rollout.accepted for rollout in self.rollouts])
        tau = float(np.mean(accepted + 1)) if len(accepted) else 0.0
        self.log.append({"step": number + 1, "rollout": {"phase": self.phase, "blocks": len(accepted), "tau": tau}})
        self.echo(f"step {number}: phase {self.phase} of rollouts, {len(accepted)} blocks, tau {tau:.3f}")
