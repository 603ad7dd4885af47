"""Training of Domino's and DSpark's heads on the backbone of a DFlash drafter."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reanchor_jax.checkpoint import load_drafter, save_drafter, save_target
from reanchor_jax.config import DecodeConfig, DominoConfig, DSparkConfig, HeadConfig, LMHeadConfig
from reanchor_jax.drafter import Drafter
from reanchor_jax.errors import ReanchorError
from reanchor_jax.heads import DraftNoise
from reanchor_jax.loop import generate
from reanchor_jax.pair import Pair
from reanchor_jax.target import forward_text
from reanchor_jax.training.blocks import Batch, random_blocks
from reanchor_jax.training.calibrate import LEAST_DRAFTS, Outcomes, fit_temperatures, with_temperatures
from reanchor_jax.training.data import Text
from reanchor_jax.training.features import TextFeatures, TopTokens
from reanchor_jax.training.loss import block_loss, make_vocab
from reanchor_jax.training.main import main
from reanchor_jax.training.optimizer import OptimizerConfig
from reanchor_jax.training.start import with_head
from reanchor_jax.training.trainable import is_trained
from reanchor_jax.training.trainer import TrainConfig, train
from tests.tiny import make_pair, make_prompts, run

BLOCK = 6
DOMINO = DominoConfig(emb_dim=8, gru_hidden_dim=12, shift_label=False, pure_draft_prefix_len=1)
SHIFTED = dataclasses.replace(DOMINO, shift_label=True, pure_draft_prefix_len=0)
DSPARK = {
    kind: DSparkConfig(
        markov_rank=8, markov_head_type=kind, enable_confidence_head=True, confidence_head_with_markov=True
    )
    for kind in ("vanilla", "gated", "rnn")
}
pytestmark = pytest.mark.usefixtures("quick_compiles")


@pytest.fixture(scope="module")
def pair() -> Pair:
    return make_pair(BLOCK)


def named(drafter: Drafter) -> dict[str, np.ndarray]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(drafter)
    return {jax.tree_util.keystr(path, simple=True, separator="."): np.array(leaf) for path, leaf in leaves}


def test_a_fresh_domino_head_drafts_as_its_backbone_did(pair):
    fresh = Pair(pair.target, with_head(pair.target, pair.drafter, DOMINO, seed=3))
    config = DecodeConfig(method="dflash", bucket_nodes=False)
    before, after = (run(p, make_prompts(), config, 30) for p in (pair, fresh))
    np.testing.assert_array_equal(before.counts.committed, after.counts.committed)
    assert np.any(fresh.drafter.head.proj_in[...])  # a gradient of `proj_out` finds something to work with


@pytest.mark.parametrize("freeze_backbone", [True, False])
@pytest.mark.parametrize("head", [DOMINO, DSPARK["rnn"]], ids=["domino", "dspark"])
def test_only_what_is_trained_changes(pair, head, freeze_backbone, tmp_path):
    start = with_head(pair.target, pair.drafter, head, seed=0)
    before = named(start)
    rng = np.random.default_rng(0)
    texts = [Text(tuple(rng.integers(0, 15, 4).tolist()), tuple(rng.integers(0, 15, 24).tolist())) for _ in range(4)]
    after = named(fit(pair, start, texts, tmp_path, steps=3, freeze_backbone=freeze_backbone))
    trained = {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf
        for path, leaf in jax.tree_util.tree_flatten_with_path(is_trained(start, freeze_backbone))[0]
    }
    assert trained["fc.value"] != freeze_backbone
    for name, changes in trained.items():
        if name == "fc.value":
            continue  # scaled for training and back: equal to rounding
        assert np.array_equal(before[name], after[name]) != changes, name
    assert not {name for name in before if name.startswith("head.")} <= {n for n, t in trained.items() if not t}


def test_what_cannot_be_trained_is_named(pair, tmp_path):
    mapped = make_pair(BLOCK, head=LMHeadConfig(draft_vocab_size=9)).drafter
    text = Text((1, 2, 3), tuple(range(4, 14)))
    with pytest.raises(ReanchorError, match="over 9 of 16 tokens"):
        fit(pair, mapped, [text], tmp_path / "run", steps=3)
    with pytest.raises(ReanchorError, match="leaves nothing to train"):
        fit(pair, pair.drafter, [text], tmp_path / "run", steps=3, freeze_backbone=True)
    with pytest.raises(ReanchorError, match="--head needs the backbone of a DFlash drafter"):
        with_head(pair.target, mapped, DOMINO, seed=0)
    assert not (tmp_path / "run").exists()


def fit(
    pair: Pair, start: Drafter, texts: list[Text], folder: Path, steps: int, on_step=lambda *_: None, **changes
) -> Drafter:
    settings = {"num_rows": 1, "num_anchors": 20, "checkpoint_every": 10**6, "eval_every": 10**6, "tau_prompts": 0}
    optimizer = OptimizerConfig(steps=steps, learning_rate=4e-3, warmup=2)
    config = TrainConfig(optimizer=optimizer, **{**settings, **changes})
    return train(pair.target, start, texts, texts, config, folder, echo=lambda _: None, on_step=on_step)


@pytest.mark.parametrize("head", [SHIFTED, DSPARK["gated"]], ids=["domino", "dspark"])
def test_overfit_text_is_decoded_in_whole_blocks(pair: Pair, head: HeadConfig, tmp_path: Path):
    """Alignment, masks and labels of training agree with inference, and the confidence learns what is right."""
    prompt, new = [3, 1, 4, 1, 5], 1 + 4 * BLOCK
    decode = lambda drafter, method: generate(
        Pair(pair.target, drafter), jnp.array(prompt), jnp.int32(5), key=jax.random.key(0),
        config=DecodeConfig(method=method), max_new_tokens=new,
    )  # fmt: skip
    plain = decode(None, "ar").tokens
    text = Text(tuple(prompt), tuple(plain.tolist()))
    start = with_head(pair.target, pair.drafter, head, seed=0)
    drafter = fit(pair, start, [text], tmp_path, steps=150)
    assert float(decode(start, "dflash").tau) < 3
    after = decode(drafter, "dflash")
    np.testing.assert_array_equal(after.tokens, plain)
    assert after.counts.committed[: int(after.rounds)].tolist() == [BLOCK] * 4
    loaded = load_drafter(tmp_path / "drafter")
    assert loaded.config == drafter.config
    if drafter.config.has_confidence:  # of drafts that are always right: a schedule cuts nothing
        strict = DecodeConfig(method="dflash", schedule="threshold", confidence_threshold=0.6)
        sure = generate(
            Pair(pair.target, drafter), jnp.array(prompt), jnp.int32(5), key=jax.random.key(0),
            config=strict, max_new_tokens=new,
        )  # fmt: skip
        assert sure.counts.committed[: int(sure.rounds)].tolist() == [BLOCK] * 4


def test_loss_of_a_confidence_equals_numpy(pair):
    """Right and wrong drafts, labels outside the vocabulary of training, a block that its text ends in."""
    drafter = with_head(pair.target, make_pair(BLOCK, seed=3).drafter, DSPARK["vanilla"], seed=0)
    rng = np.random.default_rng(1)
    # Enough blocks for a random drafter to be right now and then.
    batch = Batch(rng.integers(0, 15, (10, 24)).astype(np.int32), np.full(10, 4), np.array([20, 13] * 5))
    taps = drafter.config.target_layer_ids
    features = jax.vmap(lambda row: forward_text(pair.target, row, taps).features)(jnp.asarray(batch.tokens))
    key, kept = jax.random.key(3), np.arange(0, 16, 2)
    text = TextFeatures(features, TopTokens(None, None))
    loss = block_loss(drafter, pair.target, make_vocab(16, kept), batch, text, key, num_anchors=6, gamma=2.5)

    forced, labels, valid, _ = random_blocks(pair.target, drafter, batch, features, key, 6)
    logits = np.asarray(forced.hidden @ forced.rows.T + forced.extra @ forced.extra_rows.T, np.float64)[..., kept]
    labels, valid, said = np.asarray(labels), np.asarray(valid), np.asarray(forced.confidence, np.float64)
    token = total = asked = weight = 0.0
    wrong_before = set()  # blocks
    for n, k in np.argwhere(valid):
        w = np.exp(-k / 2.5)
        right = kept[np.argmax(logits[n, k])] == labels[n, k]
        if n not in wrong_before:
            asked += w * -np.log(1 / (1 + np.exp(-said[n, k] if right else said[n, k])))
            total += w
        if not right:
            wrong_before.add(n)
        if labels[n, k] in kept:
            row = logits[n, k]
            token += w * (np.log(np.exp(row).sum()) - row[labels[n, k] // 2])
            weight += w
    np.testing.assert_allclose(loss, token / weight + asked / total, rtol=1e-5)
    assert wrong_before and total > np.sum(valid[:, 0])  # drafts behind right ones were asked about too


def test_resume_with_a_confidence_exports_the_same_drafter(pair, tmp_path):
    start = with_head(pair.target, pair.drafter, DSPARK["vanilla"], seed=0)
    rng = np.random.default_rng(0)
    texts = [Text(tuple(rng.integers(0, 15, 4).tolist()), tuple(rng.integers(0, 15, 90).tolist())) for _ in range(3)]

    class Killed(BaseException):
        """Ends the run between two steps."""

    def kill(step: int, _: float) -> None:
        if step == 4:
            raise Killed

    whole = fit(pair, start, texts, tmp_path / "whole", steps=5, checkpoint_every=3)
    with pytest.raises(Killed):
        fit(pair, start, texts, tmp_path / "killed", steps=5, checkpoint_every=3, on_step=kill)
    resumed = fit(pair, start, texts, tmp_path / "killed", steps=5, checkpoint_every=3)
    assert resumed.config == whole.config == load_drafter(tmp_path / "killed" / "drafter").config
    assert set(whole.config.head.confidence_temperatures) != {1.0}  # enough drafts to fit some
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(resumed), strict=True):
        np.testing.assert_array_equal(a, b)


def test_temperatures_make_claims_true():
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 3, (20000, 3))
    right = rng.random((20000, 3)) < 1 / (1 + np.exp(-logits / np.array([2.0, 0.5, 1.0])))
    asked = np.ones_like(right)
    asked[LEAST_DRAFTS - 1 :, 2] = False
    first, second, third = fit_temperatures(Outcomes(logits, right, asked))
    assert first == pytest.approx(2.0, rel=0.05) and second == pytest.approx(0.5, rel=0.05) and third == 1.0


def test_temperatures_divide_the_confidence(pair, tmp_path):
    start = with_head(pair.target, pair.drafter, DSPARK["vanilla"], seed=0)
    temperatures = tuple(1.0 + k for k in range(BLOCK - 1))
    calibrated = with_temperatures(start, temperatures)
    save_drafter(calibrated, tmp_path, dtype=jnp.float32)
    hidden = jax.random.normal(jax.random.key(0), (2, BLOCK - 1, 32))
    plain, divided, loaded = (
        d.head(pair.target, hidden, jnp.array([1, 2]), DraftNoise(), 1.0).confidence
        for d in (start, calibrated, load_drafter(tmp_path))
    )
    np.testing.assert_allclose(divided, plain / np.array([temperatures], np.float32), rtol=1e-6)
    np.testing.assert_array_equal(divided, loaded)


def test_command_line_trains_and_continues_a_head(pair, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    save_target(pair.target, "target", dtype=jnp.float32)
    save_drafter(pair.drafter, "dflash", dtype=jnp.float32)
    rows = [{"prompt_ids": [1, 2, 3], "answer_ids": [4, 5, 6, 7, 8, 9, i]} for i in range(6)]
    Path("answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = "--target target --answers answers.jsonl --steps 2 --rows 2 --anchors 4 --held-out 2 --tau-tokens 8"
    head = "--init dflash --head dspark --rank 4 --markov vanilla --out dspark"
    assert main([*flags.split(), *head.split()]) == 0
    drafter = load_drafter("dspark/drafter")
    head = drafter.config.head
    assert isinstance(head, DSparkConfig) and (head.markov_rank, head.markov_head_type) == (4, "vanilla")
    # Three blocks of three tokens are too few to calibrate on.
    assert head.confidence_temperatures == (1.0,) * (BLOCK - 1)
    assert main([*flags.split(), "--init", "dspark/drafter", "--out", "more"]) == 0
    assert load_drafter("more/drafter").config == drafter.config
    assert main([*flags.split(), *["--init", "dspark/drafter", "--block-size", "3", "--out", "other"]]) == 2
    assert "the block size of DFlash drafters alone can be changed" in capsys.readouterr().err
