"""Decoding on a mesh of 8 host devices: same ids, weights and caches really split."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from reanchor_jax.config import DecodeConfig
from reanchor_jax.decode import decode_round
from reanchor_jax.errors import ReanchorError
from reanchor_jax.loop import generate
from reanchor_jax.pair import Pair
from reanchor_jax.prefill import prefill
from reanchor_jax.sharding import shard_pair
from tests.tiny import QUICK, make_pair, make_prompts

CONFIG = DecodeConfig(attach="fallback", temperature=1.0, draft_rule="coupled", bucket_nodes=False)
NEW = 24


def make_mesh(**axes: int) -> Mesh:
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


@functools.lru_cache
def pair(family: str, tied: bool) -> Pair:
    return make_pair(4, family=family, tied=tied)


@functools.partial(jax.jit, compiler_options=QUICK)
def run(pair: Pair, ids: jax.Array, lens: jax.Array, keys: jax.Array) -> Any:
    def one(ids: jax.Array, num: jax.Array, key: jax.Array) -> Any:
        return generate(pair, ids, num, key=key, config=CONFIG, max_new_tokens=NEW)

    return jax.vmap(one)(ids, lens, keys)


@pytest.mark.parametrize(("family", "tied"), [("llama", True), ("qwen3", False), ("gemma4_text", True)])
def test_sharded_equals_unsharded(family, tied):
    """Weights over 2 devices, prompts over 4."""
    mesh = make_mesh(data=4, model=2)
    prompts = make_prompts(8)
    want = run(pair(family, tied), *prompts)
    sharded = shard_pair(pair(family, tied), mesh)
    spread = jax.device_put(tuple(prompts), NamedSharding(mesh, PartitionSpec("data")))
    compiled = run.lower(sharded, *spread).compile()
    got = compiled(sharded, *spread)
    np.testing.assert_array_equal(got.tokens, want.tokens)
    np.testing.assert_array_equal(got.counts.committed, want.counts.committed)
    np.testing.assert_array_equal(got.counts.nodes, want.counts.nodes)
    assert len(set(map(tuple, np.asarray(got.tokens).tolist()))) > 4
    assert "all-reduce" in compiled.as_text()
    assert got.tokens.sharding.spec[0] == "data"


def test_each_device_holds_its_part():
    mesh = make_mesh(model=2)
    sharded = shard_pair(pair("llama", False), mesh)
    layers = sharded.target.layers[0]
    for weight, axis in (
        (layers.q_proj, 1), (layers.k_proj, 1), (layers.v_proj, 1), (layers.o_proj, 2), (layers.gate_proj, 1),
        (layers.up_proj, 1), (layers.down_proj, 2), (sharded.target.embedding, 0), (sharded.target.lm_head, 0),
        (sharded.drafter.layers.q_proj, 1), (sharded.drafter.layers.down_proj, 2),
    ):  # fmt: skip
        shape = list(weight[...].shape)
        shape[axis] //= 2
        assert weight[...].addressable_shards[0].data.shape == tuple(shape)
    assert sharded.target.final_norm[...].sharding.is_fully_replicated


def test_caches_follow_the_weights():
    """Nobody tells XLA where caches lie; they must be split by key/value heads all the same."""
    mesh = make_mesh(model=2)
    start = jax.jit(functools.partial(prefill, config=CONFIG, max_new_tokens=NEW), compiler_options=QUICK)
    ids, num, key = (x[0] for x in make_prompts(1))
    step = jax.jit(functools.partial(decode_round, config=CONFIG), compiler_options=QUICK)
    sharded = shard_pair(pair("llama", True), mesh)
    prefilled = start(sharded, ids, num, key=key)
    for state in (prefilled, step(sharded, prefilled)[0]):
        for cache in (state.cache[0].k, state.cache[0].v, state.context.k, state.context.v):
            layers, heads, slots, dim = cache.shape
            assert cache.addressable_shards[0].data.shape == (layers, heads // 2, slots, dim)


def test_fewer_key_value_heads_than_devices_stay_whole():
    sharded = shard_pair(pair("gemma4_text", True), make_mesh(model=2))
    sliding, _, full = sharded.target.layers
    assert (sliding.config.num_kv_heads, full.config.num_kv_heads) == (2, 1)
    assert not sliding.k_proj[...].sharding.is_fully_replicated
    assert full.k_proj[...].sharding.is_fully_replicated
    shard_pair(pair("llama", True), make_mesh(model=4))  # 2 heads on 4 devices


def test_shapes_without_arrays_get_a_sharding():
    mesh = make_mesh(model=2)
    abstract = shard_pair(jax.eval_shape(lambda: make_pair(4)), mesh)
    assert abstract.target.embedding.get_value().sharding.spec == PartitionSpec("model", None)


@pytest.mark.parametrize(
    ("size", "name", "kind", "message"),
    [
        (3, "model", AxisType.Auto, "vocab_size is 16; expected a multiple of the 3 devices"),
        (2, "data", AxisType.Auto, r"mesh axis 'model' does not exist; expected one of \('data',\)"),
        (2, "model", AxisType.Explicit, "with axis_types=AxisType.Auto for each"),
    ],
)
def test_what_does_not_fit(size, name, kind, message):
    with pytest.raises(ReanchorError, match=message):
        shard_pair(pair("llama", True), jax.make_mesh((size,), (name,), axis_types=(kind,)))


def test_a_mesh_of_one_device_changes_nothing():
    mesh = make_mesh(model=1)
    prompts = make_prompts(2)
    got = run(shard_pair(pair("llama", True), mesh), *prompts)
    np.testing.assert_array_equal(got.tokens, run(pair("llama", True), *prompts).tokens)
    assert jnp.all(got.num_tokens == NEW)
