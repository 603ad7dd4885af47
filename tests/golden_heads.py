"""What tests of heads share: recorded blocks and prompts of the golden data."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np

from reanchor_jax.cache import init_cache
from reanchor_jax.config import DecodeConfig, DraftRule, HeadConfig, Method
from reanchor_jax.heads import DraftNoise, Drafts
from reanchor_jax.pair import Pair
from reanchor_jax.target import softcap
from tests.tiny import Prompts, make_pair, make_prompts, run

GOLDEN = Path(__file__).parent / "golden"
TOLERANCE = 2e-4
NEW = 40


@jax.jit
def features(pair: Pair, block: jax.Array, context: jax.Array) -> jax.Array:
    """The backbone's features [T, D] of a block behind target features [S, C*D]."""
    drafter, start = pair.drafter, context.shape[0]
    assert drafter is not None
    cache = drafter.context(context, jnp.arange(start))
    none = init_cache(drafter.config.layer, drafter.config.num_layers, 0, jnp.float32)
    positions = start + jnp.arange(block.shape[0])
    return drafter(drafter.head.embed(pair.target, block), positions, cache, jnp.int32(start), none, jnp.int32(0))


@jax.jit
def draft(pair: Pair, hidden: jax.Array, anchor: jax.Array, noise: jax.Array | None) -> Drafts:
    """Drafts of one block, of its features [T, D]."""
    assert pair.drafter is not None
    return pair.drafter.head(pair.target, hidden[None], anchor[None], DraftNoise(gumbel=noise), 1.0)


@jax.jit
def force(pair: Pair, hidden: jax.Array, before: jax.Array) -> tuple[jax.Array, jax.Array | None]:
    """Logits [B-1, V] and confidences [B-1] of one block that training would see."""
    assert pair.drafter is not None
    forced = pair.drafter.head.force(pair.target, hidden[None], before[None])
    logits = softcap(forced.hidden @ forced.rows.T, forced.cap) + forced.extra @ forced.extra_rows.T
    return logits[0], None if forced.confidence is None else forced.confidence[0]


def forcing(tokens: np.ndarray, vocab_size: int) -> jax.Array:
    """Noise that decides every draft of a block: teacher forcing."""
    return 1e6 * jax.nn.one_hot(tokens[None], vocab_size)


def padded(prompts: np.ndarray) -> Prompts:
    """Prompts [R, P] that are padded with -1 in the files."""
    lens = jnp.asarray((prompts >= 0).sum(axis=1), jnp.int32)
    return Prompts(jnp.asarray(np.maximum(prompts, 0), jnp.int32), lens, jax.random.split(jax.random.key(0), len(lens)))


def check_trained_pair(pair: Pair, prompts: Prompts, temperature: float, rule: DraftRule) -> None:
    """Chain and ReAnchor give plain decoding's text, in fewer rounds each."""
    config = DecodeConfig(temperature=temperature, draft_rule=rule, attach="fallback", bucket_nodes=False)
    plain, chain, reanchor = (
        run(pair, prompts, dataclasses.replace(config, method=method), NEW) for method in get_args(Method)
    )
    np.testing.assert_array_equal(chain.tokens, plain.tokens)
    np.testing.assert_array_equal(reanchor.tokens, plain.tokens)
    assert 1 < np.mean(chain.tau) < np.mean(reanchor.tau)


def check_random_pair(block_size: int, head: HeadConfig, **drafter: Any) -> None:
    """Chain and ReAnchor give plain decoding's text, with a drafter that is hardly ever right.

    `drafter` are changes to the drafter's config. The draft rule at temperature 1 changes with the
    block size, so that a row of sizes meets all. Chain decoding, which is ReAnchor's baseline block
    alone, meets each of them once: every program takes seconds to compile.
    """
    pair = make_pair(block_size, head=head, drafter=drafter)
    rules = get_args(DraftRule)
    for temperature, rule in ((0.0, "greedy"), (1.0, rules[block_size % len(rules)])):
        plain = DecodeConfig(method="ar", temperature=temperature, bucket_nodes=False)
        expected = run(Pair(pair.target, None), make_prompts(), plain, NEW).tokens
        for method in ("dflash", "reanchor") if temperature == 0 or block_size < 5 else ("reanchor",):
            config = dataclasses.replace(plain, method=method, draft_rule=rule, attach="fallback")
            np.testing.assert_array_equal(run(pair, make_prompts(), config, NEW).tokens, expected)
