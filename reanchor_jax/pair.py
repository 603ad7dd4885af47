"""A target and its drafter, as one pytree that jitted functions take as an argument."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from reanchor_jax.checkpoint import load_drafter, load_target
from reanchor_jax.config import DecodeConfig, DrafterConfig
from reanchor_jax.default_pair import DEFAULT_PAIR, drafter_source, target_source
from reanchor_jax.drafter import Drafter
from reanchor_jax.errors import ReanchorError
from reanchor_jax.target import Target


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pair:
    """Networks of a decoding run. `drafter` is None where only plain decoding is wanted."""

    target: Target
    drafter: Drafter | None


def block_size(pair: Pair, config: DecodeConfig) -> int:
    """B: the drafter's block size, or 1 for plain decoding."""
    if config.method == "ar":
        return 1
    if pair.drafter is None:
        raise ReanchorError(f"method {config.method} needs a drafter and the pair has none; load one or use ar")
    return pair.drafter.config.block_size


def tap_ids(pair: Pair, config: DecodeConfig) -> tuple[int, ...]:
    """Target layers whose outputs are the drafter's features; none for plain decoding."""
    return () if config.method == "ar" or pair.drafter is None else pair.drafter.config.target_layer_ids


def check_config(pair: Pair, config: DecodeConfig) -> None:
    """Raises ReanchorError where a field is out of range, or asks for what the drafter does not have."""
    config.validate(block_size(pair, config))
    if config.method != "ar" and config.schedule == "hardware" and config.costs is None:
        raise ReanchorError("costs is None; expected what schedule hardware weighs: see reanchor_jax.profile")
    if pair.drafter is not None:
        check_schedule(pair.drafter.config, config)


def check_schedule(drafter: DrafterConfig, config: DecodeConfig) -> None:
    """Raises ReanchorError where a schedule needs a confidence and the drafter has none."""
    if config.method != "ar" and config.schedule != "none" and not drafter.has_confidence:
        raise ReanchorError(
            f"schedule is {config.schedule} and the drafter has no confidence head; expected a DSpark drafter "
            "with one, or schedule none"
        )


def check_pair(target: Target, drafter: Drafter) -> None:
    """Raises ReanchorError where the drafter does not fit the target."""
    t, d = target.config, drafter.config

    def need(fine: bool, what: str, got: object, expected: object) -> None:
        if not fine:
            raise ReanchorError(
                f"the drafter does not fit the target: {what} is {got}, expected {expected}; "
                "use the drafter that was trained for this target"
            )

    need(d.layer.hidden_size == t.layer.hidden_size, "hidden_size", d.layer.hidden_size, t.layer.hidden_size)
    need(d.vocab_size == t.vocab_size, "vocab_size", d.vocab_size, t.vocab_size)
    if d.target_num_layers is not None:
        need(d.target_num_layers == t.num_layers, "num_target_layers", d.target_num_layers, t.num_layers)
    for layer_id in d.target_layer_ids:
        need(0 <= layer_id < t.num_layers, "a target_layer_ids entry", layer_id, f"0 to {t.num_layers - 1}")
    need(0 <= d.mask_token_id < t.vocab_size, "mask_token_id", d.mask_token_id, f"0 to {t.vocab_size - 1}")


def load_pair(
    target: str = DEFAULT_PAIR,
    drafter: str | None = None,
    *,
    dtype: jnp.dtype = jnp.float32,
    revision: str | None = None,
    mesh: Mesh | None = None,
    axis: str = "model",
) -> Pair:
    """Loads a target and a drafter that fits it.

    Args:
      target: hub id, folder (converted or not), GGUF file, or the default pair's name.
      drafter: hub id, folder (converted or not), or the default pair's name; None takes the default pair's drafter
        where the target is the default pair's, and no drafter otherwise.
      dtype: of parameters and activations.
      revision: hub revision of both.
      mesh: lays the weights over its axis `axis`, as `shard_pair` does; each device's part is read
        by itself. None: all on the default device.
      axis: name of the mesh axis.

    Raises:
      ReanchorError: something is missing, corrupt, not supported, or does not fit.
    """
    if drafter is None and target == DEFAULT_PAIR:
        drafter = DEFAULT_PAIR
    loaded_drafter = None
    if drafter is not None:
        loaded_drafter = load_drafter(drafter_source(drafter), dtype=dtype, revision=revision, mesh=mesh, axis=axis)
    loaded_target = load_target(target_source(target), dtype=dtype, revision=revision, mesh=mesh, axis=axis)
    if loaded_drafter is not None:
        check_pair(loaded_target, loaded_drafter)
    return Pair(loaded_target, loaded_drafter)
