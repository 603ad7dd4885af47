"""Training on the target's own texts: cross entropy of blocks behind random anchors."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import jax

from reanchor_jax.drafter import Drafter
from reanchor_jax.errors import ReanchorError
from reanchor_jax.target import Target
from reanchor_jax.training.blocks import Batch
from reanchor_jax.training.checkpoints import check_settings
from reanchor_jax.training.data import Text, batch_index, digest, frequent_tokens, make_batches
from reanchor_jax.training.features import FeatureSource
from reanchor_jax.training.log import OnStep, ignore_step
from reanchor_jax.training.loss import Vocab, make_vocab
from reanchor_jax.training.mesh import check_rows, num_data_parts, place_network, split_texts
from reanchor_jax.training.run import Run, TrainConfig, check_anchors, check_start
from reanchor_jax.training.step import train_step


def train(
    target: Target,
    start: Drafter,
    texts: Sequence[Text],
    held_out: Sequence[Text],
    config: TrainConfig,
    folder: Path,
    *,
    start_is_scaled: bool = False,
    features_folder: Path | None = None,
    echo: Callable[[str], None] = print,
    on_step: OnStep = ignore_step,
) -> Drafter:
    """Trains a drafter, or resumes the run in `folder`.

    `folder` gets `train.json` (settings), `log.jsonl`, `checkpoints/`, and two drafters in
    their kind's format: `drafter/`, written with each checkpoint, and `best/`, the one of the highest
    held-out proxy tau. On CPU a resumed run gives bit for bit the parameters of one that was
    never stopped. Under `jax.set_mesh` (see `mesh`) texts and weights are split; the run is the same but
    for rounding, and may be resumed on another mesh or on none.

    Args:
      target: frozen; float32 on CPU.
      start: float32 drafter to start from.
      texts: training texts.
      held_out: others, for evaluation.
      config: settings.
      folder: of the run.
      start_is_scaled: whether `start` was made for scaled features (`new_drafter`).
      features_folder: where the target's features are kept (None: in `folder`); runs with one target,
        one set of tapped layers, one `feature_dtype` and as many top tokens (none without `distill`) can share it.
      echo: gets a line now and then.
      on_step: called after each step (`log.OnStep`).

    Returns:
      The drafter, for the target's own features.

    Raises:
      ReanchorError: settings that do not fit, what the mesh does not divide, or a run of other settings in `folder`.
      KeyboardInterrupt: after SIGINT or SIGTERM, once the last step's checkpoint is written.
    """
    config.optimizer.validate()
    check_start(target, start, config.freeze_backbone)
    check_rows(config.num_rows, num_data_parts())
    if config.distill and config.num_top > target.config.vocab_size:
        raise ReanchorError(f"--num-top is {config.num_top}; expected at most the {target.config.vocab_size} tokens")
    target, start = place_network(target), place_network(start)
    batches = make_batches(texts, config.num_rows, config.seed)
    held_out_batches = make_batches(held_out, config.num_rows, 0)
    check_anchors(config.num_anchors, [*batches, *held_out_batches])
    folder.mkdir(parents=True, exist_ok=True)
    dtype = {"compute_dtype": str(target.dtype)}
    settings = {
        **config.result_settings(),
        "drafter": dataclasses.asdict(start.config),
        "texts": digest(texts),
        **dtype,
    }
    check_settings(folder / "train.json", settings, write=False)
    echo(f"{len(texts)} texts in {len(batches)} batches, {len(held_out)} texts held out")
    features = FeatureSource(
        target,
        start.config.target_layer_ids,
        features_folder or folder / "features",
        dtype=config.feature_dtype,
        num_top=config.num_top if config.distill else 0,
    )
    echo(features.check_room([*batches, *held_out_batches]))
    check_settings(folder / "train.json", settings)  # now that the run can start
    features.measure_scale(batches)
    run = _Run(target, start, held_out, features, config, folder, start_is_scaled=start_is_scaled, echo=echo)
    ids = None if config.train_vocab is None else frequent_tokens(texts, config.train_vocab)
    run.batches, run.vocab = batches, make_vocab(target.config.vocab_size, ids)
    return run.finish(on_step)


class _Run(Run):
    batches: list[Batch]
    vocab: Vocab

    def step(self, number: int) -> dict[str, jax.Array]:
        config = self.config
        index = batch_index(number, len(self.batches), config.seed)
        batch, key = self.batches[index], jax.random.fold_in(self.key, number)
        inputs = (self.state, self.target, self.vocab, split_texts(batch), self.features(batch), key)
        labels = {"num_anchors": config.num_anchors, "gamma": config.gamma, "distill": config.distill}
        self.state, loss = train_step(*inputs, **self.settings, **labels)
        return {"loss": loss}
