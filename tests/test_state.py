"""The state between rounds: caches hold the committed prefix and nothing else, and nothing outlives a request."""

from __future__ import annotations

import dataclasses
import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reanchor_jax.cache import KVCache, init_cache
from reanchor_jax.config import DecodeConfig
from reanchor_jax.pair import Pair
from reanchor_jax.prefill import num_slots
from reanchor_jax.state import DecodeState
from reanchor_jax.target import forward_text
from tests.tiny import (
    QUICK,
    Script,
    anti,
    generate_scripted,
    make_pair,
    make_prompts,
    mix,
    oracle,
    plain_table,
    start_stream,
    step,
    stream,
)

prefill_module = importlib.import_module("reanchor_jax.prefill")  # the package's name is the function's
BLOCK, NEW = 5, 40
AR = DecodeConfig(method="ar")
TRIE = DecodeConfig(attach="fallback", bucket_nodes=False)
NO_EOS = jnp.array([-1], jnp.int32)


@functools.lru_cache
def pair() -> Pair:
    return make_pair(BLOCK, family="qwen3", tied=False)


def start(config: DecodeConfig, row: int = 0) -> DecodeState:
    ids, num, key = (x[row] for x in make_prompts(3))
    return start_stream(pair(), ids, num, key=key, config=config, max_new_tokens=NEW)


@functools.lru_cache
def plain(row: int = 0) -> tuple[jax.Array, list[int]]:
    """Plain decoding by absolute position, and its new tokens."""
    ids, num, _ = (x[row] for x in make_prompts(3))
    tokens = stream(pair(), start(AR, row), AR).tokens
    return plain_table(ids, num, jnp.array(tokens, jnp.int32)), tokens


SCRIPTS = {
    "oracle": oracle,
    "anti": anti,
    "mix-2": lambda plain: mix(plain, 2),
    # The baseline is right for 1 draft, lucky shifted blocks go on from there: scattered nodes.
    "scattered": lambda plain: mix(plain, 1, shifted=BLOCK, lucky=True),
}


def script(name: str, row: int = 0) -> Script:
    return SCRIPTS[name](plain(row)[0])


@functools.partial(jax.jit, compiler_options=QUICK)
def rebuild(pair: Pair, tokens: jax.Array) -> tuple[KVCache, KVCache]:
    """Both caches of a whole token buffer, in one forward without caches."""
    drafter = pair.drafter
    assert drafter is not None
    output = forward_text(pair.target, tokens, drafter.config.target_layer_ids)
    return output.kv[0], drafter.context(output.features, jnp.arange(tokens.shape[0]))


def check_caches(state: DecodeState) -> None:
    """Every committed slot of both caches equals the one rebuilt from the tokens."""
    length = int(state.length)
    rebuilt = rebuild(pair(), state.tokens)
    for cache, expected in zip((state.cache[0], state.context), rebuilt, strict=True):
        for name in ("k", "v"):
            actual, wanted = (np.asarray(getattr(c, name))[:, :, :length] for c in (cache, expected))
            np.testing.assert_allclose(actual, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", [*SCRIPTS, "drafter"])
def test_caches_equal_those_of_the_committed_prefix_after_every_round(name):
    chosen = None if name == "drafter" else script(name)
    run = stream(pair(), start(TRIE), TRIE, chosen)
    for state in run.states:
        check_caches(state)
    assert run.tokens == plain()[1]
    if name == "scattered":  # nodes that are not neighbours were accepted, more than a block of them
        paths = [record.path[: record.committed] for record in run.records]
        assert max(map(len, paths)) > BLOCK and any(np.any(np.diff(path) > 1) for path in paths)


def test_plain_decoding_goes_on_from_scattered_nodes():
    """Keys, values and positions of the accepted path are right: 20 plain steps behind it equal plain decoding."""
    run = stream(pair(), start(TRIE), TRIE, script("scattered"))
    scattered = [np.any(np.diff(record.path[: record.committed]) > 1) for record in run.records]
    state = run.states[1 + scattered.index(True)]
    first = int(state.generated)
    assert first + 20 <= NEW
    # Plain decoding needs no drafter context.
    state = dataclasses.replace(state, context=init_cache(pair().target.config.layer, 0, 0, jnp.dtype(jnp.float32)))
    for _ in range(20):
        state, _ = step(pair(), None, state, config=AR)
    begin = int(state.prompt_len)
    assert int(state.generated) == first + 20
    assert state.tokens[begin : begin + first + 20].tolist() == plain()[1][: first + 20]


def test_nothing_outlives_a_request():
    """Prompts A (long), B (short), A again on one compiled function equal fresh runs, tau too."""

    def run(row: int):
        ids, num, key = (x[row] for x in make_prompts(3))
        limit = jnp.int32(NEW)
        return jax.device_get(
            generate_scripted(
                pair(), script("mix-2", row), ids, num, key, limit, NO_EOS, config=TRIE, max_new_tokens=NEW
            )
        )

    first, other, again = run(0), run(2), run(0)
    for result, row in ((first, 0), (other, 2), (again, 0)):
        assert result.tokens.tolist() == plain(row)[1]
    jax.tree.map(np.testing.assert_array_equal, first, again)
    assert first.tau == again.tau


# Caches without a slot to spare


def fill_to_the_end() -> DecodeState:
    """A prompt and limit that leave exactly the slack that `num_slots` promises, ORACLE to the end."""
    size, capacity = 8, 3 * BLOCK + 2 + 128  # beyond a prefill chunk: prompt + capacity decides
    ids, num, key = (x[0] for x in make_prompts(1, size=size))

    def begin(config: DecodeConfig) -> DecodeState:
        def prefill(*args: jax.Array) -> DecodeState:  # a new function each time: slack is read at trace time
            return prefill_module.prefill(pair(), *args, key=key, config=config, max_new_tokens=capacity)

        return jax.jit(prefill, compiler_options=QUICK)(ids, num)

    state = begin(AR)
    tokens = stream(pair(), state, AR).tokens
    table = plain_table(ids, num, jnp.array(tokens, jnp.int32))
    run = stream(pair(), begin(TRIE), TRIE, oracle(table))
    assert run.tokens == tokens
    check_caches(run.states[-1])
    return run.states[-1]


def test_an_exactly_sized_cache_is_not_overwritten_at_its_end():
    state = fill_to_the_end()
    assert int(state.length) == 8 + 3 * BLOCK + 2 + 128 - 1
    assert state.cache[0].num_slots == 8 + 3 * BLOCK + 2 + 128 + 2 * BLOCK


def test_without_slack_the_end_would_be_overwritten(monkeypatch):
    """Control: the test above sees `dynamic_update_slice` clamp."""
    monkeypatch.setattr(prefill_module, "num_slots", lambda *args: num_slots(*args) - 2 * BLOCK)
    with pytest.raises(AssertionError):
        fill_to_the_end()
