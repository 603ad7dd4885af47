"""Is the output what plain decoding gives, and how much faster did it come?"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from reanchor_jax.cli.answer import Answer
from reanchor_jax.config import DecodeConfig
from reanchor_jax.pair import Pair
from reanchor_jax.prefill import PREFILL_CHUNK, prefill
from reanchor_jax.sampling import filter_logits, position_noise


@dataclasses.dataclass(frozen=True)
class Check:
    """Comparison of an answer with that of plain decoding with the same key."""

    answer: Answer
    plain: Answer
    first_difference: int | None
    """Index of the first token that differs; None where all are equal."""
    gap: float | None
    """What separates the two tokens there under plain decoding: the difference of their logits, at
    a temperature above 0 of their scaled logits with noise. None where there is nothing to compare."""

    @property
    def equal(self) -> bool:
        return self.first_difference is None

    @property
    def speedup(self) -> float | None:
        """Tokens per second over those of plain decoding; None where either has no rounds."""
        if not self.plain.tokens_per_second or not self.answer.tokens_per_second:
            return None
        return self.answer.tokens_per_second / self.plain.tokens_per_second


def compare(pair: Pair, config: DecodeConfig, answer: Answer, plain: Answer, seed: int, index: int) -> Check:
    """Holds an answer against the plain one; where they part, asks the target how close it was.

    The two batch shapes may round a near-tie differently: then the gap is about the rounding of a
    logit, in bfloat16 some hundredths, in float32 below 1e-4. Any other difference is a defect.
    """
    at = _first_difference(answer.token_ids, plain.token_ids)
    gap = None
    if at is not None and at < min(len(answer.token_ids), len(plain.token_ids)):
        ids = answer.prompt_ids + plain.token_ids[:at]
        padded = np.zeros(-(-len(ids) // PREFILL_CHUNK) * PREFILL_CHUNK, np.int32)
        padded[: len(ids)] = ids
        scores = jax.jit(functools.partial(_scores, config=config))(
            pair, padded, np.int32(len(ids)), np.uint32(seed), np.uint32(index)
        )
        gap = float(scores[plain.token_ids[at]]) - float(scores[answer.token_ids[at]])
    return Check(answer, plain, at, gap if gap is None or math.isfinite(gap) else None)


def _first_difference(a: list[int], b: list[int]) -> int | None:
    """[5, 6, 7] and [5, 6, 8]: 2. [5, 6] and [5, 6, 8]: 2. Equal lists: None."""
    if a == b:
        return None
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _scores(
    pair: Pair, ids: jax.Array, length: jax.Array, seed: jax.Array, index: jax.Array, *, config: DecodeConfig
) -> jax.Array:
    """[V] f32: plain decoding takes the highest of these behind the first `length` ids."""
    vocab_size = pair.target.config.vocab_size
    key = jax.random.fold_in(jax.random.key(seed), index)
    plain = dataclasses.replace(config, method="ar", logprobs=vocab_size)
    rows = prefill(pair, ids, length, key=key, config=plain, max_new_tokens=1).first_logprobs
    # Log-probabilities are logits up to a constant, which no filter and no gap sees.
    logits = jnp.zeros(vocab_size, jnp.float32).at[rows.top_ids[0]].set(rows.top[0])
    noise = position_noise(key, length[None], vocab_size, config)
    if noise is None:
        return logits
    return filter_logits(logits / config.temperature, config) + noise[0]
