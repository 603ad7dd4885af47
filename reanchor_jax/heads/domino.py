"""Domino's head: the target's LM head, corrected by what has been drafted before (paper, algorithm 3).

Backbone and LM head have run once for the whole block. A small recurrent network (GRU) reads the
block's tokens as they are chosen; a low-rank map of its state and the slot's feature is added to
the slot's logits. Only that part is sequential, over B-1 slots, for all blocks at once.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from reanchor_jax.config import DominoConfig, DrafterConfig
from reanchor_jax.heads.head import DraftNoise, Drafts, Forced, Head, choose_drafts, linear
from reanchor_jax.target import Target


class DominoHead(Head):
    """Weights keep the checkpoint's [out, in] orientation; GRU rows are in torch's order r, z, n.

    With G the GRU's width, E the rank of the correction: `gru_ih` [3G, D], `gru_hh` [3G, G],
    `proj_in` [E, D+G], `proj_out` [V, E].
    """

    def __init__(self, config: DrafterConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        assert isinstance(config.head, DominoConfig)
        self.config = config.head
        width, gru, rank = config.layer.hidden_size, self.config.gru_hidden_dim, self.config.emb_dim

        def matrix(rows: int, cols: int) -> nnx.Param:
            return nnx.Param(jax.random.normal(rngs(), (rows, cols), dtype) * cols**-0.5)

        self.gru_ih = matrix(3 * gru, width)
        self.gru_hh = matrix(3 * gru, gru)
        self.proj_in = matrix(rank, width + gru)
        self.proj_out = matrix(config.vocab_size, rank)

    def __call__(
        self, target: Target, hidden: jax.Array, anchors: jax.Array, noise: DraftNoise, temperature: float
    ) -> Drafts:
        num_blocks, block_size, width = hidden.shape
        hidden = self._predicting(hidden).swapaxes(0, 1)  # slots first, to scan over: here, where a copy is small
        base = target.logits(hidden)  # [B-1, A, V]
        hidden_in, state_in = self.proj_in[...][:, :width], self.proj_in[...][:, width:]
        from_hidden = linear(hidden, hidden_in)  # [B-1, A, E] f32

        def draft_slot(carry, slot):
            state, token = carry  # state [A, G] has read the tokens before `token` [A]
            k, base, from_hidden, noise = slot
            state = self.read(state, target.embed(token))
            inner = jax.nn.silu(from_hidden + linear(state.astype(hidden.dtype), state_in))
            correction = linear(inner.astype(hidden.dtype), self.proj_out[...])  # [A, V] f32
            logits = jnp.where(k > self.config.pure_draft_prefix_len, base + correction, base)
            token = choose_drafts(logits, noise, temperature)
            return (state, token), (token, logits)

        first = jnp.zeros((num_blocks, self.config.gru_hidden_dim), jnp.float32)
        slots = (jnp.arange(1, block_size), base, from_hidden, noise.by_slot())
        _, (tokens, logits) = jax.lax.scan(draft_slot, (first, anchors), slots)
        return Drafts(tokens.T, logits.swapaxes(0, 1))

    def force(self, target: Target, hidden: jax.Array, before: jax.Array) -> Forced:
        hidden = self._predicting(hidden)

        def read_slot(state, token):
            state = self.read(state, target.embed(token))
            return state, state

        first = jnp.zeros((before.shape[0], self.config.gru_hidden_dim), jnp.float32)
        _, states = jax.lax.scan(read_slot, first, before.T)  # [B-1, A, G]
        inputs = jnp.concatenate([hidden, states.swapaxes(0, 1).astype(hidden.dtype)], axis=-1)
        inner = jax.nn.silu(linear(inputs, self.proj_in[...])).astype(hidden.dtype)
        corrected = jnp.arange(1, before.shape[1] + 1) > self.config.pure_draft_prefix_len
        inner = jnp.where(corrected[None, :, None], inner, 0)
        return Forced(hidden, target.head_rows, inner, self.proj_out[...], cap=target.config.logit_softcap)

    def start_from(self, target: Target) -> None:
        self.proj_out = nnx.Param(jnp.zeros_like(self.proj_out[...]))

    def _predicting(self, hidden: jax.Array) -> jax.Array:
        """The features [A, B-1, D] that predict drafts 1 .. B-1: their own slots', with `shift_label` those before."""
        return hidden[:, :-1] if self.config.shift_label else hidden[:, 1:]

    def read(self, state: jax.Array, x: jax.Array) -> jax.Array:
        """The GRU's next state [A, G] f32, from its state [A, G] f32 and embeddings x [A, D]."""
        in_r, in_z, in_n = jnp.split(linear(x, self.gru_ih[...]), 3, axis=-1)
        old_r, old_z, old_n = jnp.split(linear(state.astype(x.dtype), self.gru_hh[...]), 3, axis=-1)
        reset, update = jax.nn.sigmoid(in_r + old_r), jax.nn.sigmoid(in_z + old_z)
        new = jnp.tanh(in_n + reset * old_n)
        return (1 - update) * new + update * state
