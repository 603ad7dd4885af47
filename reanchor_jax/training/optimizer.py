"""AdamW with warm-up, cosine decay and gradient clipping."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import optax

from reanchor_jax.errors import ReanchorError


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Optimizer settings; the schedule is a function of the step alone."""

    steps: int
    learning_rate: float
    warmup: int
    """Steps of linear growth from 0."""
    final_ratio: float = 0.05
    """Learning rate at the end, as a share of the peak."""
    weight_decay: float = 0.01
    """Of matrices; norm weights and biases are never decayed."""
    clip: float = 1.0
    """Largest global norm of a gradient."""
    b2: float = 0.98

    def validate(self) -> None:
        """Raises ReanchorError for values out of range."""
        for name, got, fine, expected in (
            ("--steps", self.steps, self.steps >= 1, "at least 1"),
            ("--learning-rate", self.learning_rate, 0 < self.learning_rate < 1, "a number above 0 and below 1"),
            ("--warmup", self.warmup, 0 <= self.warmup < max(self.steps, 1), f"0 to {self.steps - 1}, below --steps"),
            ("--weight-decay", self.weight_decay, 0 <= self.weight_decay < 1, "a number from 0, below 1"),
        ):
            if not fine:
                raise ReanchorError(f"{name} is {got}; expected {expected}")


def make_schedule(config: OptimizerConfig) -> optax.Schedule:
    """Learning rate of a step."""
    return optax.warmup_cosine_decay_schedule(
        init_value=0.0 if config.warmup else config.learning_rate,
        peak_value=config.learning_rate,
        warmup_steps=config.warmup,
        decay_steps=config.steps,
        end_value=config.learning_rate * config.final_ratio,
    )


def make_optimizer(config: OptimizerConfig, trained: Any) -> optax.GradientTransformation:
    """The optimizer; moments have the parameters' dtype, float32 in training.

    Args:
      config: settings.
      trained: for each parameter whether it is trained; the others have no moments and stay as they are.
    """
    transform = optax.chain(
        optax.clip_by_global_norm(config.clip),
        optax.adamw(make_schedule(config), b1=0.9, b2=config.b2, weight_decay=config.weight_decay, mask=_is_matrix),
    )
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
