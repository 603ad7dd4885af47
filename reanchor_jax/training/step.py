"""The compiled programs of a training run: pure functions, all settings static arguments."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax

from reanchor_jax.drafter import Drafter
from reanchor_jax.target import Target
from reanchor_jax.training.blocks import Batch
from reanchor_jax.training.evaluate import HeldOut, held_out_sums
from reanchor_jax.training.features import TextFeatures
from reanchor_jax.training.loss import Vocab, block_loss
from reanchor_jax.training.mesh import keep_split
from reanchor_jax.training.optimizer import OptimizerConfig, make_optimizer, update
from reanchor_jax.training.trainable import computing, is_trained


class TrainState(NamedTuple):
    """What a checkpoint holds. The drafter is the one for scaled features."""

    drafter: Drafter
    opt_state: Any


@partial(jax.jit, static_argnames=("optimizer", "freeze_backbone"))
def init_optimizer(drafter: Drafter, *, optimizer: OptimizerConfig, freeze_backbone: bool = False) -> Any:
    """Moments of the drafter's trained parameters, and of nothing else."""
    params: Any = drafter  # optax names no modules among its pytrees
    return keep_split(make_optimizer(optimizer, is_trained(drafter, freeze_backbone)).init(params), drafter)


@partial(
    jax.jit,
    static_argnames=("optimizer", "num_anchors", "gamma", "distill", "freeze_backbone"),
    donate_argnames="state",
)
def train_step(
    state: TrainState,
    target: Target,
    vocab: Vocab,
    batch: Batch,
    text: TextFeatures,
    key: jax.Array,
    *,
    optimizer: OptimizerConfig,
    num_anchors: int,
    gamma: float,
    distill: float = 0.0,
    freeze_backbone: bool = False,
) -> tuple[TrainState, jax.Array]:
    """One optimizer step, and its loss; arguments as in `block_loss`. The state is donated."""
    sizes = {"num_anchors": num_anchors, "gamma": gamma, "distill": distill}
    loss_of = partial(block_loss, **sizes, freeze_backbone=freeze_backbone)
    loss, gradient = jax.value_and_grad(loss_of)(state.drafter, target, vocab, batch, text, key)
    transform = make_optimizer(optimizer, is_trained(state.drafter, freeze_backbone))
    drafter, opt_state = update(transform, gradient, state.opt_state, state.drafter)
    return keep_split(TrainState(drafter, opt_state), state.drafter), loss


@partial(jax.jit, static_argnames=("num_anchors", "gamma"))
def evaluate_batch(
    drafter: Drafter, target: Target, vocab: Vocab, batch: Batch, features: jax.Array, key: jax.Array,
    *, num_anchors: int, gamma: float,
) -> HeldOut:  # fmt: skip
    """`held_out_sums`, compiled."""
    drafter = computing(drafter, target.dtype)
    return held_out_sums(drafter, target, vocab, batch, features, key, num_anchors=num_anchors, gamma=gamma)
