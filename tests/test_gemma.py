"""Decoding with Gemma 4 targets: sliding windows in rings, scaled embedding, softcap."""

from __future__ import annotations

import dataclasses
import functools
import sys
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reanchor_jax.cache import KVCache, init_target_cache, slot_positions, write_rows
from reanchor_jax.config import DecodeConfig, DraftRule, DSparkConfig, HeadConfig, Method
from reanchor_jax.loop import Generation, generate
from reanchor_jax.pair import Pair
from reanchor_jax.prefill import prefill
from reanchor_jax.target import Target, forward_text
from tests.tiny import LM_HEAD, QUICK, gemma_pattern, make_pair, make_prompts

NEW, CHUNK, BLOCK, WINDOW = 200, 8, 5, 8
GEMMA_DSPARK = DSparkConfig(
    markov_rank=5,
    markov_head_type="vanilla",
    enable_confidence_head=True,
    confidence_head_with_markov=True,
    scaled_embedding=True,
    logit_softcap=0.5,
)
LAYERS = {"dflash": {}, "dspark": {"layer": gemma_pattern(32)[-1]}}
HEADS: dict[str, HeadConfig] = {"dflash": LM_HEAD, "dspark": GEMMA_DSPARK}
"""z-lab's drafters have layers of Qwen3 and the target's embedding and head, DeepSpec's have Gemma's."""


@pytest.fixture(scope="module", autouse=True)
def short_chunks():
    """Prompts in chunks of 8, so that a ring has 8 + 2B slots and wraps every few rounds."""
    with pytest.MonkeyPatch.context() as patch:
        # By way of sys.modules: the package's `prefill` is the function.
        patch.setattr(sys.modules[prefill.__module__], "PREFILL_CHUNK", CHUNK)
        jax.clear_caches()
        yield
    jax.clear_caches()


def pair(kind: str) -> Pair:
    return make_pair(BLOCK, family="gemma4_text", head=HEADS[kind], drafter=LAYERS[kind])


@functools.partial(jax.jit, static_argnames="config", compiler_options=QUICK)
def run_rows(pair: Pair, ids: jax.Array, lens: jax.Array, keys: jax.Array, *, config: DecodeConfig) -> Generation:
    fn = functools.partial(generate, pair, config=config, max_new_tokens=NEW)
    return jax.vmap(lambda ids, n, key: fn(ids, n, key=key))(ids, lens, keys)


def run(kind: str, config: DecodeConfig) -> Generation:
    return jax.device_get(run_rows(pair(kind), *make_prompts(3, size=21), config=config))


@functools.lru_cache
def plain(temperature: float) -> Generation:
    return run("dflash", DecodeConfig(method="ar", temperature=temperature, bucket_nodes=False))


def test_plain_decoding_is_the_uncached_forward():
    """Every token is the top one of a forward over the whole text, which has no cache at all."""
    ids, lens, _ = make_prompts(3, size=21)
    target = pair("dflash").target
    for row, (prompt, count) in enumerate(zip(ids, lens, strict=True)):
        text = jnp.concatenate([prompt[:count], jnp.asarray(plain(0.0).tokens[row])])
        logits = target.logits(forward_text(target, text).hidden)
        np.testing.assert_array_equal(jnp.argmax(logits, axis=-1)[count - 1 : -1], text[count:])
        assert len(set(text[-40:].tolist())) > 5


@pytest.mark.parametrize(
    ("kind", "temperature", "rule"),
    [
        *((kind, 0.0, "greedy") for kind in HEADS),
        *(("dflash", 1.0, rule) for rule in get_args(DraftRule)),
        ("dspark", 1.0, "sample"),
    ],
)
def test_lossless_over_many_wraps(kind, temperature, rule):
    for method in get_args(Method)[1:]:
        config = DecodeConfig(
            method=method, temperature=temperature, draft_rule=rule, attach="fallback", bucket_nodes=False
        )
        result = run(kind, config)
        np.testing.assert_array_equal(result.tokens, plain(temperature).tokens)
        assert result.rounds.min() > 40  # the ring of 18 slots wraps ten times


def test_sliding_layers_have_rings_and_full_ones_do_not():
    ids, lens, keys = (x[0] for x in make_prompts(3, size=21))
    state = prefill(pair("dflash"), ids, lens, key=keys, config=DecodeConfig(), max_new_tokens=NEW)
    sizes = [(cache.ring, *cache.k.shape) for cache in state.cache]
    # 24 slots of prompt or 21 + 200 of text, and two blocks.
    assert sizes == [(True, 2, 2, 18, 8), (True, 2, 2, 18, 8), (False, 2, 1, 231, 12)]


@pytest.mark.parametrize("rows", [1, 3, 7])
def test_ring_holds_what_a_window_sees(rows):
    """After every write of which only a part is committed, each position that a query may see is there."""
    rng = np.random.default_rng(rows)
    layer = dataclasses.replace(gemma_pattern(32)[0], head_dim=2, num_kv_heads=1)
    config = dataclasses.replace(pair("dflash").target.config, pattern=(layer,), num_layers=1)
    (cache,) = init_target_cache(config, 1000, jnp.dtype(jnp.float32), rows)
    assert cache.num_slots == WINDOW + rows
    write, length = jax.jit(write_rows), 0
    while length < 60:
        positions = np.arange(length, length + rows)
        values = jnp.broadcast_to(jnp.asarray(positions, jnp.float32)[None, None, :, None], (1, 1, rows, 2))
        cache = write(cache, values, -values, jnp.int32(length))
        length += int(rng.integers(0, rows + 1))
        at = np.asarray(slot_positions(cache, jnp.int32(length)))
        for position in range(max(0, length - WINDOW + 1), length):
            (slot,) = np.flatnonzero(at == position)
            assert cache.k[0, 0, slot, 0] == position and cache.v[0, 0, slot, 1] == -position


def test_ring_example():
    cache = KVCache(jnp.zeros((1, 1, 7, 2)), jnp.zeros((1, 1, 7, 2)), ring=True)
    assert slot_positions(cache, jnp.int32(9)).tolist() == [7, 8, 2, 3, 4, 5, 6]
    assert slot_positions(cache, jnp.int32(2)).tolist() == [0, 1, -5, -4, -3, -2, -1]


def test_softcap_and_scale_are_in_the_logits():
    target: Target = pair("dflash").target
    text = make_prompts(1, size=21).ids[0]
    for change in ({"logit_softcap": None}, {"scaled_embedding": False}):
        other = jax.tree.map(lambda x: x, target)
        other.config = dataclasses.replace(target.config, **change)
        moved = other.logits(forward_text(other, text).hidden) - target.logits(forward_text(target, text).hidden)
        assert jnp.abs(moved).max() > 0.01
