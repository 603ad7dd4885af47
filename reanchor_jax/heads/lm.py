"""DFlash's head: the target's LM head, every slot on its own."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from reanchor_jax.config import DrafterConfig
from reanchor_jax.heads.head import Drafts, Forced, Head, choose_drafts
from reanchor_jax.target import Target


class LMHead(Head):
    """Slot k of the block predicts the token at position k; the anchor's slot predicts nothing."""

    def __init__(self, config: DrafterConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        del config, dtype, rngs  # no weights of its own

    def __call__(
        self, target: Target, hidden: jax.Array, anchors: jax.Array, noise: jax.Array | None, temperature: float
    ) -> Drafts:
        del anchors
        logits = target.logits(hidden[:, 1:])
        return Drafts(choose_drafts(logits, noise, temperature), logits)

    def force(self, target: Target, hidden: jax.Array, before: jax.Array) -> Forced:
        hidden, rows = hidden[:, 1:], target.head_rows
        return Forced(hidden, rows, hidden[..., :0], rows[:, :0])
