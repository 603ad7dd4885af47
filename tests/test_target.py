"""Targets against golden numbers of Hugging Face's classes: plain, cached and with tree masks."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reanchor_jax.cache import KVCache, init_target_cache, write_rows
from reanchor_jax.checkpoint import load_target
from reanchor_jax.config import Llama3Scaling, RopeConfig
from reanchor_jax.rope import rope_frequencies
from reanchor_jax.target import Target, TargetOutput

GOLDEN = Path(__file__).parent / "golden"
RANDOM = (
    "target_llama3_rope", "target_llama_tied", "target_qwen3_tied", "target_qwen3_untied",
    "target_gemma4_dense", "target_gemma4_unified",
)  # fmt: skip
TRAINED = ("trained_qwen3_target", "trained_llama_target")
TOLERANCE = 2e-4


@pytest.fixture(scope="module", params=RANDOM + TRAINED)
def case(request) -> tuple[Target, dict[str, np.ndarray]]:
    """A loaded target with its arrays, named as in the cases of random targets."""
    folder = GOLDEN / request.param
    arrays = dict(np.load(folder / "expected.npz"))
    if request.param in TRAINED:
        names = {"input_ids": "full0_ids", "logits": "full0_logits", "hidden_states": "full0_hidden_states"}
        arrays |= {name: arrays[golden] for name, golden in names.items()}
    return load_target(folder / "model"), arrays


Cache = tuple[KVCache, ...]


def empty(target: Target, num_slots: int = 0, fill: float = 0.0) -> Cache:
    """Sliding layers have a ring for writes of 4 rows."""
    cache = init_target_cache(target.config, num_slots, target.dtype, most_rows=4)
    return jax.tree.map(lambda x: jnp.full_like(x, fill), cache)


def written(cache: Cache, output: TargetOutput) -> Cache:
    """The cache behind a forward over the first tokens, 4 rows at a time: a ring of 12 slots wraps."""
    for start in range(0, output.hidden.shape[0], 4):
        kv = jax.tree.map(lambda x, start=start: x[:, :, start : start + 4], output.kv)
        cache = tuple(write_rows(kept, rows.k, rows.v, jnp.int32(start)) for kept, rows in zip(cache, kv, strict=True))
    return cache


@jax.jit
def forward(
    target: Target, tokens: jax.Array, positions: jax.Array, cache: Cache, cache_len: jax.Array, mask: jax.Array
) -> TargetOutput:
    """A forward that taps every layer."""
    return target(tokens, positions, cache, cache_len, mask, tuple(range(target.config.num_layers)))


def causal(target: Target, tokens: jax.Array, cache: Cache, cache_len: jax.Array) -> TargetOutput:
    """A plain forward behind `cache_len` slots."""
    num = tokens.shape[0]
    positions = cache_len + jnp.arange(num, dtype=jnp.int32)
    return forward(target, tokens, positions, cache, cache_len, jnp.tril(jnp.ones((num, num), bool)))


def taps(target: Target, out: TargetOutput) -> np.ndarray:
    """Features as [L, T, D]."""
    return np.asarray(out.features).reshape(out.features.shape[0], target.config.num_layers, -1).swapaxes(0, 1)


def close(got, want, tolerance: float = TOLERANCE) -> None:
    np.testing.assert_allclose(np.asarray(got), np.asarray(want), rtol=0, atol=tolerance)


def test_hidden_states_and_logits(case):
    target, arrays = case
    out = causal(target, jnp.asarray(arrays["input_ids"]), empty(target), jnp.int32(0))
    close(target.embed(jnp.asarray(arrays["input_ids"])), arrays["hidden_states"][0], 0)
    close(taps(target, out), arrays["hidden_states"][1:])
    close(out.hidden, arrays["hidden_states"][-1])
    close(target.logits(out.hidden), arrays["logits"])
    # A softcap or an embedding scale that is lost leaves the top tokens alone, but not this.
    ids = arrays["input_ids"]
    ours, theirs = (jax.nn.log_softmax(logits)[np.arange(len(ids) - 1), ids[1:]].sum() for logits in
                    (target.logits(out.hidden), arrays["logits"]))  # fmt: skip
    close(ours, theirs, TOLERANCE * len(ids))


def test_tapped_layers_come_in_the_order_asked_for():
    target = load_target(GOLDEN / "target_qwen3_untied" / "model")
    arrays = np.load(GOLDEN / "target_qwen3_untied" / "expected.npz")
    tokens, last = jnp.asarray(arrays["input_ids"]), target.config.num_layers - 1
    num = tokens.shape[0]
    mask, positions = jnp.tril(jnp.ones((num, num), bool)), jnp.arange(num, dtype=jnp.int32)
    out = target(tokens, positions, empty(target), jnp.int32(0), mask, (last, 0, 2))
    close(out.features, np.concatenate([arrays["hidden_states"][l + 1] for l in (last, 0, 2)], axis=-1))


def test_forward_behind_a_cache(case):
    """Prefill, then the rest behind it; slots beyond the length hold garbage."""
    target, arrays = case
    tokens, split = jnp.asarray(arrays["input_ids"]), 20
    first = causal(target, tokens[:split], empty(target), jnp.int32(0))
    cache = written(empty(target, len(tokens) + 9, fill=50.0), first)
    rest = causal(target, tokens[split:], cache, jnp.int32(split))
    close(taps(target, rest), arrays["hidden_states"][1:, split:])
    close(target.logits(rest.hidden), arrays["logits"][split:])


@pytest.mark.parametrize("name", RANDOM)
def test_greedy_continuation_of_random_targets(name):
    target, arrays = load_target(GOLDEN / name / "model"), np.load(GOLDEN / name / "expected.npz")
    info = json.loads((GOLDEN / name / "case.json").read_text())
    prompt, answer = arrays["input_ids"], arrays["greedy_ids"]
    out = causal(target, jnp.asarray(np.concatenate([prompt, answer])), empty(target), jnp.int32(0))
    logits = target.logits(out.hidden)[len(prompt) - 1 : -1]
    np.testing.assert_array_equal(logits.argmax(-1), answer)
    close(logits, arrays["continuation_logits"], info["tolerance"]["continuation_logits"])


@pytest.mark.parametrize("name", TRAINED)
def test_greedy_continuations_of_trained_targets(name):
    """All prompts: every recorded token is the top token after the ones before it."""
    target, arrays = load_target(GOLDEN / name / "model"), np.load(GOLDEN / name / "expected.npz")
    lens, answers = arrays["prompt_lens"], arrays["ar_new_ids"]
    width = arrays["prompt_ids"].shape[1] + answers.shape[1]
    rows = np.zeros((len(lens), width), np.int32)
    for row, prompt, num, answer in zip(rows, arrays["prompt_ids"], lens, answers, strict=True):
        row[:num], row[num : num + len(answer)] = prompt[:num], answer
    hidden = jax.vmap(lambda row: causal(target, row, empty(target), jnp.int32(0)).hidden)(jnp.asarray(rows))
    top = np.asarray(target.logits(hidden).argmax(-1))
    for row, num, answer in zip(top, lens, answers, strict=True):
        np.testing.assert_array_equal(row[num - 1 : num - 1 + len(answer)], answer)


def random_trie(rng: np.random.Generator, num: int) -> np.ndarray:
    """Parents of a random trie; node 0 is the root, a parent comes before its children."""
    return np.array([-1, *(rng.integers(0, node) for node in range(1, num))])


def paths(parents: np.ndarray) -> list[list[int]]:
    """Nodes from the root to each node."""
    out: list[list[int]] = []
    for node, parent in enumerate(parents):
        out.append([*(out[parent] if parent >= 0 else []), node])
    return out


CHAIN_BEHIND_DEAD_SIBLING = np.array([-1, 0, 0, 2, 3, 4, 5, 6, 7])
"""Node 1 is a child of the root that leads nowhere; the chain 2, 3, ... has index = depth + 1."""
RANDOM_TRIES = [random_trie(np.random.default_rng(seed), 9) for seed in range(3)]


def ancestors(parents: np.ndarray) -> np.ndarray:
    """[N, N] bool, each node with its ancestors and itself."""
    mask = np.zeros((len(parents), len(parents)), bool)
    for node, path in enumerate(paths(parents)):
        mask[node, path] = True
    return mask


@pytest.mark.parametrize("parents", [CHAIN_BEHIND_DEAD_SIBLING, *RANDOM_TRIES])
def test_tree_mask_equals_each_path_alone(case, parents):
    """Hidden states, taps, keys and values of every node do not know of other branches."""
    target, arrays = case
    num_prompt, num = 20, len(parents)
    prompt = arrays["input_ids"][:num_prompt]
    nodes = np.random.default_rng(5).integers(0, target.config.vocab_size, num).astype(np.int32)
    first = causal(target, jnp.asarray(prompt), empty(target), jnp.int32(0))
    cache = written(empty(target, 40, fill=50.0), first)
    mask = ancestors(parents)
    depths = mask.sum(1) - 1
    positions = jnp.asarray(num_prompt + depths, jnp.int32)
    tree = forward(target, jnp.asarray(nodes), positions, cache, jnp.int32(num_prompt), jnp.asarray(mask))
    rows = np.zeros((num, num_prompt + num), np.int32)  # prompt and path, padded behind
    for row, path in zip(rows, paths(parents), strict=True):
        row[:num_prompt], row[num_prompt : num_prompt + len(path)] = prompt, nodes[path]
    alone = jax.vmap(lambda row: causal(target, row, empty(target), jnp.int32(0)))(jnp.asarray(rows))
    node, last = np.arange(num), num_prompt + depths
    close(tree.hidden, alone.hidden[node, last])
    close(tree.features, alone.features[node, last])
    for own, lone in zip(tree.kv, alone.kv, strict=True):
        close(own.k.transpose(2, 0, 1, 3), np.asarray(lone.k)[node, :, :, last])
        close(own.v.transpose(2, 0, 1, 3), np.asarray(lone.v)[node, :, :, last])


def test_position_from_the_index_would_be_seen():
    """Negative control: a chain behind a dead sibling, with positions from indices, is far off."""
    target = load_target(GOLDEN / "target_qwen3_tied" / "model")
    mask = ancestors(CHAIN_BEHIND_DEAD_SIBLING)
    tokens = jnp.arange(len(mask), dtype=jnp.int32) + 20
    run = lambda positions: forward(target, tokens, positions, empty(target), jnp.int32(0), jnp.asarray(mask)).hidden
    right = run(jnp.asarray(mask.sum(1) - 1, jnp.int32))
    wrong = run(jnp.arange(len(mask), dtype=jnp.int32))
    assert jnp.abs(right - wrong)[-1].max() > 100 * TOLERANCE


def test_bfloat16_stays_bfloat16_and_agrees_where_float32_is_sure():
    folder = GOLDEN / "trained_qwen3_target"
    target, arrays = load_target(folder / "model", dtype=jnp.bfloat16), np.load(folder / "expected.npz")
    out = causal(target, jnp.asarray(arrays["full0_ids"]), empty(target), jnp.int32(0))
    assert {out.hidden.dtype, out.features.dtype, out.kv[0].k.dtype, out.kv[0].v.dtype} == {jnp.dtype(jnp.bfloat16)}
    logits = target.logits(out.hidden)
    assert logits.dtype == jnp.float32
    want = arrays["full0_logits"]
    second, first = np.sort(want, -1)[:, -2:].T
    sure = first - second > 1.0
    assert sure.sum() > 100
    np.testing.assert_array_equal(np.asarray(logits).argmax(-1)[sure], want.argmax(-1)[sure])


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_frequencies_follow_their_definition(factor):
    """Per frequency, by wavelength: kept below 8192/4, divided above 8192/1, blended between."""
    scaling = Llama3Scaling(
        factor=factor, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
    )
    got = rope_frequencies(RopeConfig(theta=500000.0, scaling=scaling), 128)
    kinds = set()
    for i in range(64):
        freq = 500000.0 ** (-2 * i / 128)
        wavelength = 2 * np.pi / freq
        if wavelength < 8192 / 4:
            want, kind = freq, "kept"
        elif wavelength > 8192:
            want, kind = freq / factor, "divided"
        else:
            share = (8192 / wavelength - 1) / (4 - 1)
            want, kind = (1 - share) * freq / factor + share * freq, "blended"
        kinds.add(kind)
        np.testing.assert_allclose(got[i], want, rtol=2e-5)
    assert kinds == {"kept", "divided", "blended"}
