"""Recipe files: their numbers are those of the cost command, their shapes the published ones; bad files."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reanchor_jax.checkpoint.fields import Fields
from reanchor_jax.checkpoint.hf_config import target_config
from reanchor_jax.errors import ReanchorError
from reanchor_jax.training import cost, main
from reanchor_jax.training.arguments import Options, parse
from reanchor_jax.training.blocks import Batch, random_blocks
from reanchor_jax.training.mesh import MeshShape
from reanchor_jax.training.recipe_file import FOLDER, recipe_names
from tests.tiny import make_pair

NAMES = ("gemma-4-12b", "llama-3.1-8b", "qwen3-4b", "qwen3-8b")
MANIFESTS = Path(__file__).parent / "golden" / "manifests"
PUBLISHED = {
    "gemma-4-12b": ("Gemma-4-12B", "dspark_gemma4_12b_block7"),
    "llama-3.1-8b": ("Llama-3.1-8B", "LLaMA3.1-8B-Instruct-DFlash-UltraChat"),
    "qwen3-4b": ("Qwen3-4B", "Qwen3-4B-DFlash-b16"),
    "qwen3-8b": ("Qwen3-8B", "Qwen3-8B-DFlash-b16"),
}


def manifest(name: str) -> dict:
    return json.loads((MANIFESTS / f"{name}.json").read_text())


def test_names():
    assert recipe_names() == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_comments_are_what_the_command_prints(name: str, capsys):
    assert cost.main([name]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 11
    comments = "".join(f"# {line}\n" for line in printed)
    text = (FOLDER / f"{name}.toml").read_text()
    assert f"(python -m reanchor_jax.training.cost {name}):\n{comments}\n" in text


@pytest.mark.parametrize("name", NAMES)
def test_shapes_are_the_published_ones(name: str):
    target, drafter = (manifest(each) for each in PUBLISHED[name])
    plan = cost.read_plan(name)
    config = dict(target["config"])
    want = target_config(Fields(config, name))
    same = ("vocab_size", "num_layers", "pattern", "tie_word_embeddings", "logit_softcap", "max_position_embeddings")
    assert {field: getattr(plan.target, field) for field in same} == {field: getattr(want, field) for field in same}
    published = drafter["config"]
    own = published.get("dflash_config", published)
    assert plan.drafter.num_layers == published["num_hidden_layers"]
    assert list(plan.drafter.target_layer_ids) == own["target_layer_ids"]
    assert plan.drafter.mask_token_id == own["mask_token_id"]
    is_shifted = name.startswith("gemma")  # that drafter's slots predict the next token
    assert plan.drafter.block_size == published["block_size"] + is_shifted
    if not is_shifted:  # Gemma's manifest counts the parts that see and hear, and its drafter has a head
        assert cost.sizes(cost.Target, plan.target).all == target["num_params"]
    if name.startswith("qwen3"):  # Llama's published drafter has a narrower MLP than its target
        assert cost.sizes(cost.Drafter, plan.drafter).all == drafter["num_params"]


@pytest.mark.parametrize("name", NAMES)
def test_steps_are_the_epochs(name: str):
    options = parse(["--recipe", name, "--prompts", "x.jsonl", "--out", "out"])
    assert isinstance(options, Options)
    plan, optimizer = cost.read_plan(name), options.config.optimizer
    assert optimizer.steps == cost.cost_of(plan).steps
    assert abs(optimizer.warmup / optimizer.steps - 0.04) < 1e-4
    assert (optimizer.learning_rate, options.config.num_anchors) == (6e-4, 512)
    assert options.config.num_rows * optimizer.accumulate == (512 if name.startswith("gemma") else 32)
    assert (options.compute_dtype, options.mesh) == ("bfloat16", MeshShape(4, 2))
    assert options.mesh.data * options.mesh.model == plan.accelerators


def test_flops_example():
    """A few are checked by hand here, and all formulas against traced products in tests/test_train_speed.py."""
    plan = cost.read_plan("qwen3-4b")
    got, tokens = cost.cost_of(plan), 1_300_000 * 950
    # Of a token: two for each parameter of the layers' matrices; 36 layers of 4,096 query numbers times 950 keys.
    assert got.features == tokens * (2 * 3_633_315_840 + 36 * 4 * 4096 * 950)
    assert got.answers == got.features + 1_300_000 * 700 * 2 * 151_936 * 2560


def test_memory_of_a_step():
    """The estimate that the docstring of `device_bytes` compares with XLA's count; a mesh splits what it should."""
    plan = cost.read_plan("qwen3-4b")

    def of(**changes):
        flags = argparse.Namespace(**{**vars(plan.flags), **changes})
        return cost.cost_of(plan._replace(flags=flags)).device_bytes

    alone = {"rows": 1, "mesh": MeshShape(1, 1), "accumulate": 1}
    for anchors, counted in ((128, 24.2e9), (256, 44.1e9)):
        sizes = of(**alone, anchors=anchors)
        beside = sum(sizes.values()) - sizes["target"] - sizes["drafter and its moments"]
        np.testing.assert_allclose(beside, counted, rtol=2e-3)
    whole, split = of(**alone), of(rows=4, mesh=MeshShape(4, 2), accumulate=1)
    for name, size in whole.items():
        assert split[name] == (size if name == "features" else size / 2)


def test_the_command_line_wins():
    argv = ["--rows", "8", "--recipe", "qwen3-4b", "--anchors=64", "--prompts", "x.jsonl", "--out", "out"]
    options = parse([*argv, "--target-layer-ids", "1,2"])
    assert isinstance(options, Options)
    assert (options.config.num_rows, options.config.num_anchors, options.target_layer_ids) == (8, 64, (1, 2))
    assert (options.block_size, options.config.gamma) == (16, 7.0)


def test_a_run_without_an_update_has_no_cost(tmp_path: Path):
    path = tmp_path / "r.toml"
    path.write_text((FOLDER / "qwen3-4b.toml").read_text().replace("texts = 1_300_000", "texts = 4"))
    with pytest.raises(ReanchorError, match="accumulate is 8; expected at most the 6 steps of all epochs"):
        cost.read_plan(str(path))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[train]\nrow = 4", "train: 'row' is no setting of a recipe"),
        ("[train]\nout = 'x'", "'out' is no setting of a recipe"),
        ("[train]\nprompts = '/etc/passwd'", "'prompts' is no setting of a recipe"),
        ("[train]\nrecipe = 'tiny-pair'", "'recipe' is no setting of a recipe"),
        ("[train]\n'rows=1 --out' = 4", "is no setting of a recipe"),
        ("[train]\nrows = 0", "--rows: got 0, expected an integer >= 1"),
        ("[train]\nrows = '4 --seed 3'", "--rows: got '4 --seed 3', expected an integer"),
        ("[train]\nrows = 4.5", "--rows: got '4.5', expected an integer"),
        ("[train]\nrows = 9999999999", "--rows: got 9999999999, expected an integer >= 1, at most 2147483647"),
        (f"[train]\nrows = 0x{'f' * 5000}", "rows is an integer of thousands of digits; expected a number"),
        (f"[train]\ntarget_layer_ids = [0x{'f' * 5000}]", "is an integer of thousands of digits; expected an integer"),
        ("[train]\nrows = true", "rows is True; expected a number, a line of text or a list"),
        ("[train]\nrows = 1979-05-27", "expected a number, a line of text or a list"),
        ("[train]\nrows = {a = 1}", "expected a number, a line of text or a list"),
        ("[train]\nfreeze_backbone = 1", "freeze_backbone is 1; expected true or false"),
        ("[train]\nlearning_rate = nan\nmask_token_id = 1", "--learning-rate is nan; expected"),
        ("[train]\ntarget_layer_ids = [1, -2]", "an entry of target_layer_ids is -2; expected an integer from 0"),
        ("[train]\ntarget_layer_ids = ['1']", "an entry of target_layer_ids is '1'"),
        ("[train]\ncompute_dtype = 'float8'", "invalid choice: 'float8'"),
        ("[training]\nrows = 4", "unknown field training"),
        ("train = 3", "train is 3; expected an object"),
        ("", "train is missing"),
        ("[train]\n'a\\n' = 1", "is no setting of a recipe"),
        ('[train]\n"a\\nb" = 1', r"'a\nb' is no setting of a recipe"),
        ('["a\\nb"]\n', "unknown field a b"),
        ('[train]\ntarget = "a\\nb"', r"target is 'a\nb'; expected a number, a line of text"),
        ("[train\n", "is not TOML"),
        ("[train]\nrows = 1\nrows = 2", "is not TOML"),
        ("x = " + "[" * 100_000, "is not TOML"),
        ("[train]\nrows = " + "9" * 5000, "is not TOML"),
        ("#" * (1 << 20) + "\n", "has more than 1048576 bytes"),
        (b"\xff\xfe", "is not TOML"),
    ],
)
def test_a_bad_file_is_one_line(text: str | bytes, message: str, tmp_path: Path, capsys):
    path = tmp_path / "r.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert main.main(["--recipe", str(path), "--answers", "a.jsonl", "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1 and len(error) < 500
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("qwen", "--recipe is 'qwen'; expected FILE.toml or one of gemma-4-12b, llama-3.1-8b, qwen3-4b, qwen3-8b"),
        ("missing.toml", "error: missing.toml is no file; expected a recipe, or one of gemma-4-12b"),
        (".toml", ".toml"),
        ("../recipes/qwen3-4b", "--recipe is '../recipes/qwen3-4b'"),
    ],
)
def test_no_such_recipe(source: str, message: str, capsys):
    for command in (lambda: cost.main([source]), lambda: main.main(["--recipe", source, "--out", "out"])):
        assert command() == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ") and message in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("texts = 1_300_000", "texts = 0", "data: texts is 0; expected an integer from 1"),
        ("texts = 1_300_000", "", "data: texts is missing"),
        ("epochs = 6", "epochs = 6\nyears = 2", "unknown field years"),
        ("train_rate = 4e14", "train_rate = inf", "train_rate is inf; expected a number"),
        ("hidden_size = 2560", "hidden_size = 1_000_000_000", "config: hidden_size is 1000000000"),
        ("rows = 4", "rows = 6", "--rows is 6; expected a multiple of 4"),
        ("layers = 5", "layers = 65", "--layers is 65; expected 1 to 64"),
        ("anchors = 512", f"anchors = {9**400}", "anchors is 4977"),
        ("anchors = 512\n", "", "anchors is None; expected a value"),
        ("layers = 5", "layers = 5\nhead = 'domino'", "expected no such flag: the cost is of a new DFlash drafter"),
    ],
)
def test_a_bad_file_has_no_cost(old: str, new: str, message: str, tmp_path: Path, capsys):
    text = (FOLDER / "qwen3-4b.toml").read_text()
    assert f"\n{old}" in text
    path = tmp_path / "r.toml"
    path.write_text(text.replace(f"\n{old}", f"\n{new}"))
    assert cost.main([str(path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1


def test_short_texts_have_as_many_blocks_as_tokens():
    pair = make_pair(6)
    batch = Batch(np.zeros((2, 24), np.int32), np.array([4, 9], np.int32), np.array([20, 22], np.int32))
    blocks = jax.eval_shape(
        lambda: random_blocks(pair.target, pair.drafter, batch, jnp.zeros((2, 24, 64)), jax.random.key(0), 512)
    )
    assert blocks.labels.shape == (2 * 24, 5)
