"""The first parameters of a new drafter, or of a new head on an earlier drafter's backbone."""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from reanchor_jax.checkpoint.drafter_config import MAX_BLOCK
from reanchor_jax.config import DrafterConfig, HeadConfig, LayerConfig, LMHeadConfig
from reanchor_jax.drafter import Drafter
from reanchor_jax.errors import ReanchorError
from reanchor_jax.target import Target

Start = Literal["layers", "random"]


def spread_layer_ids(num_layers: int, count: int = 5) -> tuple[int, ...]:
    """Tapped layers, evenly from layer 1 to the third from the end, as z-lab's drafters have them.

    Example: 30 layers, 5 taps: 1, 8, 14, 20, 27. Small targets tap fewer: 6 layers: 1, 2, 3.
    """
    low, high = min(1, num_layers - 1), max(num_layers - 3, min(1, num_layers - 1))
    return tuple(sorted({int(i) for i in np.round(np.linspace(low, high, count))}))


def new_drafter_config(
    target: Target,
    *,
    num_layers: int,
    block_size: int,
    mask_token_id: int,
    target_layer_ids: tuple[int, ...] | None,
) -> DrafterConfig:
    """A drafter of the target's own width.

    Args:
      target: what it will draft for.
      num_layers: drafter layers.
      block_size: B.
      mask_token_id: a token that the target never writes.
      target_layer_ids: tapped layers; None spreads them.

    Raises:
      ReanchorError: a value out of range.
    """
    t = target.config
    ids = spread_layer_ids(t.num_layers) if target_layer_ids is None else target_layer_ids
    for name, got, fine, expected in (
        ("--layers", num_layers, 1 <= num_layers <= 64, "1 to 64"),
        ("--block-size", block_size, 2 <= block_size <= MAX_BLOCK, f"2 to {MAX_BLOCK}"),
        ("--mask-token-id", mask_token_id, 0 <= mask_token_id < t.vocab_size, f"0 to {t.vocab_size - 1}"),
        (
            "--target-layer-ids",
            list(ids),
            len(ids) > 0 and len(set(ids)) == len(ids) and all(0 <= i < t.num_layers for i in ids),
            f"different ids from 0 to {t.num_layers - 1}",
        ),
    ):
        if not fine:
            raise ReanchorError(f"{name} is {got}; expected {expected}")
    return DrafterConfig(
        block_size=block_size,
        mask_token_id=mask_token_id,
        target_layer_ids=ids,
        target_num_layers=t.num_layers,
        vocab_size=t.vocab_size,
        num_layers=num_layers,
        # DFlash's layers are Qwen3's, whatever the target's.
        layer=LayerConfig(
            hidden_size=t.layer.hidden_size,
            intermediate_size=t.layer.intermediate_size,
            num_heads=t.layer.num_heads,
            num_kv_heads=t.layer.num_kv_heads,
            head_dim=t.layer.head_dim,
            rms_norm_eps=t.layer.rms_norm_eps,
            rope=t.layer.rope,
            qk_norm=True,
            attention_bias=t.layer.attention_bias,
        ),
        head=LMHeadConfig(),
    )


def with_head(target: Target, drafter: Drafter, head: HeadConfig, seed: int) -> Drafter:
    """The drafter's backbone under a fresh head, which starts without corrections (float32).

    Raises:
      ReanchorError: a drafter with another head, or with an embedding or LM head of its own.
    """
    if drafter.config.head != LMHeadConfig():
        raise ReanchorError(
            f"--head needs the backbone of a DFlash drafter without other weights, got {drafter.config.head}"
        )
    config = dataclasses.replace(drafter.config, head=head)
    fresh = Drafter(config, dtype=jnp.float32, rngs=nnx.Rngs(seed))
    fresh.head.start_from(target)
    for name in ("fc", "hidden_norm", "layers", "norm"):
        setattr(fresh, name, jax.tree.map(lambda x: x.astype(jnp.float32), getattr(drafter, name)))
    return fresh


def new_drafter(target: Target, config: DrafterConfig, start: Start, seed: int) -> Drafter:
    """A drafter to train from, float32, for *scaled* features (see `features`).

    `layers` copies the target's last layers and lets `fc` pass the last tapped feature on.
    A context key is `k_proj @ hidden_norm(fc @ features)`, without the layer's input norm, but a
    block token's goes through that norm: the copied norms are folded into the matrices behind
    them, so that both ways start with the target's own projections.
    """
    drafter = Drafter(config, dtype=jnp.float32, rngs=nnx.Rngs(seed))
    if start == "random":
        return drafter
    if target.config.layer.sandwich_norms:
        raise ReanchorError(
            f"--start is layers and the target is {target.config.model_type}, whose layers are not a drafter's; "
            "expected llama or qwen3: use --start random"
        )
    if config.num_layers > target.config.num_layers:
        raise ReanchorError(
            f"--layers is {config.num_layers}; expected at most the target's {target.config.num_layers}, "
            "or use --start random"
        )
    width = config.layer.hidden_size
    drafter.fc = nnx.Param(jnp.zeros_like(drafter.fc[...]).at[:, -width:].set(jnp.eye(width)))
    drafter.norm = nnx.Param(target.final_norm[...].astype(jnp.float32))
    last = jax.tree.map(lambda w: w[-config.num_layers :].astype(jnp.float32), target.layers[0])
    layers = drafter.layers
    attention_norm, mlp_norm = last.input_norm[...][:, None, :], last.pre_mlp_norm[...][:, None, :]
    for name in ("q_proj", "k_proj", "v_proj"):
        setattr(layers, name, nnx.Param(getattr(last, name)[...] * attention_norm))
    for name in ("gate_proj", "up_proj"):
        setattr(layers, name, nnx.Param(getattr(last, name)[...] * mlp_norm))
    for name in ("o_proj", "down_proj"):
        setattr(layers, name, nnx.Param(getattr(last, name)[...]))
    if last.q_norm is not None and last.k_norm is not None:
        layers.q_norm, layers.k_norm = nnx.Param(last.q_norm[...]), nnx.Param(last.k_norm[...])
    return drafter
