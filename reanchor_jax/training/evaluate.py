"""Held-out quality of a drafter: accuracy per block position, expected and real tau."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from reanchor_jax.config import DecodeConfig
from reanchor_jax.drafter import Drafter
from reanchor_jax.loop import generate
from reanchor_jax.pair import Pair
from reanchor_jax.target import Target
from reanchor_jax.training.blocks import Batch, random_blocks
from reanchor_jax.training.loss import Vocab, make_factors, position_weights, score

PROMPT_STEP = 64
"""Prompts are padded to multiples of this, so that few lengths compile."""


class HeldOut(NamedTuple):
    """Sums over held-out blocks; `summary` divides them."""

    right: Any  # [B-1] drafts equal to the target's token
    labels: Any  # [B-1] drafts that have a label
    accepted: Any  # () drafts before the first wrong one, over whole blocks
    blocks: Any  # () blocks that end inside their text
    loss: Any  # () weighted cross entropy over the whole vocabulary
    weight: Any  # ()


def summary(sums: HeldOut) -> dict[str, Any]:
    """Accuracy per position, `proxy_tau` (1 + mean accepted drafts of whole blocks), loss."""
    return {
        "loss": float(sums.loss / max(sums.weight, 1e-6)),
        "proxy_tau": float(1 + sums.accepted / max(sums.blocks, 1)),
        "accuracy": [round(float(a), 4) for a in sums.right / np.maximum(sums.labels, 1)],
    }


def held_out_sums(
    drafter: Drafter,
    target: Target,
    vocab: Vocab,
    batch: Batch,
    features: jax.Array,
    key: jax.Array,
    *,
    num_anchors: int,
    gamma: float,
) -> HeldOut:
    """Sums over random blocks of a batch; arguments as in `block_loss`, `vocab` being the whole one.

    Drafts are scored behind the text's own tokens: up to the first wrong one, they are the drafter's.
    """
    forced, labels, valid, _ = random_blocks(target, drafter, batch, features, key, num_anchors)
    losses, right = (x.reshape(labels.shape) for x in score(make_factors(forced, vocab), labels.reshape(-1)))
    weights = jnp.where(valid, position_weights(drafter.config.block_size, gamma)[None], 0.0)
    whole = jnp.all(valid, axis=1)
    accepted = jnp.sum(jnp.cumprod(right.astype(jnp.int32), axis=1), axis=1)
    return HeldOut(
        right=jnp.sum(right & valid, axis=0),
        labels=jnp.sum(valid, axis=0),
        accepted=jnp.sum(jnp.where(whole, accepted, 0)),
        blocks=jnp.sum(whole),
        loss=jnp.sum(losses * weights),
        weight=jnp.sum(weights),
    )


class Decoding(NamedTuple):
    """What decoding some prompts gave."""

    tau: float
    nodes: float
    """Mean verified nodes a round."""
    token_ids: list[list[int]]


def make_decoder(config: DecodeConfig, max_new_tokens: int) -> Callable[[Pair, Sequence[Sequence[int]]], Decoding]:
    """A function that decodes prompts one by one and returns tau over all rounds.

    It keeps what it has compiled: call it again with other parameters of the same shapes.
    """
    run = jax.jit(partial(generate, config=config, max_new_tokens=max_new_tokens))

    def decode(pair: Pair, prompts: Sequence[Sequence[int]]) -> Decoding:
        committed, rounds, nodes, ids = 0, 0, 0, []
        for prompt in prompts:
            padded = np.zeros(-(-len(prompt) // PROMPT_STEP) * PROMPT_STEP, np.int32)
            padded[: len(prompt)] = prompt
            result = jax.device_get(run(pair, padded, np.int32(len(prompt)), key=jax.random.key(0)))
            committed += int(result.counts.committed.sum())
            nodes += int(result.counts.nodes.sum())
            rounds += int(result.rounds)
            ids.append([int(i) for i in result.tokens[: result.num_tokens]])
        return Decoding(committed / max(rounds, 1), nodes / max(rounds, 1), ids)

    return decode
