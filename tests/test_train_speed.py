"""The arithmetic of `training.flops`, against what is traced and what XLA counts; its table."""

from __future__ import annotations

import dataclasses
import math
import sys
from typing import Any

import jax.numpy as jnp
import pytest
from flax import nnx

from experiments.train_speed import main, step_inputs
from reanchor_jax.checkpoint import save_drafter, save_target
from reanchor_jax.cli import process
from reanchor_jax.drafter import Drafter
from reanchor_jax.training.features import texts_forward
from reanchor_jax.training.flops import StepSizes, features_flops, step_flops
from reanchor_jax.training.optimizer import OptimizerConfig
from reanchor_jax.training.step import train_step
from tests.tiny import make_pair

pytestmark = pytest.mark.usefixtures("quick_compiles")

SIZES = StepSizes(rows=2, anchors=16, length=128, vocab=200)


def traced(num_layers: int) -> tuple[Any, Any, int, int]:
    """Step and target's forward of a pair of width 128, traced, and their FLOPs by our arithmetic."""
    pair = make_pair(6, width=128, vocab_size=256)
    assert pair.drafter is not None
    config = dataclasses.replace(pair.drafter.config, num_layers=num_layers)
    drafter = Drafter(config, dtype=jnp.dtype(jnp.float32), rngs=nnx.Rngs(0))
    optimizer = OptimizerConfig(steps=9, learning_rate=1e-3, warmup=0)
    inputs = step_inputs(pair.target, drafter, SIZES, optimizer)
    step = train_step.trace(*inputs, optimizer=optimizer, num_anchors=SIZES.anchors, gamma=4.0)
    tap_ids = config.target_layer_ids
    forward = texts_forward.trace(pair.target, inputs[3].tokens, tap_ids=tap_ids, num_top=0, dtype="float32")
    return step, forward, step_flops(config, SIZES), features_flops(pair.target.config, SIZES)


def matmul_flops(jaxpr: Any) -> int:
    """2 x multiply-adds of all matrix products in a program, times the lengths of the loops around them."""
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (summed, _), _ = equation.params["dimension_numbers"]
            total += 2 * math.prod(equation.invars[0].aval.shape[i] for i in summed) * equation.outvars[0].aval.size
        times = equation.params["length"] if equation.primitive.name == "scan" else 1
        inner = [getattr(value, "jaxpr", value) for value in equation.params.values()]
        total += times * sum(matmul_flops(value) for value in inner if hasattr(value, "eqns"))
    return total


def test_arithmetic_is_that_of_the_traced_products():
    step, forward, of_step, of_features = traced(num_layers=2)
    assert matmul_flops(step.jaxpr.jaxpr) == of_step
    assert matmul_flops(forward.jaxpr.jaxpr) == of_features


def test_arithmetic_is_near_what_xla_counts():
    """XLA counts all else too (norms, softmax, rotary embedding, Adam): 4% more here, less at real widths.

    It counts the body of a loop once, however often it runs. So the drafter has one layer and the drafts
    fit into one chunk; and of the target's forward it sees one text and one of three layers.
    """
    step, forward, of_step, of_features = traced(num_layers=1)
    assert 1 < step.lower().cost_analysis()["flops"] / of_step < 1.06
    assert 1 < forward.lower().cost_analysis()["flops"] / (of_features / SIZES.rows / 3) < 1.06


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder, pair = tmp_path_factory.mktemp("pair"), make_pair(4)
    save_target(pair.target, folder / "target", dtype=jnp.float32)
    save_drafter(pair.drafter, folder / "drafter", dtype=jnp.float32)
    return f"--target {folder / 'target'} --drafter {folder / 'drafter'}"


def run(monkeypatch: pytest.MonkeyPatch, flags: str) -> int:
    monkeypatch.setattr(sys, "argv", ["train_speed", *flags.split()])
    return process.run(main)


def test_table(folders: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    sizes = "--rows 2 --anchors 4 --length 16 --train-vocab 8 --repeats 2"
    assert run(monkeypatch, f"{folders} {sizes}") == 0
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in capsys.readouterr().out.splitlines()]
    assert [row[0] for row in rows[2:]] == ["matmul 32 x 32 x 64", "train step", "features"]
    assert rows[2][5] == "100%" and rows[2][6] == ""
    for row in rows[3:]:  # 8 blocks a step
        assert float(row[6].replace(",", "")) == pytest.approx(8 / (float(row[2]) / 1000), rel=0.1)


def test_sizes_out_of_range(folders: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    for flags, message in (
        ("--rows 0", "--rows is 0; expected at least 1"),
        ("--anchors 9 --length 8", "--anchors is 9; expected at least 1, at most 8"),
        ("--train-vocab 17 --length 64", "--train-vocab is 17; expected at least 1, at most 16"),
    ):
        assert run(monkeypatch, f"{folders} {flags}") == 2
        assert capsys.readouterr().err == f"error: {message}\n"
