"""DFlash's head: an LM head over every slot on its own; the target's, or the drafter's own."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from reanchor_jax.config import DrafterConfig, LMHeadConfig
from reanchor_jax.heads.head import DraftNoise, Drafts, Forced, Head, choose_drafts, linear
from reanchor_jax.target import Target


class LMHead(Head):
    """Slot k of the block predicts the token at position k; the anchor's slot predicts nothing.

    Most drafters have no weights here. Some have, each on its own: `embedding` [V, D], an `lm_head`
    [V', D] over V' tokens, with V' < V `target_ids` [V'] int32, which say what they are for the
    target (rising), and `mask_embedding` [D], read at mask positions.
    """

    frozen = ("embedding", "lm_head")

    def __init__(self, config: DrafterConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        assert isinstance(config.head, LMHeadConfig)
        self.config = config.head
        self.mask_token_id = config.mask_token_id
        vocab_size, width, num_drafted = config.vocab_size, config.layer.hidden_size, self.config.draft_vocab_size

        def matrix(rows: int) -> nnx.Param:
            return nnx.Param(jax.random.normal(rngs(), (rows, width), dtype) * width**-0.5)

        self.embedding = matrix(vocab_size) if self.config.own_embedding else None
        self.lm_head = None if num_drafted is None else matrix(num_drafted)
        is_mapped = num_drafted is not None and num_drafted < vocab_size
        self.target_ids = nnx.Param(jnp.arange(num_drafted, dtype=jnp.int32)) if is_mapped else None
        self.mask_embedding = nnx.Param(jnp.zeros(width, dtype)) if self.config.mask_embedding else None

    def embed(self, target: Target, tokens: jax.Array) -> jax.Array:
        x = target.embed(tokens) if self.embedding is None else self.embedding[...][tokens]
        if self.mask_embedding is None:
            return x
        row = self.mask_embedding[...].astype(x.dtype)
        return jnp.where((tokens == self.mask_token_id)[..., None], jnp.broadcast_to(row, x.shape), x)

    def __call__(
        self, target: Target, hidden: jax.Array, anchors: jax.Array, noise: DraftNoise, temperature: float
    ) -> Drafts:
        del anchors
        hidden = hidden[:, 1:]
        logits = target.logits(hidden) if self.lm_head is None else linear(hidden, self.lm_head[...])
        if self.target_ids is None:
            return Drafts(choose_drafts(logits, noise, temperature), logits)
        ids = self.target_ids[...]
        if noise.gumbel is not None:
            # It belongs to target tokens: the drafted ones take theirs along, [A, B-1, V'].
            noise = DraftNoise(gumbel=noise.gumbel[..., ids])
        chosen = choose_drafts(logits, noise, temperature)
        return Drafts(ids[chosen], logits)

    def force(self, target: Target, hidden: jax.Array, before: jax.Array) -> Forced:
        assert self.target_ids is None  # the trainer has refused such a drafter
        hidden, rows = hidden[:, 1:], target.head_rows if self.lm_head is None else self.lm_head[...]
        cap = target.config.logit_softcap if self.lm_head is None else None
        return Forced(hidden, rows, hidden[..., :0], rows[:, :0], cap=cap)
