"""DSpark's head: own embedding and LM head, a Markov correction, a confidence (paper, algorithm 2).

Backbone and LM head have run once for the whole block. What the token before a slot says about the
slot is a low-rank matrix ("vanilla"), gated by the slot's feature ("gated"), or the output of a
small recurrent network ("rnn"). Only that part is sequential, for all blocks at once.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from reanchor_jax.config import DrafterConfig, DSparkConfig
from reanchor_jax.heads.head import DraftNoise, Drafts, Forced, Head, choose_drafts, linear
from reanchor_jax.target import Target, scale_embedding, softcap


class DSparkHead(Head):
    """Slot k of the block predicts the token at position k + 1, so B-1 slots make B-1 drafts.

    With r the rank of the correction: `embedding` and `lm_head` [V, D], `markov_in` and `markov_out`
    [V, r], `mix` [r, D+r] of "gated", [3r, 2r+D] of "rnn", `confidence` [1, D] or [1, D+r].
    """

    frozen = ("embedding", "lm_head")

    def __init__(self, config: DrafterConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        assert isinstance(config.head, DSparkConfig)
        self.config = config.head
        vocab_size, width, rank = config.vocab_size, config.layer.hidden_size, self.config.markov_rank

        def matrix(rows: int, cols: int) -> nnx.Param:
            return nnx.Param(jax.random.normal(rngs(), (rows, cols), dtype) * cols**-0.5)

        def zeros(size: int) -> nnx.Param:
            return nnx.Param(jnp.zeros(size, dtype))

        self.embedding = matrix(vocab_size, width)
        self.lm_head = matrix(vocab_size, width)
        self.markov_in = matrix(vocab_size, rank) if rank else None
        self.markov_out = matrix(vocab_size, rank) if rank else None
        rows, cols = {"gated": (rank, width + rank), "rnn": (3 * rank, 2 * rank + width)}.get(
            self.config.markov_head_type or "", (0, 0)
        )
        self.mix = matrix(rows, cols) if rows else None
        self.mix_bias = zeros(rows) if rows else None
        has_confidence, inputs = self.config.enable_confidence_head, width + self.config.confidence_rank
        self.confidence = matrix(1, inputs) if has_confidence else None
        self.confidence_bias = zeros(1) if has_confidence else None

    def embed(self, target: Target, tokens: jax.Array) -> jax.Array:
        return scale_embedding(self.embedding[...][tokens], self.config.scaled_embedding)

    def __call__(
        self, target: Target, hidden: jax.Array, anchors: jax.Array, noise: DraftNoise, temperature: float
    ) -> Drafts:
        hidden = hidden.swapaxes(0, 1)  # slots first, to scan over: here, where a copy is small
        base = softcap(linear(hidden, self.lm_head[...]), self.config.logit_softcap)  # [B-1, A, V]

        def draft_slot(carry, slot):
            state, token = carry
            base, hidden, noise = slot
            factor, state = self.factor(state, token, hidden)
            logits = base if self.markov_out is None else base + linear(factor, self.markov_out[...])
            token = choose_drafts(logits, noise, temperature)
            return (state, token), (token, logits)

        state = jnp.zeros((anchors.shape[0], self.config.markov_rank), jnp.float32)
        slots = (base, hidden, noise.by_slot())
        _, (tokens, logits) = jax.lax.scan(draft_slot, (state, anchors), slots)
        before = jnp.concatenate([anchors[None], tokens[:-1]])
        confidence = None if self.confidence is None else self.confide(before, hidden).T
        temperatures = self.config.confidence_temperatures
        if confidence is not None and temperatures is not None:
            confidence = confidence / jnp.asarray(temperatures, jnp.float32)[None]
        return Drafts(tokens.T, logits.swapaxes(0, 1), confidence)

    def force(self, target: Target, hidden: jax.Array, before: jax.Array) -> Forced:
        def read_slot(state, slot):
            factor, state = self.factor(state, *slot)
            return state, factor

        state = jnp.zeros((before.shape[0], self.config.markov_rank), jnp.float32)
        _, factors = jax.lax.scan(read_slot, state, (before.T, hidden.swapaxes(0, 1)))
        rows = self.lm_head[...]
        # What the confidence learns must not pull the backbone away from what it drafts. (The correction's
        # table, which it reads too, it may move.)
        confidence = None if self.confidence is None else self.confide(before, jax.lax.stop_gradient(hidden))
        extra_rows = rows[:, :0] if self.markov_out is None else self.markov_out[...]
        return Forced(hidden, rows, factors.swapaxes(0, 1), extra_rows, confidence, self.config.logit_softcap)

    def start_from(self, target: Target) -> None:
        self.embedding = nnx.Param(target.embedding[...].astype(jnp.float32))
        self.lm_head = nnx.Param(target.head_rows.astype(jnp.float32))
        if self.markov_out is not None:
            self.markov_out = nnx.Param(jnp.zeros_like(self.markov_out[...]))

    def factor(self, state: jax.Array, before: jax.Array, hidden: jax.Array) -> tuple[jax.Array, jax.Array]:
        """What `markov_out` turns into a slot's correction, [A, r], and the next state [A, r] f32.

        Args:
          state: [A, r] f32; only "rnn" has one.
          before: [A] int32 token before the slot.
          hidden: [A, D] the slot's feature.
        """
        if self.markov_in is None:
            return hidden[:, :0], state
        row = self.markov_in[...][before]
        kind, factor = self.config.markov_head_type, row.astype(jnp.float32)
        if kind == "gated":
            factor = jax.nn.sigmoid(self._mix(hidden, row)) * factor
        elif kind == "rnn":
            keep, new, out = jnp.split(self._mix(state.astype(hidden.dtype), row, hidden), 3, axis=-1)
            keep = jax.nn.sigmoid(keep)
            state = keep * state + (1 - keep) * jnp.tanh(new)
            factor = jnp.tanh(out)
        return factor.astype(hidden.dtype), state

    def confide(self, before: jax.Array, hidden: jax.Array) -> jax.Array:
        """Logits [...] f32 of drafts being accepted if those before them are.

        Args:
          before: [...] int32 token before each slot.
          hidden: [..., D] the slots' features.
        """
        assert self.confidence is not None and self.confidence_bias is not None
        if self.markov_in is not None and self.config.confidence_head_with_markov:
            hidden = jnp.concatenate([hidden, self.markov_in[...][before]], axis=-1)
        return linear(hidden, self.confidence[...])[..., 0] + self.confidence_bias[...].astype(jnp.float32)[0]

    def _mix(self, *inputs: jax.Array) -> jax.Array:
        assert self.mix is not None and self.mix_bias is not None
        return linear(jnp.concatenate(inputs, axis=-1), self.mix[...]) + self.mix_bias[...].astype(jnp.float32)[None]
