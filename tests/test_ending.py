"""Where a text ends: EOS, limits, and counters that add up. Drafts are always right (ORACLE)."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reanchor_jax.config import DecodeConfig
from reanchor_jax.loop import Generation
from reanchor_jax.pair import Pair
from tests.tiny import (
    Prompts,
    check_counts,
    generate_scripted,
    make_pair,
    make_prompts,
    mix,
    oracle,
    plain_table,
    run,
    start_stream,
    stream,
)

BLOCK = 4
CAPACITY = 4 * BLOCK
VOCAB = 2000
"""So large that no token occurs twice in a sampled text."""
NO_EOS = jnp.array([-1], jnp.int32)
AR = DecodeConfig(method="ar", temperature=1.0)
CHAIN = DecodeConfig(method="dflash", temperature=1.0)
TRIE = DecodeConfig(attach="fallback", temperature=1.0, bucket_nodes=False)
BOTH = pytest.mark.parametrize("config", [CHAIN, TRIE], ids=["chain", "trie"])


@functools.lru_cache
def pair() -> Pair:
    return make_pair(BLOCK, vocab_size=VOCAB)


@functools.lru_cache
def plain() -> tuple[jax.Array, list[int]]:
    """Plain decoding by absolute position, and its new tokens; long enough for any last round."""
    ids, num, key = prompt()
    result = generate_scripted(
        pair(), None, ids, num, key, jnp.int32(6 * BLOCK), NO_EOS, config=AR, max_new_tokens=6 * BLOCK
    )
    tokens = result.tokens.tolist()
    assert len(set(tokens)) == len(tokens)
    return plain_table(ids, num, result.tokens), tokens


def prompt() -> tuple[jax.Array, jax.Array, jax.Array]:
    ids, num, key = (x[0] for x in make_prompts(1, size=5, vocab_size=VOCAB))
    return ids, num, key


def end_at(config: DecodeConfig, limit: int, eos: list[int], right: int | None = None) -> Generation:
    """Generates with `right` right drafts in the baseline (None: all); shifted blocks are right."""
    script = oracle(plain()[0]) if right is None else mix(plain()[0], right, shifted=BLOCK, lucky=True)
    eos_ids = jnp.array(eos, jnp.int32)
    result = jax.device_get(
        generate_scripted(pair(), script, *prompt(), jnp.int32(limit), eos_ids, config=config, max_new_tokens=CAPACITY)
    )
    check_counts(jax.tree.map(lambda x: x[None], result))
    return result


@BOTH
def test_eos_inside_a_block_ends_the_text_there(config):
    for right in (None, 1):
        for j in range(2 * BLOCK + 1):
            result = end_at(config, CAPACITY, [plain()[1][j], -1], right)
            assert result.tokens[: result.num_tokens].tolist() == plain()[1][: j + 1]
            assert not result.tokens[j + 1 :].any()  # nothing behind the end


@BOTH
def test_eos_inside_a_block_ends_the_stream_there(config):
    ids, num, key = prompt()
    for j in range(2 * BLOCK + 1):
        eos = jnp.array([plain()[1][j], -1], jnp.int32)
        state = start_stream(pair(), ids, num, key=key, config=config, max_new_tokens=CAPACITY, eos_ids=eos)
        streamed = stream(pair(), state, config, oracle(plain()[0]))
        assert streamed.tokens == plain()[1][: j + 1]


@BOTH
def test_any_of_several_eos_ids_ends_the_text(config):
    tokens = plain()[1]
    for eos, end in (([tokens[7], tokens[3]], 3), ([tokens[2], tokens[9]], 2), ([VOCAB + 5, tokens[6]], 6)):
        result = end_at(config, CAPACITY, eos)
        assert result.tokens[: result.num_tokens].tolist() == tokens[: end + 1]


def test_the_targets_own_eos_ids_are_the_default():
    """Several ids in the target's config, none given by the caller."""
    tokens = plain()[1]
    target = jax.tree.map(lambda x: x, pair().target)  # a copy
    target.config = dataclasses.replace(target.config, eos_token_ids=(tokens[6], tokens[4]))
    result = run(Pair(target, None), Prompts(*(x[None] for x in prompt())), AR, CAPACITY)
    assert result.tokens[0, : result.num_tokens[0]].tolist() == tokens[:5]


@BOTH
def test_limits_are_exact(config):
    for limit in (0, 1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 1, CAPACITY):
        result = end_at(config, limit, [-1, -1])
        assert result.num_tokens == limit
        assert result.tokens.tolist() == plain()[1][:limit] + [0] * (CAPACITY - limit)
        assert result.rounds == -(-max(limit - 1, 0) // BLOCK)  # the first token belongs to no round


@pytest.mark.parametrize("capacity", [0, 1, BLOCK + 1])
def test_capacities_are_exact(capacity):
    ids, num, key = prompt()
    result = generate_scripted(
        pair(), oracle(plain()[0]), ids, num, key, jnp.int32(99), NO_EOS, config=CHAIN, max_new_tokens=capacity
    )
    assert result.tokens.tolist() == plain()[1][:capacity] and result.num_tokens == capacity


@BOTH
def test_counters_add_up_behind_clipping(config):
    """ORACLE: every round commits a whole block; tau counts the last one in full, `clipped` says what was cut."""
    result = end_at(config, 2 * BLOCK, [-1, -1])
    assert result.rounds == 2 and result.counts.committed[:2].tolist() == [BLOCK, BLOCK]
    assert result.counts.accepted[:2].tolist() == [BLOCK - 1, BLOCK - 1]
    assert result.clipped == 1 and result.tau == BLOCK
    nothing = end_at(config, 1, [-1, -1])
    assert nothing.rounds == 0 and nothing.tau == 0 and nothing.clipped == 0


def test_shifted_blocks_carry_a_round_beyond_the_baseline():
    """Baseline right for 2 drafts, lucky shifted blocks right for all: more than a block is accepted."""
    result = end_at(TRIE, CAPACITY, [-1, -1], right=2)
    assert result.tokens.tolist() == plain()[1][:CAPACITY]
    assert np.max(result.counts.accepted) > 2 and np.max(result.counts.nodes) > BLOCK
