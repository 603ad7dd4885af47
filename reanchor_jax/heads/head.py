"""What every head does."""

from __future__ import annotations

import abc
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from reanchor_jax.config import DrafterConfig
from reanchor_jax.sampling import sample_tokens, top_tokens
from reanchor_jax.target import Target


class Drafts(NamedTuple):
    """Drafts of A blocks."""

    tokens: jax.Array  # [A, B-1] int32
    logits: jax.Array  # [A, B-1, V] f32, of which each token was chosen; V': those that the head can draft
    confidence: jax.Array | None = None  # [A, B-1] f32 logit of being accepted if those before it are


class Forced(NamedTuple):
    """Blocks whose tokens are known: the logits of draft k are `softcap(hidden @ rows.T) + extra @ extra_rows.T`.

    Kept as factors, so that training can score some tokens only, a chunk of drafts at a time.
    """

    hidden: jax.Array  # [A, B-1, D] the feature that predicts each draft
    rows: jax.Array  # [V, D] LM head; training gives it no gradient
    extra: jax.Array  # [A, B-1, E] what the head adds, given the tokens before; E is 0 for a plain LM head
    extra_rows: jax.Array  # [V, E]
    confidence: jax.Array | None = None  # [A, B-1] f32, as in `Drafts`
    cap: float | None = None  # of the softcap on what the LM head says; None: there is none


class DraftNoise(NamedTuple):
    """What makes the drafts of A blocks random: one of the two; neither for the top tokens."""

    uniform: jax.Array | None = None  # [A, B-1] f32 from [0, 1): sampled on its own (rule `sample`)
    gumbel: jax.Array | None = None  # [A, B-1, V] f32 the target's own noise (rule `coupled`)

    def by_slot(self) -> DraftNoise:
        """Slots first, to scan over."""
        return jax.tree.map(lambda x: x.swapaxes(0, 1), self)


class Head(nnx.Module):
    """Turns block features into drafts, for all blocks of a round at once. T is `DrafterConfig.num_slots`."""

    frozen: ClassVar[tuple[str, ...]] = ()
    """Parameters that training leaves as they are."""

    @abc.abstractmethod
    def __init__(self, config: DrafterConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        """Random weights of the kind of head that `config.head` describes."""

    def embed(self, target: Target, tokens: jax.Array) -> jax.Array:
        """What the backbone reads: embeddings [..., D] of tokens [...] int32."""
        return target.embed(tokens)

    @abc.abstractmethod
    def __call__(
        self, target: Target, hidden: jax.Array, anchors: jax.Array, noise: DraftNoise, temperature: float
    ) -> Drafts:
        """Drafts B-1 tokens behind each anchor.

        Args:
          target: for its embedding and LM head.
          hidden: [A, T, D] the backbone's features of the blocks.
          anchors: [A] int32.
          noise: of the draft rule.
          temperature: what logits are divided by where there is noise.
        """

    @abc.abstractmethod
    def force(self, target: Target, hidden: jax.Array, before: jax.Array) -> Forced:
        """What the head makes of blocks whose tokens are known (teacher forcing).

        Args:
          target: as above.
          hidden: [A, T, D] the backbone's features of the blocks.
          before: [A, B-1] int32 the token before each draft: the anchor, then all drafts but the last.
        """

    def start_from(self, target: Target) -> None:
        """Makes fresh random weights a place to start training: no correction yet, the target's tables."""
        del target


def choose_drafts(logits: jax.Array, noise: DraftNoise, temperature: float) -> jax.Array:
    """Tokens [...] int32 from logits [..., V] and the noise of as many drafts; the lowest id where two are equal."""
    if noise.uniform is not None:
        return sample_tokens(logits / temperature, noise.uniform)
    return top_tokens(logits if noise.gumbel is None else logits / temperature + noise.gumbel)


def linear(x: jax.Array, weight: jax.Array) -> jax.Array:
    """x [..., in] times weight [out, in], float32."""
    return jnp.einsum("...i,oi->...o", x, weight, preferred_element_type=jnp.float32)
