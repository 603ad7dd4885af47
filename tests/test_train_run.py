"""Training runs: overfitting, exact resume, interruption, the target's own answers."""

from __future__ import annotations

import dataclasses
import functools
import gzip
import json
import os
import signal
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reanchor_jax.checkpoint import load_drafter, save_target
from reanchor_jax.config import DecodeConfig
from reanchor_jax.drafter import Drafter
from reanchor_jax.errors import ReanchorError
from reanchor_jax.loop import generate
from reanchor_jax.pair import Pair
from reanchor_jax.training import trainer
from reanchor_jax.training.answers import Prompt, generate_answers
from reanchor_jax.training.checkpoints import Checkpoints
from reanchor_jax.training.data import Text, batch_index, frequent_tokens, make_batches, read_answers, split_held_out
from reanchor_jax.training.evaluate import make_decoder
from reanchor_jax.training.main import main
from reanchor_jax.training.optimizer import OptimizerConfig, make_optimizer
from reanchor_jax.training.start import new_drafter, new_drafter_config, spread_layer_ids
from reanchor_jax.training.target_training import byte_target_config, train_target
from reanchor_jax.training.tiny_pair import TinyPairConfig
from reanchor_jax.training.trainer import TrainConfig, train
from tests.tiny import make_pair

BLOCK = 6
pytestmark = pytest.mark.usefixtures("quick_compiles")


@pytest.fixture(scope="module")
def pair() -> Pair:
    return make_pair(BLOCK)


def random_texts(count: int) -> list[Text]:
    rng = np.random.default_rng(5)
    return [Text(tuple(rng.integers(0, 15, 5).tolist()), tuple(rng.integers(0, 15, 30).tolist())) for _ in range(count)]


def config(steps: int, **changes) -> TrainConfig:
    settings = {
        "optimizer": OptimizerConfig(steps=steps, learning_rate=3e-3, warmup=2),
        "num_rows": 2,
        "num_anchors": 8,
        "log_every": 1,
        "eval_every": 10**6,
        "checkpoint_every": 3,
        "tau_prompts": 0,
    }
    return TrainConfig(**{**settings, **changes})


def leaves(drafter: Drafter) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(drafter)]


def logged(folder: Path) -> list[dict]:
    rows = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if k != "blocks_per_second"} for row in rows]


def run(pair: Pair, folder: Path, steps: int = 7, on_step=lambda step, loss: None, **changes) -> Drafter:
    texts = random_texts(9)
    return train(
        pair.target, pair.drafter, texts[2:], texts[:2], config(steps, **changes), folder, echo=lambda _: None,
        on_step=on_step,
    )  # fmt: skip


def test_overfit_text_is_decoded_in_whole_blocks(pair: Pair, tmp_path: Path):
    """Mask, labels and positions of training agree with inference: what was learned is accepted."""
    prompt, new = [3, 1, 4, 1, 5], 1 + 4 * BLOCK
    decode = lambda drafter, method: generate(
        Pair(pair.target, drafter), jnp.array(prompt), jnp.int32(5), key=jax.random.key(0),
        config=DecodeConfig(method=method), max_new_tokens=new,
    )  # fmt: skip
    plain = decode(None, "ar").tokens
    text = Text(tuple(prompt), tuple(plain.tolist()))
    settings = config(150, num_rows=1, num_anchors=24, checkpoint_every=10**6)
    drafter = train(pair.target, pair.drafter, [text], [text], settings, tmp_path, echo=lambda _: None)
    before, after = decode(pair.drafter, "dflash"), decode(drafter, "dflash")
    np.testing.assert_array_equal(after.tokens, plain)
    assert float(before.tau) < 3
    assert after.counts.committed[: int(after.rounds)].tolist() == [BLOCK] * 4
    record = logged(tmp_path)[-1]["held_out"]
    assert min(record["accuracy"]) == 1.0 and record["proxy_tau"] == BLOCK


def test_resume_is_bit_for_bit(pair: Pair, tmp_path: Path):
    whole = run(pair, tmp_path / "whole", distill=0.5)

    class Killed(BaseException):
        """Ends the run between two steps, as SIGKILL does: nothing more is written."""

    def kill(step: int, _: float) -> None:
        if step == 5:
            raise Killed

    with pytest.raises(Killed):
        run(pair, tmp_path / "killed", on_step=kill, distill=0.5)
    # Features are computed again where they are lost, with the same bits.
    lost = sorted((tmp_path / "killed" / "features").glob("*.safetensors"))[::2]
    kept = {path: path.read_bytes() for path in lost}
    for path in lost:
        path.unlink()
    # What a kill in the middle of a save leaves behind is not taken for a checkpoint.
    half = tmp_path / "killed" / "checkpoints" / "6.orbax-checkpoint-tmp-1"
    half.mkdir()
    (half / "_METADATA").write_text("{")
    with (tmp_path / "killed" / "log.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')
    seen = []
    resumed = run(pair, tmp_path / "killed", on_step=lambda step, _: seen.append(step), distill=0.5)
    assert seen == [4, 5, 6, 7]
    assert {path: path.read_bytes() for path in lost} == kept
    for a, b in zip(leaves(whole), leaves(resumed), strict=True):
        np.testing.assert_array_equal(a, b)
    assert logged(tmp_path / "whole") == logged(tmp_path / "killed")
    exported = load_drafter(tmp_path / "killed" / "drafter")
    np.testing.assert_array_equal(exported.fc[...], whole.fc[...].astype(jnp.bfloat16).astype(jnp.float32))


def test_interrupt_saves_and_goes_on(pair: Pair, tmp_path: Path):
    whole = run(pair, tmp_path / "whole")

    def interrupt(step: int, _: float) -> None:
        if step == 4:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run(pair, tmp_path / "stopped", on_step=interrupt)
    assert (tmp_path / "stopped" / "checkpoints" / "4").is_dir()
    seen = []
    resumed = run(pair, tmp_path / "stopped", on_step=lambda step, _: seen.append(step))
    assert seen == [5, 6, 7]
    for a, b in zip(leaves(whole), leaves(resumed), strict=True):
        np.testing.assert_array_equal(a, b)


def test_resume_with_other_settings_is_refused(pair: Pair, tmp_path: Path):
    run(pair, tmp_path, steps=3)
    with pytest.raises(ReanchorError, match=r"holds a run with gamma 4\.0, got 5\.0"):
        run(pair, tmp_path, steps=3, gamma=5.0)
    with pytest.raises(ReanchorError, match="holds a run with optimizer"):
        run(pair, tmp_path, steps=4)
    for damaged in ("[1]", "[" * 99_999, ""):
        (tmp_path / "train.json").write_text(damaged)
        with pytest.raises(ReanchorError, match=r"train\.json is damaged; name another folder with --out"):
            run(pair, tmp_path, steps=3)


def test_a_checkpoint_that_cannot_be_written_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    checkpoints = Checkpoints(tmp_path)
    full = lambda *_, **__: (_ for _ in ()).throw(ValueError("RESOURCE_EXHAUSTED:\nNo space left on device"))
    monkeypatch.setattr(checkpoints._manager, "save", full)
    with pytest.raises(
        ReanchorError, match="3 cannot be written: RESOURCE_EXHAUSTED: No space left on device; make room"
    ):
        checkpoints.save(3, {"x": jnp.zeros(2)})
    checkpoints.close()


def test_before_the_first_step_tau_is_the_starts(pair: Pair, tmp_path: Path):
    settings = {"tau_prompts": 2, "tau_tokens": 12}
    run(pair, tmp_path, steps=3, eval_first=True, **settings)
    evaluation = logged(tmp_path)[0]
    prompts = [text.prompt_ids for text in random_texts(2)]
    assert evaluation["step"] == 0
    assert evaluation["held_out"]["tau"] == make_decoder(DecodeConfig(method="dflash"), 12)(pair, prompts).tau


@pytest.mark.parametrize(("log_every", "noticed", "steps_logged"), [(1, 5, [1, 2, 3, 4]), (10, 6, [])])
def test_a_loss_that_is_no_number_ends_the_run(
    log_every: int, noticed: int, steps_logged: list[int], pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Step 5 breaks: noticed when it is logged, at the latest before a checkpoint is kept of it."""
    step, taken = trainer.train_step, []

    def break_down(state, *arguments, **settings):
        state, loss = step(state, *arguments, **settings)
        taken.append(loss)
        return state, loss if len(taken) < 5 else loss * jnp.nan

    monkeypatch.setattr(trainer, "train_step", break_down)
    message = rf"the loss is nan by step {noticed}; .*the last checkpoint is of step 3"
    with pytest.raises(ReanchorError, match=message):
        run(pair, tmp_path, log_every=log_every)
    log = tmp_path / "log.jsonl"
    assert [row["step"] for row in (logged(tmp_path) if log.exists() else [])] == steps_logged


def test_a_logged_loss_is_the_mean_since_the_last_one(pair: Pair, tmp_path: Path):
    """An evaluation in between changes nothing."""
    run(pair, tmp_path / "each", steps=4)
    run(pair, tmp_path / "mean", steps=4, log_every=4, eval_every=3)
    losses = [row["loss"] for row in logged(tmp_path / "each") if "loss" in row]
    (mean,) = (row["loss"] for row in logged(tmp_path / "mean") if "loss" in row)
    np.testing.assert_allclose(mean, np.mean(losses), rtol=1e-6)


def test_finished_run_returns_its_drafter(pair: Pair, tmp_path: Path):
    first = run(pair, tmp_path, steps=3)
    second = run(pair, tmp_path, steps=3)
    for a, b in zip(leaves(first), leaves(second), strict=True):
        np.testing.assert_array_equal(a, b)


def test_optimizer_holds_the_drafter_alone_in_float32(pair: Pair):
    all_of_it = jax.tree.map(lambda _: True, pair.drafter)
    state = make_optimizer(OptimizerConfig(steps=9, learning_rate=1e-3, warmup=0), all_of_it).init(pair.drafter)
    size = sum(leaf.size for leaf in jax.tree.leaves(pair.drafter))
    moments = [leaf for leaf in jax.tree.leaves(state) if leaf.ndim]
    assert sum(leaf.size for leaf in moments) == 2 * size
    assert {leaf.dtype for leaf in moments} == {np.dtype("float32")}


def test_every_epoch_is_a_permutation():
    order = [batch_index(step, 7, seed=3) for step in range(21)]
    assert all(sorted(order[start : start + 7]) == list(range(7)) for start in (0, 7, 14))
    assert order[:7] != order[7:14]


def test_batches_hold_every_text_once():
    texts = [*random_texts(5), Text((1,) * 150, (2,) * 9)]
    batches = make_batches(texts, 2, seed=0)
    assert sorted(batch.tokens.shape for batch in batches) == [(2, 128), (2, 128), (2, 128), (2, 256)]
    rows = [tuple(b.tokens[i, : b.lengths[i]].tolist()) for b in batches for i in range(2) if b.lengths[i]]
    assert sorted(rows) == sorted((*text.prompt_ids, *text.answer_ids) for text in texts)


def test_frequent_tokens():
    texts = [Text((9, 9, 9, 9), (5, 5, 7, 1, 1, 1, 7, 3))]
    assert frequent_tokens(texts, 3).tolist() == [1, 5, 7]


def test_split_is_disjoint():
    texts = random_texts(9)
    training, held_out = split_held_out(texts, 3, seed=1)
    assert len(held_out) == 3 and sorted([*training, *held_out], key=str) == sorted(texts, key=str)


@pytest.mark.parametrize(("num_layers", "ids"), [(30, (1, 8, 14, 20, 27)), (6, (1, 2, 3)), (1, (0,)), (2, (1,))])
def test_layer_ids(num_layers: int, ids: tuple[int, ...]):
    assert spread_layer_ids(num_layers) == ids


def test_new_drafter_projects_context_as_the_target_does(pair: Pair):
    """A target layer's keys are k_proj(norm(x)); the copied layer gives them from `fc` and `hidden_norm`."""
    target = make_pair(BLOCK, family="qwen3").target
    ids = new_drafter_config(target, num_layers=2, block_size=4, mask_token_id=15, target_layer_ids=(0, 1))
    drafter = new_drafter(target, ids, "layers", 0)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(7, 32)), jnp.float32)
    context = drafter.context(jnp.concatenate([x * 0 + 5, x], axis=1), jnp.arange(7))
    no_cache = jax.tree.map(lambda a: a[:, :, :0], _stack(context, 3))
    everything = jnp.ones((7, 7), bool)
    output = target(jnp.zeros(7, jnp.int32), jnp.arange(7), (no_cache,), jnp.int32(0), everything)
    assert output.kv[0].k.shape[0] == 3
    from reanchor_jax.layers import rms_norm
    from reanchor_jax.rope import make_rope

    layer = jax.tree.map(lambda w: w[1], target.layers[0])
    rope = make_rope(target.config.layer.rope, 8, jnp.arange(7))
    k, v = layer.keys_values(rms_norm(x, layer.input_norm[...], layer.config), rope)
    np.testing.assert_allclose(context.k[0], k, atol=1e-5)
    np.testing.assert_allclose(context.v[0], v, atol=1e-5)


def test_answers_are_plain_decoding_and_resumable(pair: Pair, tmp_path: Path):
    rng = np.random.default_rng(0)
    prompts = [Prompt(tuple(rng.integers(0, 15, size).tolist()), "x") for size in (3, 70, 5, 4, 66)]
    whole, cut = tmp_path / "whole.jsonl", tmp_path / "cut.jsonl"
    generate_answers(pair.target, prompts, whole, max_new_tokens=9, num_rows=2)
    rows = [json.loads(line) for line in whole.read_text().splitlines()]
    assert sorted(row["index"] for row in rows) == list(range(5))
    for row in rows:
        prompt = prompts[row["index"]].ids
        plain = generate(
            Pair(pair.target, None), jnp.array(prompt), jnp.int32(len(prompt)), key=jax.random.key(0),
            config=DecodeConfig(method="ar"), max_new_tokens=9,
        )  # fmt: skip
        assert row["prompt_ids"] == list(prompt) and row["answer_ids"] == plain.tokens.tolist()

    cut.write_bytes(whole.read_bytes()[: -len(whole.read_bytes().splitlines()[-1]) // 2])  # killed in a line
    generate_answers(pair.target, prompts, cut, max_new_tokens=9, num_rows=2)
    assert sorted(cut.read_text().splitlines()) == sorted(whole.read_text().splitlines())
    assert len(read_answers(whole, 16, 512)) == 5
    with pytest.raises(ReanchorError, match="answers another prompt"):
        generate_answers(pair.target, prompts[::-1], cut, max_new_tokens=9, num_rows=2)
    with pytest.raises(ReanchorError, match=r"cut\.jsonl with max_new_tokens 9, got 8"):
        generate_answers(pair.target, prompts, cut, max_new_tokens=8, num_rows=2)
    cut.write_text(json.dumps({**rows[0], "answer_ids": []}) + "\n")
    with pytest.raises(ReanchorError, match=r"cut\.jsonl line 1: answer_ids is \[\]; expected a list of token ids"):
        generate_answers(pair.target, prompts, cut, max_new_tokens=9, num_rows=2)


@pytest.fixture(scope="module")
def folder(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, and some JSONL files."""
    folder = tmp_path_factory.mktemp("inputs")
    save_target(pair.target, folder / "target", dtype=jnp.float32)
    good = {"prompt_ids": [1, 2, 3], "answer_ids": [4, 5, 6, 7]}
    for name, rows in {
        "answers": [good] * 6,
        "outside": [good, {"prompt_ids": [1, 99], "answer_ids": [4, 5]}],
        "empty": [],
        "no_answer": [{"prompt_ids": [1, 2]}],
        "text": [{"prompt": "hello"}],
        "list": [[1, 2]],
    }.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "broken.jsonl").write_text('{"prompt_ids": [1')
    (folder / "deep.jsonl").write_text("[" * 99999)
    packed = gzip.compress((folder / "answers.jsonl").read_bytes())
    (folder / "damaged.jsonl.gz").write_bytes(packed[:10] + b"\xff" * 9 + packed[19:])
    return folder


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--answers answers.jsonl", "--mask-token-id is missing"),
        ("--mask-token-id 15", "either --prompts"),
        ("--mask-token-id 15 --answers answers.jsonl --prompts text.jsonl", "either --prompts"),
        ("--mask-token-id 99 --answers answers.jsonl", "--mask-token-id is 99"),
        ("--mask-token-id 15 --answers missing.jsonl", "missing.jsonl cannot be read"),
        ("--mask-token-id 15 --answers broken.jsonl", "not JSON lines"),
        ("--mask-token-id 15 --answers deep.jsonl", "not JSON lines"),
        ("--mask-token-id 15 --answers damaged.jsonl.gz", "not JSON lines"),
        ("--mask-token-id 15 --answers answers.jsonl --distill 1.5", "got '1.5', expected a number from 0 to 1"),
        ("--mask-token-id 15 --answers list.jsonl", "line 1 holds list"),
        ("--mask-token-id 15 --answers empty.jsonl", "has no text"),
        ("--mask-token-id 15 --answers outside.jsonl", "line 2: prompt_ids is [1, 99]"),
        ("--mask-token-id 15 --answers no_answer.jsonl", "answer_ids is None"),
        ("--mask-token-id 15 --prompts text.jsonl", "no tokenizer"),
        ("--mask-token-id 15 --answers answers.jsonl --held-out 6", "--held-out is 6"),
        ("--mask-token-id 15 --answers answers.jsonl --held-out 2 --anchors 999", "--anchors is 999"),
        ("--mask-token-id 15 --answers answers.jsonl --target-layer-ids 0,7", "--target-layer-ids is [0, 7]"),
        ("--mask-token-id 15 --answers answers.jsonl --layers 9", "--layers is 9"),
        ("--mask-token-id 15 --answers answers.jsonl --steps 0", "--steps"),
        ("--mask-token-id 15 --answers answers.jsonl --steps 5 --warmup 5", "--warmup is 5"),
        ("--mask-token-id 15 --answers answers.jsonl --learning-rate nan", "--learning-rate is nan"),
        ("--init nowhere --layers 2 --answers answers.jsonl", "beside --init"),
        ("--init target --answers answers.jsonl", "target"),
        ("--head domino --mask-token-id 15 --answers answers.jsonl", "--head domino needs a backbone"),
        ("--head domino --markov rnn --init target --answers answers.jsonl", "--markov is of another head"),
        ("--rank 4 --init target --answers answers.jsonl", "--rank is of another head; expected no such flag with no"),
        ("--head dspark --freeze-backbone --init x --answers answers.jsonl", "does not go with --head dspark"),
        ("--head domino --gru 2147483647 --init x --answers answers.jsonl", "expected an integer from 1 to 131072"),
        (
            "--mask-token-id 15 --answers answers.jsonl --held-out 2 --anchors 4 --distill 1 --num-top 17",
            "--num-top is 17",
        ),
        ("--freeze-backbone --mask-token-id 15 --answers answers.jsonl --held-out 2 --anchors 4", "nothing to train"),
        ("--recipe tiny-pair --mask-token-id 0", "does not go with --recipe"),
        ("--recipe tiny-pair --freeze-backbone", "--freeze-backbone does not go with --recipe"),
        ("--recipe tiny-pair --answers answers.jsonl", "--answers does not go with --recipe"),
        ("--recipe tiny-pair --distill 0.5", "--distill does not go with --recipe"),
        ("--recipe tiny-pair --text missing.txt", "missing.txt cannot be read"),
        ("--text text.jsonl --answers answers.jsonl --mask-token-id 15", "belongs to --recipe"),
        ("--unknown", "--unknown"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(
    folder: Path, flags: str, message: str, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(folder)
    target = [] if "tiny-pair" in flags else ["--target", "target"]
    assert main([*flags.split(), *target, "--out", "out"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1
    assert not (folder / "out").exists()


def test_command_line_from_prompts_to_drafter(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt_ids": [1, 2, i]}) + "\n" for i in range(6)))
    flags = f"--target {folder / 'target'} --out {tmp_path / 'out'} --prompts {prompts} --mask-token-id 15 --steps 2"
    flags += " --rows 2 --anchors 4 --held-out 2 --max-new-tokens 12 --block-size 4 --layers 1 --tau-tokens 8"
    assert main(flags.split()) == 0
    drafter = load_drafter(tmp_path / "out" / "drafter")
    assert (drafter.config.block_size, drafter.config.num_layers, drafter.config.target_num_layers) == (4, 1, 3)
    assert 1 <= logged(tmp_path / "out")[-1]["held_out"]["tau"] <= 4

    flags = f"--target {folder / 'target'} --answers {tmp_path / 'out' / 'answers.jsonl'} --held-out 2 --rows 2"
    flags += f" --init {tmp_path / 'out' / 'drafter'} --block-size 3 --steps 1 --anchors 4 --tau-prompts 0"
    assert main([*flags.split(), "--out", str(tmp_path / "shorter")]) == 0
    assert load_drafter(tmp_path / "shorter" / "drafter").config == dataclasses.replace(drafter.config, block_size=3)


def test_a_target_learns_its_texts():
    texts = np.tile(np.arange(1, 9, dtype=np.int32), (4, 3))
    config = byte_target_config("qwen3")
    config = dataclasses.replace(config, num_layers=1)
    lines: list[str] = []
    train_target(config, texts, steps=30, num_rows=2, learning_rate=4e-3, seed=0, echo=lines.append)
    assert float(lines[-1].split("loss ")[1].split(",")[0]) < 1


def test_tiny_pair_recipe_runs_and_resumes(tmp_path: Path, monkeypatch):
    small = functools.partial(TinyPairConfig, num_prompts=40, num_held_out=6)
    monkeypatch.setattr("reanchor_jax.training.arguments.TinyPairConfig", small)
    monkeypatch.setattr("reanchor_jax.training.tiny_pair.MEASURED_TOKENS", 16)
    flags = [
        "--recipe",
        "tiny-pair",
        "--out",
        str(tmp_path),
        "--target-steps",
        "2",
        "--steps",
        "2",
        "--block-size",
        "4",
    ]
    assert main(flags) == 0
    results = json.loads((tmp_path / "tau.json").read_text())["results"]
    assert [result["method"] for result in results][:2] == ["dflash", "reanchor earliest baseline"]
    drafter = (tmp_path / "drafter" / "model.safetensors").read_bytes()
    monkeypatch.setattr("reanchor_jax.training.tiny_pair._measure", lambda *_, **__: None)  # it compiles five methods
    assert main(flags) == 0
    assert (tmp_path / "drafter" / "model.safetensors").read_bytes() == drafter
    assert 3 <= len((tmp_path / "prompts.jsonl").read_text().splitlines()) <= 6


def _stack(cache, num_layers: int):
    return jax.tree.map(lambda x: jnp.concatenate([x] * num_layers)[:num_layers], cache)
