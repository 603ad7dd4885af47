"""AdamW with warm-up, cosine decay, gradient clipping and gradient accumulation."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

from reanchor_jax.errors import ReanchorError


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Optimizer settings; the schedule is a function of the step alone.

    With `accumulate` = N, every Nth step updates the parameters, by the mean gradient of N steps.
    Example: 12 steps, warmup 4, accumulate 4: three updates, the first at learning rate 0.
    """

    steps: int
    """Steps, of one batch each."""
    learning_rate: float
    warmup: int
    """Steps of linear growth from 0; whole updates, rounded up."""
    accumulate: int = 1
    """N: steps of an update."""
    final_ratio: float = 0.05
    """Learning rate at the end, as a share of the peak."""
    weight_decay: float = 0.01
    """Of matrices; norm weights and biases are never decayed."""
    clip: float = 1.0
    """Largest global norm of a gradient."""
    b2: float = 0.98

    @property
    def updates(self) -> int:
        """Updates of all steps."""
        return self.steps // self.accumulate

    def validate(self) -> None:
        """Raises ReanchorError for values out of range."""
        n = self.accumulate
        last = self.steps - n  # behind these many steps there still is an update
        for name, got, fine, expected in (
            ("--accumulate", n, n >= 1, "at least 1"),
            ("--steps", self.steps, self.steps >= 1, "at least 1"),
            ("--steps", self.steps, n < 1 or self.steps % n == 0, f"a multiple of --accumulate, {n}"),
            ("--learning-rate", self.learning_rate, 0 < self.learning_rate < 1, "a number above 0 and below 1"),
            ("--warmup", self.warmup, 0 <= self.warmup <= last, f"0 to {last}: an update must be left of --steps"),
            ("--weight-decay", self.weight_decay, 0 <= self.weight_decay < 1, "a number from 0, below 1"),
        ):
            if not fine:
                raise ReanchorError(f"{name} is {got}; expected {expected}")


def make_schedule(config: OptimizerConfig) -> optax.Schedule:
    """Learning rate of an update."""
    return optax.warmup_cosine_decay_schedule(
        init_value=0.0 if config.warmup else config.learning_rate,
        peak_value=config.learning_rate,
        warmup_steps=-(-config.warmup // config.accumulate),
        decay_steps=config.updates,
        end_value=config.learning_rate * config.final_ratio,
    )


def learning_rate(config: OptimizerConfig, step: int) -> float:
    """Learning rate at step `step`, from 0, to 6 digits."""
    with jax.numpy_dtype_promotion("standard"):  # see `update`
        return float(f"{jnp.asarray(make_schedule(config)(step // config.accumulate)).item():.6g}")


def make_optimizer(config: OptimizerConfig, trained: Any) -> optax.GradientTransformation:
    """The optimizer; moments and the accumulated gradient have the parameters' dtype, float32 in training.

    The norm that is clipped is that of the mean gradient of an update.

    Args:
      config: settings.
      trained: for each parameter whether it is trained; the others have no moments and stay as they are.
    """
    transform = optax.chain(
        optax.clip_by_global_norm(config.clip),
        optax.adamw(make_schedule(config), b1=0.9, b2=config.b2, weight_decay=config.weight_decay, mask=_is_matrix),
    )
    if config.accumulate > 1:
        # Its state counts the steps towards the next update, so that a run resumes between two updates too.
        transform = optax.MultiSteps(transform, config.accumulate).gradient_transformation()
    labels = jax.tree.map(lambda t: "trained" if t else "frozen", trained)
    # In a function, since a tree of labels that is a module is callable itself.
    return optax.partition({"trained": transform, "frozen": optax.set_to_zero()}, lambda _: labels)


def _is_matrix(params: Any) -> Any:
    """True for every leaf whose name says neither `norm` nor `bias`."""

    def is_matrix(path: Any, _: Any) -> bool:
        name = jax.tree_util.keystr(path[-2:])
        return "norm" not in name and "bias" not in name

    return jax.tree_util.tree_map_with_path(is_matrix, params)


def update(optimizer: optax.GradientTransformation, gradient: Any, opt_state: Any, params: Any) -> tuple[Any, Any]:
    """New parameters and optimizer state."""
    # optax itself mixes integer step counts and floats, which strict promotion would refuse.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        updates, opt_state = optimizer.update(gradient, opt_state, params)
        return optax.apply_updates(params, updates), opt_state
