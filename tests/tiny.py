"""Tiny random pairs, prompts, and drafters whose blocks are written by the test.

The pairs are random but not dull: weights are scaled so that the next token depends on all
earlier ones and texts do not repeat at once, and norm weights are drawn around 1 so that a
missing or swapped one shows.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, get_args
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from reanchor_jax import decode
from reanchor_jax.attach import attach_blocks
from reanchor_jax.commit import retain_suffix
from reanchor_jax.config import (
    AttachRule,
    DecodeConfig,
    DrafterConfig,
    HeadConfig,
    LayerConfig,
    LMHeadConfig,
    ProportionalScaling,
    RetainRule,
    RopeConfig,
    TargetConfig,
)
from reanchor_jax.draft import Blocks
from reanchor_jax.drafter import Drafter
from reanchor_jax.loop import Generation, generate
from reanchor_jax.pair import Pair
from reanchor_jax.prefill import prefill
from reanchor_jax.state import DecodeState, RoundRecord
from reanchor_jax.target import Target

GAINS = {"q_proj": 4.0, "q_norm": 4.0, "embedding": 0.3}
"""Sharp attention over a small embedding: without them a greedy text is one token over and over."""

QUICK = {"xla_backend_optimization_level": 0}
"""Compiler options for tests that compile many programs: half the compile time, same arithmetic."""

ROPE = RopeConfig(theta=1e4, scaling=None)
LM_HEAD = LMHeadConfig()


def layer_config(*, qk_norm: bool, width: int = 32) -> LayerConfig:
    """4 query heads over 2 key/value heads of dim 8."""
    return LayerConfig(
        hidden_size=width,
        intermediate_size=2 * width,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        rms_norm_eps=1e-5,
        rope=ROPE,
        qk_norm=qk_norm,
    )


def gemma_pattern(width: int) -> tuple[LayerConfig, ...]:
    """Two sliding layers, window 8, and a full one with other heads, as Gemma 4's.

    But for the attention scale, which is 1 there: under these gains it would blow float noise up to 1e-3.
    """
    sliding = dataclasses.replace(
        layer_config(qk_norm=True, width=width),
        sliding_window=8,
        activation="gelu_tanh",
        attention_scale=0.35,
        v_norm=True,
        sandwich_norms=True,
        layer_scalar=True,
        float32_norms=True,
    )
    scaling = ProportionalScaling(partial_rotary_factor=0.5, factor=1.0)
    rope = RopeConfig(theta=1e6, scaling=scaling)
    full = dataclasses.replace(sliding, sliding_window=None, head_dim=12, num_kv_heads=1, shared_kv=True, rope=rope)
    return sliding, sliding, full


def make_pair(
    block_size: int,
    *,
    family: str = "llama",
    tied: bool = True,
    vocab_size: int = 16,
    width: int = 32,
    seed: int = 0,
    head: HeadConfig = LM_HEAD,
    drafter: dict[str, Any] | None = None,
) -> Pair:
    """A random float32 pair: a target of 3 layers (`gemma4_text`: 6) and a drafter of 2.

    `drafter` are changes to the drafter's config.
    """
    is_gemma = family.startswith("gemma4")
    pattern = gemma_pattern(width) if is_gemma else (layer_config(qk_norm=family == "qwen3", width=width),)
    target_config = TargetConfig(
        model_type=family,
        vocab_size=vocab_size,
        num_layers=6 if is_gemma else 3,
        pattern=pattern,
        tie_word_embeddings=tied,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_ids=(),
        scaled_embedding=is_gemma,
        logit_softcap=0.5 if is_gemma else None,
    )
    drafter_config = DrafterConfig(
        block_size=block_size,
        mask_token_id=vocab_size - 1,
        target_layer_ids=(target_config.num_layers - 1, 0),  # not in order; the last layer's feature is normed
        target_num_layers=target_config.num_layers,
        vocab_size=vocab_size,
        num_layers=2,
        layer=layer_config(qk_norm=True, width=width),
        head=head,
    )
    drafter_config = dataclasses.replace(drafter_config, **(drafter or {}))
    dtype = jnp.dtype(jnp.float32)
    return Pair(
        _random(lambda: Target(target_config, dtype=dtype, rngs=nnx.Rngs(0)), seed),
        _random(lambda: Drafter(drafter_config, dtype=dtype, rngs=nnx.Rngs(0)), seed + 1),
    )


def _random(make: Callable[[], Any], seed: int) -> Any:
    """The module that `make` builds, with NumPy's random weights: nothing is compiled."""
    rng = np.random.default_rng(seed)

    def fill(path: Any, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        if jnp.issubdtype(leaf.dtype, jnp.integer):  # the map of a reduced vocabulary: 0 1 3 4 6 7 ...
            return jnp.asarray(np.arange(leaf.size) * 3 // 2, leaf.dtype)
        if "norm" in jax.tree_util.keystr(path):
            values = rng.uniform(0.7, 1.3, leaf.shape)
        else:
            values = rng.normal(size=leaf.shape) * leaf.shape[-1] ** -0.5
        gain = next((gain for name, gain in GAINS.items() if name in jax.tree_util.keystr(path)), 1.0)
        return jnp.asarray(gain * values, leaf.dtype)

    abstract = jax.eval_shape(make)
    with jax.ensure_compile_time_eval():  # real arrays, also where a test first asks for them while tracing
        return jax.tree_util.tree_map_with_path(fill, abstract)


class Prompts(NamedTuple):
    """A batch of padded prompts."""

    ids: jax.Array  # [R, P]
    lens: jax.Array  # [R]
    keys: jax.Array  # [R]


def make_prompts(num_rows: int = 4, size: int = 8, vocab_size: int = 16, seed: int = 0) -> Prompts:
    """Random prompts of different lengths, padded with token 0; the first fills its row."""
    rng = np.random.default_rng(seed)
    lens = [max(1, size - 3 * row) for row in range(num_rows)]
    ids = rng.integers(0, vocab_size, (num_rows, size)) * (np.arange(size)[None, :] < np.array(lens)[:, None])
    keys = jax.random.split(jax.random.key(seed), num_rows)
    return Prompts(jnp.asarray(ids, jnp.int32), jnp.asarray(lens, jnp.int32), keys)


def run(pair: Pair, prompts: Prompts, config: DecodeConfig, max_new_tokens: int) -> Generation:
    """`generate` over a batch, as NumPy arrays with rows in front."""
    return jax.device_get(_run_rows(pair, *prompts, config=config, max_new_tokens=max_new_tokens))


@functools.partial(jax.jit, static_argnames=("config", "max_new_tokens"), compiler_options=QUICK)
def _run_rows(
    pair: Pair, ids: jax.Array, lens: jax.Array, keys: jax.Array, *, config: DecodeConfig, max_new_tokens: int
) -> Generation:
    fn = functools.partial(generate, pair, config=config, max_new_tokens=max_new_tokens)
    return jax.vmap(lambda ids, n, key: fn(ids, n, key=key))(ids, lens, keys)


def check_counts(result: Generation) -> None:
    """Counters and text of a batch add up."""
    counts, rounds = result.counts, np.asarray(result.rounds)
    used = np.arange(np.shape(counts.committed)[1])[None, :] < rounds[:, None]
    np.testing.assert_array_equal(np.asarray(counts.committed) > 0, used)
    np.testing.assert_allclose(result.tau, np.sum(counts.committed, axis=1) / np.maximum(rounds, 1), rtol=1e-6)
    total = np.sum(counts.committed, axis=1) - result.clipped
    # The first token belongs to no round; a limit of 0 drops it.
    np.testing.assert_array_equal(result.num_tokens, np.where(np.asarray(result.num_tokens) > 0, total + 1, total))
    inside = np.arange(np.shape(result.tokens)[1])[None, :] < np.asarray(result.num_tokens)[:, None]
    assert not np.any(np.asarray(result.tokens)[~inside])


# Scripted drafters: ORACLE drafts plain decoding's own tokens, ANTI none of them, MIX-k the first k.


class Script(NamedTuple):
    """What a scripted drafter proposes. All fields may be traced: one compile serves many."""

    plain: jax.Array  # [S] int32 plain decoding's token at every absolute position
    right: jax.Array  # [2] int32 right drafts of the baseline block, and of every shifted block
    lucky: jax.Array  # () bool: shifted anchors are plain decoding's tokens too


def oracle(plain: jax.Array) -> Script:
    """Every draft is accepted."""
    return Script(plain, jnp.array([10**6, 10**6], jnp.int32), jnp.bool_(False))


def anti(plain: jax.Array) -> Script:
    """No draft is accepted."""
    return Script(plain, jnp.array([0, 0], jnp.int32), jnp.bool_(False))


def mix(plain: jax.Array, right: int, shifted: int | None = None, lucky: bool = False) -> Script:
    """`right` drafts of the baseline are accepted; shifted blocks are right for `shifted` slots."""
    shifted = right if shifted is None else shifted
    return Script(plain, jnp.array([right, shifted], jnp.int32), jnp.bool_(lucky))


def scripted_blocks(script: Script, vocab_size: int) -> Callable[..., Blocks]:
    """A `draft_blocks` that reads a script instead of asking a network."""

    def draft_blocks(pair: Pair, state: DecodeState, config: DecodeConfig, noise: jax.Array | None) -> Blocks:
        assert pair.drafter is not None
        size = pair.drafter.config.block_size
        num_blocks = config.num_blocks(size)
        offsets = jnp.arange(num_blocks)
        slots = jnp.arange(size)
        positions = state.length + offsets[:, None] + slots[None, :]
        tokens = script.plain[jnp.minimum(positions, script.plain.shape[0] - 1)]
        right = script.right[jnp.minimum(offsets, 1)]
        # Slot k is draft k; a token that is off by one is never plain decoding's own.
        tokens = jnp.where(slots[None, :] > right[:, None], (tokens + 1) % vocab_size, tokens)
        anchors = jnp.concatenate([state.tokens[state.length][None], state.suffix.tokens[: num_blocks - 1]])
        anchors = jnp.where(script.lucky & (offsets > 0), tokens[:, 0], anchors)
        return Blocks(tokens.at[:, 0].set(anchors), offsets <= state.suffix.count, jnp.full(num_blocks, size))

    return draft_blocks


def scripted(script: Script | None, vocab_size: int) -> Any:
    """Context in which traced rounds draft by the script; None leaves the drafter in place."""
    if script is None:
        return contextlib.nullcontext()
    return mock.patch.object(decode, "draft_blocks", scripted_blocks(script, vocab_size))


@functools.partial(jax.jit, static_argnames=("config", "max_new_tokens"), compiler_options=QUICK)
def generate_scripted(
    pair: Pair,
    script: Script | None,
    prompt_ids: jax.Array,
    prompt_len: jax.Array,
    key: jax.Array,
    limit: jax.Array,
    eos_ids: jax.Array,
    *,
    config: DecodeConfig,
    max_new_tokens: int,
) -> Generation:
    """`generate` with a scripted drafter; one compile per config, whatever the script."""
    with scripted(script, pair.target.config.vocab_size):
        return generate(
            pair,
            prompt_ids,
            prompt_len,
            key=key,
            config=config,
            max_new_tokens=max_new_tokens,
            limit=limit,
            eos_ids=eos_ids,
        )


def plain_table(prompt_ids: jax.Array, prompt_len: jax.Array, tokens: jax.Array) -> jax.Array:
    """Prompt and plain decoding's tokens by absolute position, for `Script.plain`."""
    return jnp.concatenate([prompt_ids[: int(prompt_len)], jnp.asarray(tokens)])


# All rules in one program: the rules, static elsewhere, become an argument.

RULES = [(attach, retain) for attach in get_args(AttachRule) for retain in get_args(RetainRule)]


@contextlib.contextmanager
def rules_by_index(rule: jax.Array) -> Iterator[None]:
    """Context in which traced rounds attach and retain by the rule pair `RULES[rule]`, whatever their config says."""

    def attach(blocks: Blocks, _: AttachRule, key: jax.Array) -> Any:
        return jax.lax.switch(rule, [functools.partial(attach_blocks, blocks, name, key) for name, _ in RULES])

    def retain(trie: Any, verdict: Any, accepted: Any, _: RetainRule, num_slots: int) -> Any:
        keep = functools.partial(retain_suffix, trie, verdict, accepted)
        return jax.lax.switch(rule, [functools.partial(keep, name, num_slots) for _, name in RULES])

    with mock.patch.object(decode, "attach_blocks", attach), mock.patch.object(decode, "retain_suffix", retain):
        yield


# Streaming: the caller drives the rounds.


start_stream = jax.jit(prefill, static_argnames=("config", "max_new_tokens"), compiler_options=QUICK)


@functools.partial(jax.jit, static_argnames="config", compiler_options=QUICK)
def step(
    pair: Pair, script: Script | None, state: DecodeState, *, config: DecodeConfig
) -> tuple[DecodeState, RoundRecord]:
    """One round, drafted by the script where there is one."""
    with scripted(script, pair.target.config.vocab_size):
        return decode.decode_round(pair, state, config)


class Stream(NamedTuple):
    """A run driven from Python."""

    tokens: list[int]
    records: list[RoundRecord]
    states: list[DecodeState]
    """The state before the first round, and behind every round."""

    @property
    def committed(self) -> list[int]:
        """Committed tokens per round, the last one in full."""
        return [int(record.committed) for record in self.records]


def stream(pair: Pair, state: DecodeState, config: DecodeConfig, script: Script | None = None) -> Stream:
    """Rounds until the state is done; the text is read off the records, round by round."""
    tokens = [int(state.tokens[state.length])][: int(state.generated)]
    states, records = [state], []
    while not state.done:
        state, record = step(pair, script, state, config=config)
        host = jax.device_get(record)
        assert host.start == len(tokens)
        issued = host.target_tokens[host.path[: host.committed]]
        tokens += issued[: host.committed - host.clipped].tolist()
        records.append(host)
        states.append(state)
    return Stream(tokens, records, states)
