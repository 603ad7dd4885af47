"""What is compiled, how often, and that compiled loops stay on the device."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.extend.core import jaxprs_in_params

from reanchor_jax import loop
from reanchor_jax.config import DecodeConfig
from reanchor_jax.decode import decode_round
from reanchor_jax.loop import generate
from reanchor_jax.pair import Pair
from reanchor_jax.prefill import PREFILL_CHUNK, prefill
from reanchor_jax.state import DecodeState
from tests.tiny import QUICK, make_pair, make_prompts

CONFIG = DecodeConfig(attach="fallback", temperature=1.0, bucket_nodes=False)
NEW = 20


@functools.lru_cache
def pair() -> Pair:
    return make_pair(4, tied=False)


@functools.partial(jax.jit, compiler_options=QUICK)
def run(pair: Pair, ids: jax.Array, num: jax.Array, key: jax.Array, limit: jax.Array, eos: jax.Array) -> Any:
    return generate(pair, ids, num, key=key, config=CONFIG, max_new_tokens=NEW, limit=limit, eos_ids=eos)


def arguments(length: int) -> tuple[jax.Array, ...]:
    """A prompt, limit and EOS ids that differ from length to length."""
    ids = np.random.default_rng(length).integers(0, 16, 20)
    limit, eos = length % NEW, [length % 16, -1]
    return (
        jnp.asarray(ids, jnp.int32),
        jnp.int32(length),
        jax.random.key(length),
        jnp.int32(limit),
        jnp.array(eos, jnp.int32),
    )


def test_twenty_prompt_lengths_compile_once():
    """Neither length, key, limit, EOS ids, weights nor what is accepted compiles again."""
    run.clear_cache()
    rounds = {int(run(pair(), *arguments(length)).rounds) for length in range(1, 21)}
    assert len(rounds) > 5 and run._cache_size() == 1
    run(make_pair(4, tied=False, seed=9), *arguments(3))  # other weights, same shapes
    assert run._cache_size() == 1


def test_streamed_rounds_compile_once():
    """One program for every round of every text, whatever the trie's size: traced once, counted inside."""
    traces = []

    @functools.partial(jax.jit, compiler_options=QUICK)
    def step(pair: Pair, state: Any) -> Any:
        traces.append(None)
        return decode_round(pair, state, DecodeConfig(attach="fallback", temperature=1.0))

    nodes = set()
    start = jax.jit(functools.partial(prefill, config=CONFIG, max_new_tokens=NEW), compiler_options=QUICK)
    for length in (3, 20):
        ids, num, key, _, _ = arguments(length)
        state = start(pair(), ids, num, key=key)
        while not state.done:
            state, record = step(pair(), state)
            nodes.add(int(record.num_nodes))
    assert len(traces) == 1 and start._cache_size() == 1
    assert min(nodes) <= 4 and max(nodes) > 8  # sizes of different verification branches


def test_the_program_does_not_grow_with_depth():
    """Layers are scanned: 24 of them lower to as many lines as 12."""

    def program_lines(num_layers: int) -> int:
        def deep(network: Any) -> Any:
            config = dataclasses.replace(network.config, num_layers=num_layers)
            return jax.eval_shape(lambda: type(network)(config, dtype=jnp.dtype(jnp.float32), rngs=nnx.Rngs(0)))

        lowered = run.lower(Pair(deep(pair().target), deep(pair().drafter)), *arguments(3))
        return lowered.as_text().count("\n")

    assert program_lines(24) == program_lines(12) > 100


# Weights and logits


@functools.lru_cache
def wide_pair() -> Pair:
    """2.2 million parameters: printed as constants they take megabytes."""
    return make_pair(4, tied=False, width=256)


def test_weights_are_arguments_of_the_program():
    args = arguments(3)
    assert len(run.lower(wide_pair(), *args).as_text()) < 1_000_000
    # Control: a program that closes over the pair carries its weights, and the limit sees them.
    closed = jax.jit(lambda *args: run.__wrapped__(wide_pair(), *args))
    assert len(closed.lower(*args).as_text()) > 4_000_000


def all_shapes(jaxpr: Any) -> Iterator[tuple[int, ...]]:
    """Shapes of every intermediate value, inner programs included."""
    for equation in jaxpr.eqns:
        yield from (var.aval.shape for var in equation.outvars)
        for inner in jaxprs_in_params(equation.params):
            yield from all_shapes(inner)


def test_prefill_computes_logits_of_one_row():
    vocab_size, size = 37, 2 * PREFILL_CHUNK + 5
    pair = make_pair(4, tied=False, vocab_size=vocab_size)

    def shapes(fn: Any) -> set[tuple[int, ...]]:
        jaxpr = jax.make_jaxpr(fn)(pair, jnp.zeros(size, jnp.int32), jnp.int32(size), jax.random.key(0))
        return {shape for shape in all_shapes(jaxpr.jaxpr) if vocab_size in shape}

    def begin(pair: Pair, ids: jax.Array, num: jax.Array, key: jax.Array) -> Any:
        return prefill(pair, ids, num, key=key, config=CONFIG, max_new_tokens=NEW)

    rows = {int(np.prod(shape)) // vocab_size for shape in shapes(begin)}
    assert rows == {1}
    # Control: logits of every position would be seen.
    assert (size, vocab_size) in shapes(lambda pair, ids, num, key: pair.target.logits(pair.target.embed(ids)))


# Memory and transfers


def copied_caches(state: DecodeState) -> int:
    """Selections of a cache's shape in the program of a loop over rows of states: each copies it, in every round."""

    def rounds(state: DecodeState) -> Any:
        return loop.decode_loop(pair(), state, CONFIG, NEW)[1]

    for _ in state.length.shape:
        rounds = jax.vmap(rounds)
    shapes = {"x".join(map(str, x.shape)) for x in jax.tree.leaves((state.cache, state.context))}
    lines = jax.jit(rounds).lower(state).as_text().splitlines()
    return sum("stablehlo.select" in line and f"tensor<{shape}xf32>" in line for line in lines for shape in shapes)


@pytest.mark.parametrize("nested", [False, True])
def test_rows_under_vmap_copy_no_cache(nested, monkeypatch):
    start = functools.partial(prefill, pair(), config=CONFIG, max_new_tokens=NEW)
    state = jax.vmap(lambda ids, num, key: start(ids, num, key=key))(*make_prompts(4))
    if nested:
        state = jax.tree.map(lambda x: x.reshape(2, 2, *x.shape[1:]), state)
    assert copied_caches(state) == 0
    monkeypatch.setattr(loop, "_goes_on", lambda done: ~done)  # control: one answer for each row
    assert copied_caches(state) >= 4  # keys and values of target and drafter


def test_rows_that_end_early_wait_unchanged():
    """Under `vmap` rows of other lengths, limits and EOS ids are what they are alone, counts and all."""
    rows = [arguments(length) for length in (3, 19, 1, 8, 20)]  # limits 3, 19, 1, 8 and 0
    columns = [jnp.stack(column) for column in zip(*rows, strict=True)]
    batched = jax.vmap(run.__wrapped__, in_axes=(None, 0, 0, 0, 0, 0))
    together = jax.jit(batched, compiler_options=QUICK)(pair(), *columns)
    assert len(set(together.rounds.tolist())) > 3
    for row, args in enumerate(rows):
        alone = run(pair(), *args)
        for got, want in zip(jax.tree.leaves(together), jax.tree.leaves(alone), strict=True):
            np.testing.assert_array_equal(got[row], want)


def test_the_state_is_donated():
    """Streaming updates the caches in place: no warning (an error here), inputs gone, buffers aliased."""
    step = jax.jit(functools.partial(decode_round, config=CONFIG), donate_argnums=1, compiler_options=QUICK)
    ids, num, key, _, _ = arguments(5)
    start = jax.jit(functools.partial(prefill, config=CONFIG, max_new_tokens=NEW), compiler_options=QUICK)
    state = start(pair(), ids, num, key=key)
    memory = step.lower(pair(), state).compile().memory_analysis()
    caches = sum(x.nbytes for x in jax.tree.leaves((state.cache, state.context)))
    assert memory.alias_size_in_bytes >= caches
    for _ in range(3):
        before = state
        state, _ = step(pair(), before)
        assert all(x.is_deleted() for x in jax.tree.leaves((before.cache, before.context, before.tokens)))
    expected = run(pair(), ids, num, key, jnp.int32(NEW), jnp.array([-1, -1], jnp.int32))
    new = int(state.generated)
    assert state.tokens[5 : 5 + new].tolist() == expected.tokens[:new].tolist()


@pytest.mark.parametrize("config", [CONFIG, DecodeConfig(method="ar")], ids=lambda c: c.method)
def test_the_loop_moves_nothing_between_host_and_device(config):
    fn = jax.jit(functools.partial(generate, config=config, max_new_tokens=NEW), compiler_options=QUICK)
    ids, num, key = (x[0] for x in make_prompts(1))
    compiled = fn.lower(pair(), ids, num, key=key).compile()
    networks = pair()
    with jax.transfer_guard("disallow"):
        result = compiled(networks, ids, num, key=key)
        jax.block_until_ready(result)
        with pytest.raises(jax.errors.JaxRuntimeError, match="Disallowed host-to-device"):  # control
            compiled(networks, np.asarray(ids), num, key=key)
    assert int(result.num_tokens) == NEW
    text = compiled.as_text()
    assert "callback" not in text and "infeed" not in text and "outfeed" not in text and " send(" not in text
