"""Draft-OPD: rollouts are what the decoder did, the loss is the formula's, runs resume, drafters get better."""

from __future__ import annotations

import dataclasses
import json
import types
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from reanchor_jax.checkpoint import load_drafter, save_drafter, save_target
from reanchor_jax.drafter import Drafter
from reanchor_jax.errors import ReanchorError
from reanchor_jax.pair import Pair
from reanchor_jax.target import forward_text
from reanchor_jax.training import loss as loss_module
from reanchor_jax.training.blocks import block_hidden
from reanchor_jax.training.data import Text, make_batches
from reanchor_jax.training.draft_opd import DraftOPDConfig, draft_opd
from reanchor_jax.training.loss import Factors
from reanchor_jax.training.main import main
from reanchor_jax.training.optimizer import OptimizerConfig
from reanchor_jax.training.replay import Replay, discard_weights, divergences, replay_loss, replay_states, sample_blocks
from reanchor_jax.training.rollout import Rollout, load_rollout, roll_out, rollout_config, save_rollout, scored_drafts
from tests.tiny import make_pair, start_stream, stream

BLOCK = 4
NEW = 24
pytestmark = pytest.mark.usefixtures("quick_compiles")


@pytest.fixture(scope="module")
def pair() -> Pair:
    return make_pair(BLOCK)


def random_prompts(count: int) -> list[tuple[int, ...]]:
    rng = np.random.default_rng(5)
    return [tuple(rng.integers(0, 15, 4 + n).tolist()) for n in range(count)]


def test_rollout_equals_the_decoders_records(tmp_path: Path):
    pair = make_pair(BLOCK)
    pair.target.config = dataclasses.replace(pair.target.config, eos_token_ids=(3,))
    (batch,) = make_batches([Text(prompt, ()) for prompt in random_prompts(3)], 4, seed=0)
    config, key = rollout_config(1.0), jax.random.key(1)
    rollout = roll_out(pair, batch, key, config=config, max_new_tokens=NEW)
    save_rollout(rollout, tmp_path / "0" / "0.npz")
    for a, b in zip(rollout, load_rollout(tmp_path / "0" / "0.npz"), strict=True):
        np.testing.assert_array_equal(a, b)

    ended = 0
    for row, row_key in enumerate(jax.random.split(key, 4)):
        own = rollout.rows == row
        length = int(batch.lengths[row])
        if not length:
            assert not own.any() and rollout.lengths[row] == 0
            continue
        state = start_stream(
            pair, jnp.asarray(batch.tokens[row]), jnp.int32(length), key=row_key, config=config, max_new_tokens=NEW
        )
        plain = stream(pair, state, config)
        text = [*batch.tokens[row, :length].tolist(), *plain.tokens]
        assert rollout.tokens[row, : rollout.lengths[row]].tolist() == text
        assert rollout.starts[own].tolist() == [int(s.length) for s in plain.states[:-1]]
        assert rollout.accepted[own].tolist() == [int(r.accepted) for r in plain.records]
        np.testing.assert_array_equal(rollout.proposals[own], [r.blocks[0, 1:] for r in plain.records])
        # What the text says at a block's accepted drafts is what was drafted.
        for start, proposal, accepted in zip(
            rollout.starts[own], rollout.proposals[own], rollout.accepted[own], strict=True
        ):
            inside = text[start + 1 : start + 1 + accepted]
            assert inside == proposal[: len(inside)].tolist()
        ended += text[-1] == 3
    assert ended and np.ptp(rollout.accepted) > 0


def test_drafts_behind_the_end_are_not_scored():
    proposals = np.array([[5, 3, 7, 8], [5, 3, 7, 8], [3, 1, 1, 3]])
    assert scored_drafts(proposals, np.array([3, 1, 4]), (3, 9)).tolist() == [2, 4, 1]
    assert scored_drafts(proposals, np.array([3, 1, 4]), ()).tolist() == [4, 4, 4]


def test_blocks_are_drawn_once_each():
    rollout = Rollout(
        np.zeros((3, 8), int), np.array([8, 8, 0]), np.array([0, 0, 0, 1]), np.array([2, 4, 5, 6]),
        np.arange(12).reshape(4, 3), np.array([1, 0, 2, 3]), np.array([3, 3, 3, 2]),
    )  # fmt: skip
    replay = sample_blocks(rollout, 2, np.random.default_rng(0))
    assert len({*replay.starts[0].tolist()}) == 2 and {*replay.starts[0].tolist()} < {2, 4, 5}
    assert replay.starts[1].tolist() == [6, 0] and replay.proposals[1, 0].tolist() == [9, 10, 11]
    assert replay.scored.tolist() == [[3, 3], [2, 0], [0, 0]] and replay.accepted[1].tolist() == [3, 0]


# (accepted, scored) of two blocks of each of two texts.
CASES = {
    "mixed": ([[1, 3], [0, 2]], [[3, 3], [3, 3]]),
    "all accepted": ([[3, 3], [3, 3]], [[3, 3], [3, 0]]),
    "none accepted": ([[0, 0], [0, 0]], [[3, 3], [3, 0]]),
    "ends": ([[3, 1], [2, 0]], [[2, 3], [1, 0]]),
    "empty": ([[0, 0], [0, 0]], [[0, 0], [0, 0]]),
}
GAMMA = 0.7


@pytest.fixture(scope="module")
def gemma() -> Pair:
    """A target with sliding windows shorter than the text, and a softcap that squashes its logits."""
    pair = make_pair(BLOCK, family="gemma4_text")
    pair.target.config = dataclasses.replace(pair.target.config, logit_softcap=1.5)
    return pair


def replay_of(case: str) -> Replay:
    rng = np.random.default_rng(3)
    accepted, scored = CASES[case]
    tokens, proposals = rng.integers(0, 15, (2, 24)), rng.integers(0, 15, (2, 2, BLOCK - 1))
    starts = np.array([[5, 17], [11, 12]])
    return Replay(*(np.asarray(x, np.int32) for x in (tokens, starts, proposals, accepted, scored)))


loss_and_gradient = jax.jit(jax.value_and_grad(partial(replay_loss, gamma=GAMMA), has_aux=True))
texts_forward = jax.jit(forward_text, static_argnames="tap_ids")
draft_hidden = jax.jit(block_hidden)


def numpy_loss(pair: Pair, replay: Replay) -> tuple[float, float]:
    """ForwardKL and ReverseKL in plain loops: one causal forward for each block, distributions in float64."""
    sums = np.zeros(2)
    weights = np.zeros(2)
    rows = np.asarray(pair.target.head_rows, np.float64)
    cap = pair.target.config.logit_softcap

    def log_probs(hidden) -> np.ndarray:
        logits = cap * np.tanh(rows @ np.asarray(hidden, np.float64) / cap)
        return logits - np.log(np.sum(np.exp(logits)))

    taps = pair.drafter.config.target_layer_ids
    for row, text in enumerate(replay.tokens):
        features = texts_forward(pair.target, jnp.asarray(np.append(text, [0] * BLOCK)), taps).features[: len(text)]
        starts = jnp.asarray(replay.starts[row])
        drafted = draft_hidden(pair.target, pair.drafter, jnp.asarray(text), features, starts)
        for n, start in enumerate(replay.starts[row]):
            whole = np.zeros(len(text) + BLOCK, np.int32)
            whole[: start + 1] = text[: start + 1]
            whole[start + 1 : start + BLOCK] = replay.proposals[row, n]
            hidden = texts_forward(pair.target, jnp.asarray(whole), taps).hidden
            for k in range(1, BLOCK):
                if k > replay.scored[row, n]:
                    continue
                p, q = log_probs(hidden[start + k - 1]), log_probs(drafted[n, k])
                if k <= replay.accepted[row, n]:
                    sums[0] += np.sum(np.exp(p) * (p - q))
                    weights[0] += 1
                else:
                    sums[1] += GAMMA ** (k - 1) * np.sum(np.exp(q) * (q - p))
                    weights[1] += GAMMA ** (k - 1)
    return tuple(np.divide(sums, weights, out=np.zeros(2), where=weights > 0))


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradient_equal_numpy(gemma: Pair, case: str):
    replay, width = replay_of(case), gemma.drafter.fc[...].shape[1]
    taps = gemma.drafter.config.target_layer_ids
    states = replay_states(gemma.target, replay, jnp.ones(width), tap_ids=taps)
    (loss, seen), gradient = loss_and_gradient(gemma.drafter, gemma.target, replay, states)
    forward, reverse = numpy_loss(gemma, replay)
    np.testing.assert_allclose([seen["forward_kl"], seen["reverse_kl"]], [forward, reverse], rtol=2e-4, atol=1e-6)
    np.testing.assert_allclose(loss, (forward + reverse) / 2, rtol=2e-4, atol=1e-6)
    nothing = {"all accepted": (True, False), "none accepted": (False, True), "empty": (False, False)}
    assert (forward > 0.01, reverse > 0.01) == nothing.get(case, (True, True))
    if case == "empty":
        assert float(loss) == 0 and not any(np.any(leaf) for leaf in jax.tree.leaves(gradient))
        return
    assert all(np.any(leaf) for leaf in jax.tree.leaves(gradient))

    rng, eps = np.random.default_rng(0), 2e-3
    direction = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), gemma.drafter)
    moved = [jax.tree.map(lambda x, d, by=by: x + by * d, gemma.drafter, direction) for by in (eps, -eps)]
    ends = [loss_and_gradient(drafter, gemma.target, replay, states) for drafter in moved]
    difference = float(ends[0][0][0] - ends[1][0][0]) / (2 * eps)
    slope = sum(float(jnp.sum(g * d)) for g, d in zip(*map(jax.tree.leaves, (gradient, direction)), strict=True))
    np.testing.assert_allclose(slope, difference, rtol=1e-2)
    assert abs(difference) > 0.1


@pytest.mark.parametrize(("chunk", "extra", "cap"), [(3, 0, None), (4, 3, 1.5), (100, 3, None), (100, 0, 1.5)])
def test_divergences_and_their_gradients_equal_numpy(chunk, extra, cap, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(loss_module, "CHUNK_ROWS", chunk)
    rng = np.random.default_rng(2)
    sizes = ((7, 4), (9, 4), (7, extra), (9, extra), (7, 9))
    arrays = [rng.normal(size=size) for size in sizes]
    hidden, rows, extras, extra_rows, p_logits = arrays
    forward, scale = np.array([1, 0, 0, 1, 1, 0, 1], bool), rng.uniform(size=7)
    target = types.SimpleNamespace(logits=lambda x: x)

    def total(hidden, extras, extra_rows):
        kl = divergences(Factors(hidden, a32[1], extras, extra_rows, cap), target, a32[4], jnp.asarray(forward))
        return jnp.sum(kl * jnp.asarray(scale, jnp.float32)), kl

    a32 = [jnp.asarray(x, jnp.float32) for x in arrays]
    (_, kl), got = jax.value_and_grad(total, (0, 1, 2), has_aux=True)(a32[0], a32[2], a32[3])

    base = hidden @ rows.T
    base, slope = (base, 1.0) if cap is None else (cap * np.tanh(base / cap), 1 - np.tanh(base / cap) ** 2)
    q = base + extras @ extra_rows.T
    q, p = (x - np.log(np.exp(x).sum(1, keepdims=True)) for x in (q, p_logits))
    gap = np.exp(q) * (q - p)
    want = np.where(forward, (np.exp(p) * (p - q)).sum(1), gap.sum(1))
    np.testing.assert_allclose(kl, want, rtol=1e-5, atol=1e-6)
    d = np.where(forward[:, None], np.exp(q) - np.exp(p), gap - np.exp(q) * gap.sum(1, keepdims=True)) * scale[:, None]
    for a, b in zip(got, ((d * slope) @ rows, d @ extra_rows, d.T @ extras), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_weights():
    np.testing.assert_allclose(discard_weights(5, 0.5), [1, 0.5, 0.25, 0.125])
    np.testing.assert_array_equal(discard_weights(4, 1.0), 1)


def fit(pair: Pair, folder: Path, on_step=lambda step, loss: None, **changes) -> Drafter:
    rng = np.random.default_rng(1)
    held_out = [Text(prompt, tuple(rng.integers(0, 15, 20).tolist())) for prompt in random_prompts(2)]
    settings = {
        "optimizer": OptimizerConfig(steps=7, learning_rate=3e-3, warmup=2),
        **{"num_rows": 2, "num_anchors": 24, "tau_prompts": 0, "rollout_tokens": NEW, "rollout_batches": 2},
        **{"log_every": 1, "eval_every": 10**6, "checkpoint_every": 3},
    }
    config = DraftOPDConfig(**{**settings, **changes})
    prompts = random_prompts(5)
    return draft_opd(
        pair.target, pair.drafter, prompts, held_out, config, folder, echo=lambda _: None, on_step=on_step
    )  # fmt: skip


def logged(folder: Path) -> list[dict]:
    rows = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if k != "blocks_per_second"} for row in rows]


def test_resume_is_bit_for_bit(pair: Pair, tmp_path: Path):
    """Killed in the second step of a phase; and in the middle of its rollouts, of which one file is left."""
    whole = fit(pair, tmp_path / "whole")

    class Killed(BaseException):
        """Ends the run between two steps."""

    def kill(step: int, _: float) -> None:
        if step == 5:
            raise Killed

    with pytest.raises(Killed):
        fit(pair, tmp_path / "killed", on_step=kill)
    rollouts = tmp_path / "killed" / "rollouts"
    assert sorted(path.name for path in rollouts.iterdir()) == ["00000", "00001", "00002"]
    (rollouts / "00002" / "00001.npz").unlink()
    (rollouts / "00002" / ".00001.npz.partial").write_bytes(b"half")
    before = (rollouts / "00002" / "00000.npz").stat().st_mtime_ns
    seen = []
    resumed = fit(pair, tmp_path / "killed", on_step=lambda step, _: seen.append(step))
    assert seen == [4, 5, 6, 7]
    assert (rollouts / "00002" / "00000.npz").stat().st_mtime_ns == before
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(resumed), strict=True):
        np.testing.assert_array_equal(a, b)
    files = sorted((tmp_path / "whole" / "rollouts").rglob("*.npz"))
    assert len(files) == 8
    for path in files:
        other = load_rollout(rollouts / path.relative_to(tmp_path / "whole" / "rollouts"))
        for a, b in zip(load_rollout(path), other, strict=True):
            np.testing.assert_array_equal(a, b)
    assert logged(tmp_path / "whole") == logged(tmp_path / "killed")
    phases = [row["rollout"]["phase"] for row in logged(tmp_path / "whole") if "rollout" in row]
    assert phases == [0, 1, 2, 3]

    with pytest.raises(ReanchorError, match=r"holds a run with replay_gamma 0\.9, got 0\.5"):
        fit(pair, tmp_path / "killed", replay_gamma=0.5)


def test_missing_and_damaged_rollouts_are_named(tmp_path: Path):
    with pytest.raises(ReanchorError, match=r"0\.npz is missing"):
        load_rollout(tmp_path / "0.npz")
    (tmp_path / "0.npz").write_bytes(b"PK\x03\x04 no archive")
    with pytest.raises(ReanchorError, match=r"0\.npz is damaged"):
        load_rollout(tmp_path / "0.npz")


def check_verdicts(pair: Pair, rolled: Rollout) -> None:
    """Replay repeats verification at T = 0: the target's top token is each accepted draft, never the first rejected."""
    replay, taps = sample_blocks(rolled, 24, np.random.default_rng(0)), pair.drafter.config.target_layer_ids
    states = replay_states(pair.target, replay, jnp.ones(pair.drafter.fc[...].shape[1]), tap_ids=taps)
    top = np.argmax(pair.target.logits(states.hidden), axis=-1)
    slots, accepted = np.arange(BLOCK - 1), replay.accepted[..., None]
    scored = slots < replay.scored[..., None]
    same = top == replay.proposals
    assert np.all(same[scored & (slots < accepted)]) and not np.any(same[scored & (slots == accepted)])
    assert np.sum(scored & (slots < accepted)) > 3


def test_command_line_raises_tau_on_its_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    pair = make_pair(BLOCK)
    for network, norm in ((pair.target, "final_norm"), (pair.drafter, "norm")):  # likely tokens: else top ones are luck
        setattr(network, norm, nnx.Param(4 * getattr(network, norm)[...]))
    save_target(pair.target, "target", dtype=jnp.float32)
    save_drafter(pair.drafter, "dflash", dtype=jnp.float32)
    prompts = random_prompts(4)
    Path("prompts.jsonl").write_text("".join(json.dumps({"prompt_ids": ids}) + "\n" for ids in prompts))
    flags = "--recipe draft-opd --target target --init dflash --prompts prompts.jsonl --out out --held-out 2"
    flags += f" --steps 120 --rows 2 --anchors 24 --learning-rate 1e-2 --gamma 0.8 --max-new-tokens {NEW}"
    flags += " --rollout-batches 1 --passes 5 --tau-prompts 0 --log-every 60"
    assert main(flags.split()) == 0
    rows = logged(Path("out"))
    assert len([row for row in rows if "rollout" in row]) == 24
    rolled = load_rollout(Path("out/rollouts/00000/00000.npz"))
    check_verdicts(pair, rolled)

    prompts = [tuple(rolled.tokens[r, : rolled.starts[rolled.rows == r][0]].tolist()) for r in range(2)]
    (batch,) = make_batches([Text(ids, ()) for ids in prompts], 2, seed=0)
    decode = lambda drafter: roll_out(
        Pair(pair.target, drafter), batch, jax.random.key(0), config=rollout_config(0.0), max_new_tokens=NEW
    )  # fmt: skip
    before, after = (np.mean(decode(drafter).accepted + 1) for drafter in (pair.drafter, load_drafter("out/drafter")))
    assert before < 2.5 and after > before + 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--recipe draft-opd", "goes on from a drafter; name it with --init"),
        ("--recipe draft-opd --init x --gamma 1.5", "--gamma is 1.5; expected a number above 0, at most 1"),
        ("--recipe draft-opd --init x --head domino", "--head does not go with --recipe draft-opd"),
        ("--recipe draft-opd --init x --train-vocab 9", "--train-vocab does not go with --recipe draft-opd"),
        ("--recipe draft-opd --init x --layers 2", "--layers is of a new drafter"),
        ("--recipe draft-opd --init x --max-len 64 --max-new-tokens 64", "--max-new-tokens is 64; expected fewer"),
        ("--recipe draft-opd --init x --temperature 1e40", "temperature is 1e+40; expected 0 or a number from"),
        ("--recipe draft-opd --init x --text y", "--text belongs to --recipe tiny-pair"),
        ("--init x --passes 2", "--passes belongs to --recipe draft-opd"),
    ],
)
def test_flags_that_do_not_fit(flags: str, message: str, capsys: pytest.CaptureFixture, tmp_path: Path):
    assert main([*flags.split(), "--answers", "none.jsonl", "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_confidence_is_refused(tmp_path: Path):
    from reanchor_jax.config import DSparkConfig

    head = DSparkConfig(
        markov_rank=0, markov_head_type=None, enable_confidence_head=True, confidence_head_with_markov=False
    )
    with pytest.raises(ReanchorError, match="a confidence, which draft-opd does not train"):
        fit(make_pair(BLOCK, head=head), tmp_path / "run")
    assert not (tmp_path / "run").exists()
