"""Whole rounds against a loop without caches; streaming; seeds; ties."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reanchor_jax.cache import init_cache
from reanchor_jax.config import DecodeConfig
from reanchor_jax.pair import Pair
from reanchor_jax.sampling import choose_target_tokens, position_noise
from reanchor_jax.target import forward_text
from tests import oracle
from tests.tiny import QUICK, generate_scripted, make_pair, make_prompts, start_stream, step, stream

SIZE = 64
"""Longest sequence, paths included, that the cacheless loop sees."""
NEW = 24
VOCAB = 6
"""So small that random drafts are often right and shifted anchors often match."""
NO_EOS = jnp.array([-1], jnp.int32)


@functools.lru_cache
def pair(block_size: int = 5) -> Pair:
    return make_pair(block_size, family="qwen3", tied=False, vocab_size=VOCAB)


# The loop without caches: the target and the drafter as functions of token lists.


@functools.partial(jax.jit, static_argnames="config", compiler_options=QUICK)
def forward(pair: Pair, tokens: jax.Array, key: jax.Array, config: DecodeConfig) -> tuple[jax.Array, jax.Array]:
    """Features and the target's tokens of a whole padded sequence [SIZE]."""
    assert pair.drafter is not None
    output = forward_text(pair.target, tokens, pair.drafter.config.target_layer_ids)
    noise = position_noise(key, jnp.arange(SIZE) + 1, VOCAB, config)
    return output.features, choose_target_tokens(pair.target.logits(output.hidden), noise, config)


@functools.partial(jax.jit, static_argnames="config", compiler_options=QUICK)
def draft(
    pair: Pair, features: jax.Array, num: jax.Array, anchor: jax.Array, key: jax.Array, config: DecodeConfig
) -> jax.Array:
    """Drafts [B-1] behind an anchor at position `num`, from `num` padded features [SIZE, C*D]."""
    drafter = pair.drafter
    assert drafter is not None
    context = drafter.context(features, jnp.arange(SIZE))
    nothing = init_cache(drafter.config.layer, drafter.config.num_layers, 0, pair.target.dtype)
    block = jnp.full(drafter.config.block_size, drafter.config.mask_token_id, jnp.int32).at[0].set(anchor)
    positions = num + jnp.arange(drafter.config.block_size)
    hidden = drafter(pair.target.embed(block), positions, context, num, nothing, jnp.int32(0))[1:]
    logits = pair.target.logits(hidden)
    if config.draft_rule == "coupled":
        noise = position_noise(key, positions[1:], VOCAB, config)
        assert noise is not None
        logits = logits / config.temperature + noise
    return jnp.argmax(logits, axis=-1)


def plain_rounds(prompt: list[int], key: jax.Array, config: DecodeConfig, **kwargs: Any):
    """The oracle's run on the pair's networks."""

    def target(tokens: oracle.Path) -> list[tuple[Any, int]]:
        padded = jnp.asarray(np.pad(tokens, (0, SIZE - len(tokens))), jnp.int32)
        features, following = jax.device_get(forward(pair(), padded, key, sampling(config)))
        return list(zip(features, following.tolist(), strict=True))[: len(tokens)]

    def drafter(features: list[Any], anchor: int) -> list[int]:
        padded = jnp.asarray(np.pad(np.stack(features), ((0, SIZE - len(features)), (0, 0))))
        drafts = draft(pair(), padded, jnp.int32(len(features)), jnp.int32(anchor), key, sampling(config))
        return drafts.tolist()

    return oracle.decode(
        prompt,
        target,
        drafter,
        block_size=5,
        attach_rule=config.attach,
        retain_rule=config.retain,
        max_offset=0 if config.method == "dflash" else config.offsets,
        budget=config.nodes,
        **kwargs,
    )


one_size = functools.partial(DecodeConfig, bucket_nodes=False)  # half the compile time
CONFIGS = [
    one_size(method="dflash"),
    one_size(attach="earliest", retain="baseline"),
    DecodeConfig(attach="earliest", retain="accepted_path"),
    one_size(attach="longest", retain="accepted_path"),
    one_size(attach="fixed", retain="accepted_path"),
    one_size(attach="fixed_unmatched", retain="baseline", nodes=25),
    one_size(attach="fallback", retain="accepted_path", nodes=9, offsets=3),
    one_size(attach="fallback", retain="accepted_path", temperature=1.0, draft_rule="coupled", nodes=25),
    one_size(attach="fallback", retain="baseline", temperature=0.8, top_k=4, nodes=25),
]


def sampling(config: DecodeConfig) -> DecodeConfig:
    """What prefill and the cacheless networks read of a config: configs that agree share a compile."""
    return DecodeConfig(
        method=config.method, temperature=config.temperature, top_k=config.top_k, draft_rule=config.draft_rule
    )


STREAMED = DecodeConfig(attach="fallback", temperature=1.0, logprobs=2)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"{c.method}-{c.attach}-{c.retain}-{c.nodes}-{c.temperature}")
def test_every_round_equals_the_loop_without_caches(config):
    prompts = make_prompts(3, vocab_size=VOCAB)
    totals = np.zeros(3, int)  # accepted drafts, offsets, nodes beyond the baseline
    for ids, num, key in zip(*prompts, strict=True):
        state = start_stream(
            pair(), ids, num, key=key, config=sampling(config), max_new_tokens=NEW, limit=jnp.int32(NEW), eos_ids=NO_EOS
        )
        run = stream(pair(), state, config)
        tokens, rounds = plain_rounds(ids[: int(num)].tolist(), key, config, limit=NEW)
        assert run.tokens == tokens
        for record, plain in zip(run.records, rounds, strict=True):
            assert record.target_tokens[record.path[: record.committed]].tolist() == plain.committed
            assert record.num_nodes == plain.num_nodes and record.num_cut == plain.num_cut
            assert record.num_offsets == plain.num_offsets
            assert config.method == "dflash" or record.num_retained == plain.num_retained
            totals += [record.accepted, record.num_offsets, record.num_nodes - 5]
    assert totals[0] >= 8  # the pair is not so dull that nothing is compared
    assert config.method == "dflash" or (totals[1] > 20 and totals[2] > 20)


# Streaming


@pytest.mark.parametrize(
    "config",
    [DecodeConfig(method="ar", temperature=1.0), STREAMED],
    ids=lambda c: c.method,
)
def test_streamed_rounds_equal_generate(config):
    prompts = make_prompts(2, vocab_size=VOCAB)
    for ids, num, key in zip(*prompts, strict=True):
        limit = jnp.int32(NEW)
        whole = jax.device_get(
            generate_scripted(pair(), None, ids, num, key, limit, NO_EOS, config=config, max_new_tokens=NEW)
        )
        state = start_stream(pair(), ids, num, key=key, config=config, max_new_tokens=NEW, limit=limit, eos_ids=NO_EOS)
        run = stream(pair(), state, config)
        assert run.tokens == whole.tokens[: whole.num_tokens].tolist()
        assert run.committed == whole.counts.committed[: whole.rounds].tolist()
        assert [int(r.num_nodes) for r in run.records] == whole.counts.nodes[: whole.rounds].tolist()
        assert [int(r.num_offsets) for r in run.records] == whole.counts.offsets[: whole.rounds].tolist()
        assert sum(int(r.clipped) for r in run.records) == whole.clipped
        # tau by its definition: committed tokens of all rounds in full, over rounds.
        assert whole.tau == pytest.approx(sum(run.committed) / len(run.committed), rel=1e-6)
        if config.logprobs:
            chosen = [
                state.first_logprobs.chosen[0],
                *(x for r in run.records for x in r.logprobs.chosen[: r.committed]),
            ]
            np.testing.assert_allclose(whole.logprobs.chosen, chosen[:NEW], rtol=1e-5, atol=1e-5)


def test_a_round_behind_the_end_changes_neither_text_nor_length():
    ids, num, key = (x[0] for x in make_prompts(1, vocab_size=VOCAB))
    limit = jnp.int32(NEW)
    state = start_stream(pair(), ids, num, key=key, config=STREAMED, max_new_tokens=NEW, limit=limit, eos_ids=NO_EOS)
    last = stream(pair(), state, STREAMED).states[-1]
    behind, record = step(pair(), None, last, config=STREAMED)
    end = int(last.length)
    assert bool(behind.done) and behind.length == end and record.clipped == record.committed
    np.testing.assert_array_equal(behind.tokens[: end + 1], last.tokens[: end + 1])
    for cache, before in ((behind.cache[0], last.cache[0]), (behind.context, last.context)):
        np.testing.assert_array_equal(cache.k[:, :, :end], before.k[:, :, :end])
        np.testing.assert_array_equal(cache.v[:, :, :end], before.v[:, :, :end])


# Seeds and ties


def test_same_seed_same_text_and_other_seeds_differ():
    ids, num, _ = (x[0] for x in make_prompts(1, vocab_size=VOCAB))
    texts = [
        generate_scripted(
            pair(), None, ids, num, jax.random.key(seed), jnp.int32(NEW), NO_EOS, config=STREAMED, max_new_tokens=NEW
        ).tokens.tolist()
        for seed in (5, 5, 6, 7)
    ]
    assert texts[0] == texts[1] and len({tuple(text) for text in texts}) == 3


@pytest.mark.parametrize("method", ["ar", "dflash", "reanchor"])
def test_equal_logits_give_the_lowest_id_in_every_method(method):
    """A head of zeros ties all tokens everywhere: drafts and target choose 0, all is accepted."""
    flat = jax.tree_util.tree_map_with_path(
        lambda path, x: x * 0 if "lm_head" in jax.tree_util.keystr(path) else x, pair()
    )
    ids, num, key = (x[0] for x in make_prompts(1, vocab_size=VOCAB))
    config = one_size(method=method)
    result = generate_scripted(flat, None, ids, num, key, jnp.int32(16), NO_EOS, config=config, max_new_tokens=16)
    assert result.tokens.tolist() == [0] * 16
    assert result.counts.committed[0] == (1 if method == "ar" else 5)
