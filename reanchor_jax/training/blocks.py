"""Training blocks: what inference would draft at random places of a known text.

Inference with the anchor at position i has committed positions < i: the drafter sees their
features, the anchor's token and B - 1 masks, and should draft tokens i+1 .. i+B-1. Training
computes exactly that, with the drafter's own forward, for several anchors of one text at once.
No block sees another, so they share the context's keys and values and differ in `cache_len`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from reanchor_jax.cache import init_cache
from reanchor_jax.drafter import Drafter
from reanchor_jax.heads import Forced
from reanchor_jax.target import Target


class Batch(NamedTuple):
    """Texts of one step, padded to one length."""

    tokens: Any  # [R, T] int32
    prompt_lens: Any  # [R] int32
    lengths: Any  # [R] int32 prompt and answer; 0 for an empty row


class Blocks(NamedTuple):
    """Blocks in training, n = R*K of them."""

    forced: Forced
    """What the head makes of them, the tokens before each draft being the text's."""
    labels: jax.Array  # [n, B-1] int32 what they should draft
    valid: jax.Array  # [n, B-1] bool, whether that exists
    places: jax.Array  # [n, B-1] int32 where in the text it stands


class Anchors(NamedTuple):
    """Anchor positions in one text."""

    positions: jax.Array  # [K] int32
    valid: jax.Array  # [K] bool, False where the text has fewer places than K


def sample_anchors(key: jax.Array, prompt_len: jax.Array, length: jax.Array, size: int, num_anchors: int) -> Anchors:
    """Draws anchors without replacement among the answer's tokens that have a successor.

    Example: prompt of 5 tokens and 4 of answer, length 9: anchors can stand at 5, 6 and 7. In
    inference the first anchor is the answer's first token, at position `prompt_len`.

    Args:
      key: PRNG key.
      prompt_len: () int32.
      length: () int32 tokens of prompt and answer.
      size: T, padded length (static).
      num_anchors: K (static).
    """
    positions = jnp.arange(size)
    possible = (positions >= prompt_len) & (positions < length - 1)
    score = jnp.where(possible, jax.random.uniform(key, (size,)), -1.0)
    top, anchors = jax.lax.top_k(score, num_anchors)
    return Anchors(anchors.astype(jnp.int32), top >= 0)


def block_labels(
    tokens: jax.Array, length: jax.Array, anchors: Anchors, block_size: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The tokens that each block should draft, which of them exist, and where: three [K, B-1] arrays.

    Slot k - 1 holds the token at anchor + k. Example, B = 4, length 9, anchor 6: the tokens at
    7 and 8, and a third that is masked.
    """
    places = anchors.positions[:, None] + jnp.arange(1, block_size)[None, :]
    valid = (places < length) & anchors.valid[:, None]
    places = jnp.minimum(places, tokens.shape[0] - 1)
    return tokens[places], valid, places


def block_hidden(
    target: Target, drafter: Drafter, tokens: jax.Array, features: jax.Array, positions: jax.Array
) -> jax.Array:
    """Drafter features [K, T, D] behind K anchors of one text, T being `DrafterConfig.num_slots`.

    Args:
      target: gives the embedding, where the head has none; no gradient flows into it.
      drafter: the network in training.
      tokens: [T] int32 text.
      features: [T, C*D] the target's features of the text.
      positions: [K] int32 anchors.
    """
    config = drafter.config
    context = drafter.context(features.astype(drafter.fc[...].dtype), jnp.arange(tokens.shape[0]))
    no_suffix = init_cache(config.layer, config.num_layers, 0, context.k.dtype)
    masks = jnp.full((positions.shape[0], config.num_slots - 1), config.mask_token_id, jnp.int32)
    x = drafter.head.embed(target, jnp.concatenate([tokens[positions][:, None], masks], axis=1))  # [K, T, D]

    def draft_one(x: jax.Array, anchor: jax.Array) -> jax.Array:
        # cache_len = anchor: the anchor's own features do not exist yet, as in inference.
        places = anchor + jnp.arange(config.num_slots)
        return drafter(x, places, context, anchor, no_suffix, jnp.int32(0))

    return jax.vmap(draft_one)(x, positions)


def random_blocks(
    target: Target, drafter: Drafter, batch: Batch, features: jax.Array, key: jax.Array, num_anchors: int
) -> Blocks:
    """Blocks behind K random anchors of every text, R*K in all; see `block_hidden` and `block_labels`.

    Args:
      target: frozen.
      drafter: the network in training.
      batch: R texts.
      features: [R, T, C*D] the target's features of the texts.
      key: PRNG key of the anchors.
      num_anchors: K (static); in a batch of shorter texts, their padded length is.
    """
    num_rows, size = batch.tokens.shape
    num_anchors = min(num_anchors, size)

    def one_text(key, tokens, features, prompt_len, length):
        anchors = sample_anchors(key, prompt_len, length, size, num_anchors)
        labels, valid, places = block_labels(tokens, length, anchors, drafter.config.block_size)
        before = jnp.concatenate([tokens[anchors.positions][:, None], labels[:, :-1]], axis=1)
        return block_hidden(target, drafter, tokens, features, anchors.positions), before, labels, valid, places

    keys = jax.random.split(key, num_rows)
    blocks = jax.vmap(one_text)(keys, batch.tokens, features, batch.prompt_lens, batch.lengths)
    hidden, before, *rest = (x.reshape(-1, *x.shape[2:]) for x in blocks)
    return Blocks(drafter.head.force(target, hidden, before), *rest)
