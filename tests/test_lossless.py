"""Chain and ReAnchor decoding equal plain decoding, token for token, at any temperature."""

import dataclasses
import functools
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from reanchor_jax import DecodeConfig, Drafter, DrafterConfig, Pair, Target, TargetConfig, decode_round, generate
from reanchor_jax.config import AttachRule, LayerConfig, RetainRule, RopeConfig
from reanchor_jax.prefill import prefill

PROMPT = jnp.array([3, 5, 7, 2, 0, 0, 0, 0], jnp.int32)
PROMPT_LEN = jnp.int32(4)
KEY = jax.random.key(7)
NEW = 40


@functools.cache
def tiny_pair(block_size: int, qk_norm: bool = False) -> Pair:
    """A random pair over 16 tokens: drafts are often wrong, and often match elsewhere."""
    layer = LayerConfig(
        hidden_size=32,
        intermediate_size=64,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        rms_norm_eps=1e-5,
        qk_norm=qk_norm,
    )
    rope = RopeConfig(theta=1e4, scaling=None)
    config = TargetConfig(
        model_type="qwen3" if qk_norm else "llama",
        vocab_size=16,
        num_layers=3,
        layer=layer,
        rope=rope,
        tie_word_embeddings=not qk_norm,
        max_position_embeddings=512,
        bos_token_id=1,
        eos_token_ids=(),
    )
    target = Target(config, dtype=jnp.float32, rngs=nnx.Rngs(0))
    target.embedding = nnx.Param(target.embedding[...] * 20)
    drafter = DrafterConfig(
        block_size=block_size,
        mask_token_id=15,
        target_layer_ids=(0, 2),
        target_num_layers=3,
        vocab_size=16,
        num_layers=2,
        layer=dataclasses.replace(layer, qk_norm=True),
        rope=rope,
    )
    return Pair(target, Drafter(drafter, dtype=jnp.float32, rngs=nnx.Rngs(1)))


def decode(pair: Pair, config: DecodeConfig, **options):
    run = jax.jit(functools.partial(generate, config=config, max_new_tokens=NEW, **options))
    return jax.device_get(run(pair, PROMPT, PROMPT_LEN, key=KEY))


@functools.cache
def plain(block_size: int, qk_norm: bool, temperature: float, **filters):
    return decode(
        tiny_pair(block_size, qk_norm), DecodeConfig(method="ar", temperature=temperature, logprobs=3, **filters)
    )


def check(pair: Pair, reference, config: DecodeConfig):
    config = dataclasses.replace(config, logprobs=3)
    result = decode(pair, config)
    assert result.tokens.tolist() == reference.tokens.tolist()
    assert 1 + result.counts.committed.sum() - result.clipped == result.num_tokens
    assert (result.counts.committed == result.counts.accepted + 1)[: result.rounds].all()
    np.testing.assert_allclose(result.logprobs.chosen, reference.logprobs.chosen, atol=1e-5)
    assert result.logprobs.top_ids[:, 0].tolist() == reference.logprobs.top_ids[:, 0].tolist()


@pytest.mark.parametrize("retain", get_args(RetainRule))
@pytest.mark.parametrize("attach", get_args(AttachRule))
def test_every_rule_at_temperature_0(attach, retain):
    check(tiny_pair(6), plain(6, False, 0.0), DecodeConfig(attach=attach, retain=retain))


@pytest.mark.parametrize("draft_rule", ["greedy", "sample", "coupled"])
@pytest.mark.parametrize("method", ["dflash", "reanchor"])
def test_every_draft_rule_at_temperature_1(method, draft_rule):
    config = DecodeConfig(method=method, temperature=1.0, draft_rule=draft_rule, attach="fallback")
    check(tiny_pair(6), plain(6, False, 1.0), config)


@pytest.mark.parametrize("block_size", [2, 3, 16])
def test_block_sizes(block_size):
    pair = tiny_pair(block_size, True)
    for temperature, rule in ((0.0, "greedy"), (1.0, "coupled")):
        reference = plain(block_size, True, temperature)
        check(pair, reference, DecodeConfig(method="dflash", temperature=temperature, draft_rule=rule))
        check(pair, reference, DecodeConfig(temperature=temperature, draft_rule=rule, attach="fallback"))


@pytest.mark.parametrize("options", [{"nodes": 6}, {"nodes": 9}, {"offsets": 0}, {"offsets": 2}])
def test_budgets(options):
    check(tiny_pair(6), plain(6, False, 0.0), DecodeConfig(attach="fixed_unmatched", **options))


def test_filters():
    filters = {"top_k": 9, "top_p": 0.9, "min_p": 0.05}
    reference = plain(6, False, 1.3, **filters)
    check(tiny_pair(6), reference, DecodeConfig(temperature=1.3, draft_rule="coupled", attach="fallback", **filters))
    assert reference.tokens.tolist() != plain(6, False, 1.3).tokens.tolist()


@pytest.mark.parametrize("limit", [0, 1, 5, 6, 7, 13])
def test_limits_are_exact(limit):
    result = decode(tiny_pair(6), DecodeConfig(attach="fixed_unmatched"), limit=jnp.int32(limit))
    assert result.num_tokens == limit
    assert result.tokens[:limit].tolist() == plain(6, False, 0.0).tokens[:limit].tolist()
    assert not result.tokens[limit:].any()


def test_stops_at_the_first_eos_wherever_it_falls():
    reference = plain(6, False, 1.0).tokens.tolist()
    run = jax.jit(
        functools.partial(
            generate, config=DecodeConfig(temperature=1.0, draft_rule="coupled", attach="fallback"), max_new_tokens=NEW
        )
    )
    for eos in set(reference[:13]):
        end = reference.index(eos) + 1
        result = run(tiny_pair(6), PROMPT, PROMPT_LEN, key=KEY, eos_ids=jnp.array([eos, -1], jnp.int32))
        assert result.tokens[: int(result.num_tokens)].tolist() == reference[:end]


def test_rounds_driven_from_python_equal_the_loop():
    pair, config = tiny_pair(6), DecodeConfig(attach="fixed_unmatched")
    state = jax.jit(functools.partial(prefill, config=config, max_new_tokens=NEW))(pair, PROMPT, PROMPT_LEN, key=KEY)
    step = jax.jit(functools.partial(decode_round, config=config), donate_argnames="state")
    committed = []
    while not bool(state.done):
        state, record = step(pair, state)
        committed.append(int(record.committed))
    result = decode(pair, config)
    assert committed == result.counts.committed[: result.rounds].tolist()
    assert state.tokens[4 : 4 + NEW].tolist() == result.tokens.tolist()
    after, _ = step(pair, state)  # a round after the end changes nothing
    assert int(after.generated) == NEW and bool(after.done)


def test_rows_of_a_batch_equal_their_solo_runs():
    config = DecodeConfig(attach="fallback", temperature=1.0, bucket_nodes=False)
    run = functools.partial(generate, config=config, max_new_tokens=NEW)
    prompts = jnp.stack([PROMPT, PROMPT + 1])
    lengths, keys = jnp.array([4, 7], jnp.int32), jax.random.split(KEY)
    batched = jax.jit(jax.vmap(lambda p, n, k: run(tiny_pair(6), p, n, key=k)))(prompts, lengths, keys)
    for row in range(2):
        solo = jax.jit(run)(tiny_pair(6), prompts[row], lengths[row], key=keys[row])
        assert batched.tokens[row].tolist() == solo.tokens.tolist()


def test_one_compile_no_transfer_no_callback():
    pair = tiny_pair(6)
    run = jax.jit(functools.partial(generate, config=DecodeConfig(), max_new_tokens=NEW))
    lengths = [jnp.int32(n) for n in range(1, 9)]
    run(pair, PROMPT, lengths[0], key=KEY)
    with jax.transfer_guard("disallow"):
        for length in lengths:
            jax.block_until_ready(run(pair, PROMPT, length, key=KEY))
    assert run._cache_size() == 1
    text = run.lower(pair, PROMPT, PROMPT_LEN, key=KEY).as_text()
    assert "callback" not in text
    assert len(text) < 1_000_000  # weights are arguments, not constants
