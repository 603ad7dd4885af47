"""Training blocks are what inference drafts, and their loss is what the formula says."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reanchor_jax.config import DecodeConfig, DominoConfig, DSparkConfig, HeadConfig, LMHeadConfig
from reanchor_jax.draft import draft_blocks
from reanchor_jax.heads import DraftNoise
from reanchor_jax.pair import Pair
from reanchor_jax.prefill import prefill
from reanchor_jax.target import forward_text
from reanchor_jax.training import blocks
from reanchor_jax.training import loss as loss_module
from reanchor_jax.training.blocks import Anchors, Batch, block_labels, sample_anchors
from reanchor_jax.training.features import TextFeatures, TopTokens, fold_scale, texts_forward
from reanchor_jax.training.loss import (
    Factors,
    block_loss,
    cross_entropy,
    draft_logits,
    hard_labels,
    make_factors,
    make_vocab,
    position_weights,
    score,
    soft_labels,
)
from tests.tiny import make_pair

BLOCK = 5
DOMINO = DominoConfig(emb_dim=8, gru_hidden_dim=12, shift_label=False, pure_draft_prefix_len=1)
DSPARK = DSparkConfig(
    markov_rank=8, markov_head_type="gated", enable_confidence_head=False, confidence_head_with_markov=False,
    logit_softcap=0.5,
)  # fmt: skip
HEADS = {"dflash": LMHeadConfig(), "domino": DOMINO, "dspark": DSPARK}
pytestmark = pytest.mark.usefixtures("quick_compiles")


@pytest.fixture(scope="module")
def pair() -> Pair:
    return make_pair(BLOCK, tied=False)


@pytest.fixture(scope="module")
def tokens() -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).integers(0, 15, 24), jnp.int32)


block_hidden = jax.jit(blocks.block_hidden)
start = jax.jit(prefill, static_argnames=("config", "max_new_tokens"))


@jax.jit
def features_of(pair: Pair, tokens: jax.Array) -> jax.Array:
    return forward_text(pair.target, tokens, pair.drafter.config.target_layer_ids).features


def text_of(pair: Pair, batch: Batch, num_top: int = 0) -> TextFeatures:
    tap_ids = pair.drafter.config.target_layer_ids
    return TextFeatures(
        *texts_forward(pair.target, jnp.asarray(batch.tokens), tap_ids=tap_ids, num_top=num_top, dtype="float32")
    )


@pytest.mark.parametrize("anchor", [3, 11, 19])
def test_training_block_equals_inference_drafting(pair: Pair, tokens: jax.Array, anchor: int):
    features = features_of(pair, tokens)
    hidden = block_hidden(pair.target, pair.drafter, tokens, features, jnp.array([anchor, 7]))[0, 1:]

    config = DecodeConfig(method="dflash")
    state = start(pair, tokens, jnp.int32(anchor), key=jax.random.key(0), config=config, max_new_tokens=8)
    # Prefill chose its own first token; the text's is the anchor here.
    state = dataclasses.replace(state, tokens=state.tokens.at[anchor].set(tokens[anchor]))
    context = jax.jit(lambda d, *x: d.context(*x))(pair.drafter, features, jnp.arange(tokens.shape[0]))
    np.testing.assert_allclose(context.k[:, :, :anchor], state.context.k[:, :, :anchor], atol=2e-5)
    np.testing.assert_allclose(context.v[:, :, :anchor], state.context.v[:, :, :anchor], atol=2e-5)
    drafts = jax.jit(draft_blocks, static_argnames="config")(pair, state, config=config, noise=None).tokens[0, 1:]
    np.testing.assert_array_equal(drafts, jnp.argmax(pair.target.logits(hidden), axis=-1))

    block = pair.target.embed(jnp.array([int(tokens[anchor]), *[pair.drafter.config.mask_token_id] * (BLOCK - 1)]))
    empty = jax.tree.map(lambda x: x[:, :, :0], state.context)

    def inference(cache_len: int) -> jax.Array:
        places = anchor + jnp.arange(BLOCK)
        return draft(pair.drafter, block, places, state.context, jnp.int32(cache_len), empty, jnp.int32(0))[1:]

    np.testing.assert_allclose(hidden, inference(anchor), atol=2e-5)
    # Negative control: one more or one fewer context position is far outside the tolerance.
    assert np.max(np.abs(hidden - inference(anchor - 1))) > 1e-2
    assert np.max(np.abs(hidden - inference(anchor + 1))) > 1e-2


def test_blocks_do_not_see_later_tokens_or_other_blocks(pair: Pair, tokens: jax.Array):
    anchors = jnp.array([6, 9])
    before = block_hidden(pair.target, pair.drafter, tokens, features_of(pair, tokens), anchors)
    changed = tokens.at[7:].set((tokens[7:] + 1) % 15)
    after = block_hidden(pair.target, pair.drafter, changed, features_of(pair, changed), anchors)
    np.testing.assert_allclose(before[0], after[0], atol=1e-6)
    assert np.max(np.abs(before[1] - after[1])) > 1e-2


def test_anchor_example():
    anchors = sample_anchors(jax.random.key(0), jnp.int32(5), jnp.int32(9), 16, 6)
    assert sorted(np.asarray(anchors.positions)[np.asarray(anchors.valid)].tolist()) == [5, 6, 7]
    few = sample_anchors(jax.random.key(1), jnp.int32(5), jnp.int32(9), 16, 2)
    assert np.all(few.valid) and len(set(np.asarray(few.positions).tolist())) == 2
    nothing = sample_anchors(jax.random.key(1), jnp.int32(0), jnp.int32(0), 16, 2)
    assert not np.any(nothing.valid)


def test_label_example():
    tokens = jnp.arange(100, 116)
    anchors = Anchors(jnp.array([6, 2]), jnp.array([True, False]))
    labels, valid, places = block_labels(tokens, jnp.int32(9), anchors, 4)
    assert labels[0, :2].tolist() == [107, 108] and places[0, :2].tolist() == [7, 8]
    assert valid.tolist() == [[True, True, False], [False, False, False]]


draft = jax.jit(lambda drafter, *arguments: drafter(*arguments))
target_logits = jax.jit(lambda pair, tokens: pair.target.logits(forward_text(pair.target, tokens).hidden))


def numpy_loss(
    pair: Pair, batch: Batch, key: jax.Array, num_anchors: int, gamma: float, kept: list[int], distill: float = 0.0
) -> float:
    """The same quantity in plain loops: one inference call per block, logits in float64.

    Its distillation is over the target's 3 top tokens.
    """
    total = weight = 0.0
    head = np.asarray(pair.target.lm_head[...], np.float64)
    for row, row_key in enumerate(jax.random.split(key, batch.tokens.shape[0])):
        text, length = batch.tokens[row], int(batch.lengths[row])
        anchors = sample_anchors(row_key, batch.prompt_lens[row], batch.lengths[row], len(text), num_anchors)
        context = pair.drafter.context(features_of(pair, jnp.asarray(text)), jnp.arange(len(text)))
        empty = jax.tree.map(lambda x: x[:, :, :0], context)
        for anchor, valid in zip(anchors.positions.tolist(), anchors.valid.tolist(), strict=True):
            if not valid:
                continue
            block = [int(text[anchor]), *[pair.drafter.config.mask_token_id] * (BLOCK - 1)]
            hidden = draft(
                pair.drafter,
                pair.target.embed(jnp.array(block)),
                anchor + jnp.arange(BLOCK),
                context,
                jnp.int32(anchor),
                empty,
                jnp.int32(0),
            )
            for k in range(1, BLOCK):
                if anchor + k >= length or int(text[anchor + k]) not in kept:
                    continue
                logits = head[kept] @ np.asarray(hidden[k], np.float64)
                losses = np.log(np.sum(np.exp(logits - logits.max()))) + logits.max() - logits
                label = losses[kept.index(int(text[anchor + k]))]
                target_probs = jax.nn.softmax(target_logits(pair, jnp.asarray(text))[anchor + k - 1])
                top = [i for i in np.argsort(-np.asarray(target_probs))[:3].tolist() if i in kept]
                soft = [float(target_probs[i]) * losses[kept.index(i)] for i in top]
                if distill and top:
                    mean = sum(soft) / sum(float(target_probs[i]) for i in top)
                    label = (1 - distill) * label + distill * mean
                w = np.exp(-(k - 1) / gamma)
                total += w * label
                weight += w
    return total / weight


@pytest.mark.parametrize("kept", [list(range(16)), [1, 2, 3, 5, 8, 13]])
def test_loss_equals_numpy(pair: Pair, kept: list[int]):
    rng = np.random.default_rng(1)
    batch = Batch(
        rng.integers(0, 15, (3, 24)).astype(np.int32), np.array([4, 9, 0], np.int32), np.array([20, 13, 0], np.int32)
    )
    text = text_of(pair, batch)
    key = jax.random.key(3)
    vocab = make_vocab(16, np.array(kept))
    loss = jax.jit(partial(block_loss, num_anchors=6, gamma=2.5))
    got = loss(pair.drafter, pair.target, vocab, batch, text, key)
    np.testing.assert_allclose(got, numpy_loss(pair, batch, key, 6, 2.5, kept), rtol=1e-5)


@pytest.mark.parametrize("kept", [list(range(16)), [1, 2, 3, 5, 8, 13]])
def test_distilled_loss_equals_numpy(pair: Pair, kept: list[int]):
    rng = np.random.default_rng(1)
    batch = Batch(
        rng.integers(0, 15, (2, 24)).astype(np.int32), np.array([4, 9], np.int32), np.array([20, 13], np.int32)
    )
    key, vocab, text = jax.random.key(3), make_vocab(16, np.array(kept)), text_of(pair, batch, num_top=3)
    loss = jax.jit(partial(block_loss, num_anchors=6, gamma=2.5, distill=0.7))
    got = loss(pair.drafter, pair.target, vocab, batch, text, key)
    np.testing.assert_allclose(got, numpy_loss(pair, batch, key, 6, 2.5, kept, 0.7), rtol=1e-5)
    assert abs(got - numpy_loss(pair, batch, key, 6, 2.5, kept)) > 1e-2


def test_soft_label_example():
    top = TopTokens(jnp.array([[5, 9, -1], [-1, -1, -1]]), jnp.array([[0.6, 0.2, 0.1], [0.5, 0.3, 0.1]]))
    labels = soft_labels(jnp.array([5, 7]), top, 0.5)
    np.testing.assert_allclose(labels.shares, [[0.5, 0.375, 0.125, 0], [1, 0, 0, 0]], atol=1e-6)
    assert labels.ids[0, :3].tolist() == [5, 5, 9] and labels.ids[1, 0] == 7


def test_weights():
    np.testing.assert_allclose(position_weights(4, 2.0), [1.0, np.exp(-0.5), np.exp(-1.0)], rtol=1e-6)


@pytest.mark.parametrize("cap", [None, 1.5])
@pytest.mark.parametrize(("chunk", "extra", "soft"), [(3, 3, True), (7, 0, False), (100, 3, False), (100, 0, True)])
def test_head_gradient_equals_autodiff(
    chunk: int, extra: int, soft: bool, cap: float | None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(loss_module, "CHUNK_ROWS", chunk)
    rng = np.random.default_rng(2)
    sizes = ((7, 4), (9, 4), (7, extra), (9, extra))
    hidden, rows, *extras = (jnp.asarray(rng.normal(size=size), jnp.float32) for size in sizes)
    ids, weights = jnp.asarray(rng.integers(0, 9, 7)), jnp.asarray(rng.uniform(size=7), jnp.float32)
    labels = hard_labels(ids)
    if soft:  # a token twice in a label, as where the text's is the target's first
        top = TopTokens(jnp.stack([ids, (ids + 2) % 9, jnp.full(7, -1)], axis=1), jnp.full((7, 3), 0.3))
        labels = soft_labels(ids, top, 0.6)

    def logits(hidden, extra, extra_rows):
        base = hidden @ rows.T
        return (base if cap is None else cap * jnp.tanh(base / cap)) + extra @ extra_rows.T

    def plain(*arguments):
        log_probs = jax.nn.log_softmax(logits(*arguments))
        return -3 * jnp.sum(weights[:, None] * log_probs[jnp.arange(7)[:, None], labels.ids] * labels.shares)

    def own(hidden, extra, extra_rows):
        return 3 * cross_entropy(Factors(hidden, rows, extra, extra_rows, cap), labels, weights)[0]

    np.testing.assert_allclose(own(hidden, *extras), plain(hidden, *extras), rtol=1e-5)
    gradients = (jax.grad(f, (0, 1, 2))(hidden, *extras) for f in (own, plain))
    for got, want in zip(*gradients, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    # The whole gradient's slope in a random direction, by differences.
    arguments = (hidden, *extras)
    direction = [jnp.asarray(rng.normal(size=x.shape), jnp.float32) for x in arguments]
    ends = [own(*(x + by * d for x, d in zip(arguments, direction, strict=True))) for by in (1e-3, -1e-3)]
    slope = sum(jnp.vdot(g, d) for g, d in zip(jax.grad(own, (0, 1, 2))(*arguments), direction, strict=True))
    np.testing.assert_allclose(slope, (ends[0] - ends[1]) / 2e-3, rtol=1e-2)
    right = np.argmax(logits(*arguments), axis=1) == ids
    factors = Factors(hidden, rows, *extras, cap)
    np.testing.assert_array_equal(cross_entropy(factors, labels, weights)[1], right)
    np.testing.assert_array_equal(score(factors, ids).right, right)


@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS)
def test_forced_logits_are_those_of_drafting(head: HeadConfig):
    """Under softcaps: the target's, and of DSpark the head's own."""
    pair = make_pair(BLOCK, family="gemma4_text", head=head)
    slots = pair.drafter.config.num_slots
    hidden = jnp.asarray(np.random.default_rng(0).normal(size=(2, slots, 32)), jnp.float32)
    anchors = jnp.array([3, 5])
    drafts = jax.jit(lambda pair, *x: pair.drafter.head(pair.target, *x, DraftNoise(), 1.0))(pair, hidden, anchors)
    before = jnp.concatenate([anchors[:, None], drafts.tokens[:, :-1]], axis=1)
    forced = jax.jit(lambda pair, *x: pair.drafter.head.force(pair.target, *x))(pair, hidden, before)
    factors = make_factors(forced, make_vocab(16, None))
    logits, base = draft_logits(factors, factors.hidden, factors.extra)
    np.testing.assert_allclose(logits.reshape(drafts.logits.shape), drafts.logits, atol=1e-5)
    assert np.max(np.abs(base)) < 0.5 < np.max(np.abs(factors.hidden @ factors.rows.T))


def test_gradient_leaves_no_parameter_out(pair: Pair):
    batch = Batch(
        np.random.default_rng(1).integers(0, 15, (2, 24)).astype(np.int32),
        np.array([4, 9], np.int32),
        np.array([20, 22], np.int32),
    )
    text = text_of(pair, batch)
    loss = partial(block_loss, num_anchors=4, gamma=4.0)
    gradient = jax.jit(jax.grad(loss))(pair.drafter, pair.target, make_vocab(16, None), batch, text, jax.random.key(0))
    for path, leaf in jax.tree_util.tree_flatten_with_path(gradient)[0]:
        assert np.all(np.isfinite(leaf)) and np.any(leaf), jax.tree_util.keystr(path)


def test_scale_in_features_or_in_fc_is_the_same_drafter(pair: Pair, tokens: jax.Array):
    features = features_of(pair, tokens)
    scale = jnp.asarray(np.random.default_rng(0).uniform(0.1, 300.0, features.shape[1]), jnp.float32)
    before = block_hidden(pair.target, pair.drafter, tokens, features, jnp.array([5]))
    scaled = fold_scale(pair.drafter, scale)
    after = block_hidden(pair.target, scaled, tokens, features / scale[None], jnp.array([5]))
    np.testing.assert_allclose(before, after, atol=2e-5)
    back = fold_scale(scaled, 1.0 / scale)
    np.testing.assert_allclose(back.fc[...], pair.drafter.fc[...], rtol=1e-6)
