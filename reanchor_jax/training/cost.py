"""`python -m reanchor_jax.training.cost RECIPE`: what a recipe's run costs, before anything is started.

Parameters are counted in the networks themselves, built without arrays; FLOPs as in `flops`. All
texts count as texts of mean length, attention over all their keys, since masked ones are computed
as well. What is small beside that (norms, rotary tables, softmax,
padding, evaluation) is left out.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from reanchor_jax.checkpoint.hf_config import target_config
from reanchor_jax.cli.flags import Parser
from reanchor_jax.cli.process import run
from reanchor_jax.config import DrafterConfig, TargetConfig
from reanchor_jax.drafter import Drafter
from reanchor_jax.target import Target
from reanchor_jax.training.arguments import make_parser
from reanchor_jax.training.features import token_bytes
from reanchor_jax.training.flops import StepSizes, features_flops, step_flops
from reanchor_jax.training.loss import CHUNK_ROWS
from reanchor_jax.training.mesh import check_rows
from reanchor_jax.training.recipe_file import read_recipe, recipe_flags
from reanchor_jax.training.start import new_drafter_config


class Plan(NamedTuple):
    """A run that has not been started: what its cost is a function of."""

    flags: argparse.Namespace
    texts: int
    prompt_len: int
    answer_len: int
    epochs: int
    accelerators: int
    train_rate: float
    """Sustained FLOPs a second of one accelerator, in training and in the target's forwards over texts."""
    answer_rate: float
    """The same while the target writes answers, a token of each row at a time."""
    target: TargetConfig
    drafter: DrafterConfig

    @property
    def text_len(self) -> int:
        """T: tokens of a text."""
        return self.prompt_len + self.answer_len


def read_plan(source: str) -> Plan:
    """Reads a recipe. Raises ReanchorError as `read_recipe`, `recipe_flags` and `target_config` do."""
    recipe = read_recipe(source)
    parser = make_parser()
    flags = parser.parse_args([*recipe_flags(recipe, parser), "--out=."])
    data, devices = recipe.section("data"), recipe.section("devices")
    target = target_config(recipe.section("config"))
    needed = ("layers", "block_size", "mask_token_id", "rows", "anchors", "accumulate", "mesh", "compute_dtype")
    for name in needed:
        if getattr(flags, name) is None:
            raise recipe.section("train").fail(name, None, "a value: the cost depends on it")
    for name in ("head", "init"):
        if (got := getattr(flags, name)) is not None:
            raise recipe.section("train").fail(name, got, "no such flag: the cost is of a new DFlash drafter")
    check_rows(flags.rows, flags.mesh.data)
    abstract = jax.eval_shape(lambda: Target(target, dtype=jnp.dtype(jnp.bfloat16), rngs=nnx.Rngs(0)))
    drafter = new_drafter_config(
        abstract,
        num_layers=flags.layers,
        block_size=flags.block_size,
        mask_token_id=flags.mask_token_id,
        target_layer_ids=flags.target_layer_ids,
    )
    most = 1 << 40
    plan = Plan(
        flags=flags,
        texts=data.integer("texts", 1, most),
        prompt_len=data.integer("prompt_len", 1, most),
        answer_len=data.integer("answer_len", 1, most),
        epochs=data.integer("epochs", 1, most),
        accelerators=devices.integer("accelerators", 1, most),
        train_rate=devices.number("train_rate", above=0, below=1e20),
        answer_rate=devices.number("answer_rate", above=0, below=1e20),
        target=target,
        drafter=drafter,
    )
    data.finish()
    devices.finish()
    if (most := steps_of(plan)) < flags.accumulate:
        raise recipe.section("train").fail("accumulate", flags.accumulate, f"at most the {most} steps of all epochs")
    return plan


def steps_of(plan: Plan) -> int:
    """Steps of all epochs, of one batch each."""
    return -(-plan.texts // plan.flags.rows) * plan.epochs


class Sizes(NamedTuple):
    """Parameters of a network."""

    all: int
    layers: int
    """In the matrices of its layers: products with every token."""


def sizes(network: type[Target] | type[Drafter], config: TargetConfig | DrafterConfig) -> Sizes:
    """Counts a network's parameters without making them."""
    make = lambda: network(config, dtype=jnp.dtype(jnp.bfloat16), rngs=nnx.Rngs(0))  # pyright: ignore
    leaves = jax.tree_util.tree_leaves_with_path(jax.eval_shape(make))
    named = [(jax.tree_util.keystr(path), leaf.size) for path, leaf in leaves]
    return Sizes(*(sum(size for name, size in named if part in name) for part in ("", "_proj")))


class Cost(NamedTuple):
    """FLOPs, bytes and steps of a run."""

    answers: float
    features: float
    training: float
    cache_bytes: int
    device_bytes: dict[str, float]
    steps: int
    """Of all epochs, rounded down to whole updates."""


def cost_of(plan: Plan) -> Cost:
    """The arithmetic, all texts being of mean length."""
    flags, t, d = plan.flags, plan.target, plan.drafter
    text = StepSizes(rows=1, anchors=flags.anchors, length=plan.text_len, vocab=flags.train_vocab or t.vocab_size)
    tokens = plan.texts * plan.text_len
    forward = plan.texts * features_flops(t, text)
    logits = 2 * t.vocab_size * t.layer.hidden_size  # of one token
    steps = steps_of(plan)
    num_top = flags.num_top if flags.distill else 0
    kept = token_bytes(len(d.target_layer_ids) * d.layer.hidden_size, flags.feature_dtype, num_top)
    return Cost(
        answers=forward + plan.texts * plan.answer_len * logits,
        features=forward + (tokens * logits if num_top else 0),
        training=plan.texts * plan.epochs * step_flops(d, text),
        cache_bytes=tokens * kept,
        device_bytes=device_bytes(plan, sizes(Target, t), sizes(Drafter, d)),
        steps=steps // flags.accumulate * flags.accumulate,
    )


def device_bytes(plan: Plan, target: Sizes, drafter: Sizes) -> dict[str, float]:
    """Memory of one accelerator in a training step on texts of `--max-len` tokens.

    Residuals are an estimate of what the backward pass keeps: 16 bytes a score of attention (float32
    scores and weights, and their rounded copies) and 48 D + 24 F bytes a block token and layer. XLA's
    own count for the step of qwen3-4b on one device, one text, is 23.7 GB at 128 anchors and
    42.2 GB at 256 beside the arguments (compiled for a CPU); this one is 24.2 and 44.1.
    """
    flags, d = plan.flags, plan.drafter
    data, model = flags.mesh
    rows, layer = flags.rows // data, d.layer
    width = jnp.dtype(flags.compute_dtype).itemsize
    accumulated = 4 if flags.accumulate > 1 else 0
    copy = width if width < 4 else 0
    scores = 16 * layer.num_heads * (flags.max_len + d.num_slots)
    residuals = (
        rows
        * flags.anchors
        * d.num_slots
        * d.num_layers
        * (scores + 48 * layer.hidden_size + 24 * layer.intermediate_size)
    )
    features = rows * flags.max_len * len(d.target_layer_ids) * layer.hidden_size * (4 + width)
    logits = 3 * CHUNK_ROWS * d.vocab_size * 4
    return {
        "target": width * target.all / model,
        "drafter and its moments": 12 * drafter.all / model,
        "gradient": (4 + accumulated + copy) * drafter.all / model,
        "residuals": residuals / model,
        "features": features,
        "logits": logits / model,
    }


def report(plan: Plan) -> list[str]:
    """The lines that the command prints, and that the recipes in the package hold as comments."""
    flags, cost = plan.flags, cost_of(plan)
    target, drafter = sizes(Target, plan.target), sizes(Drafter, plan.drafter)
    tokens, batch = plan.texts * plan.text_len, flags.rows * flags.accumulate
    memory = cost.device_bytes
    parts = ", ".join(f"{name} {size / 1e9:.1f}" for name, size in memory.items() if size)
    rate = plan.accelerators * plan.train_rate
    hours = [cost.answers / (plan.accelerators * plan.answer_rate), cost.features / rate, cost.training / rate]
    answers, features, training = (f"{seconds / 3600:,.1f}" for seconds in hours)
    return [
        f"tokens: {plan.texts:,} texts of {plan.prompt_len} + {plan.answer_len} = {tokens / 1e9:.3f}e9",
        f"target: {target.all:,} parameters, {target.layers:,} of them in its layers' matrices",
        f"drafter: {drafter.all:,} parameters, {drafter.layers:,} of them in its layers' matrices",
        f"answers: {cost.answers:.2e} FLOPs of the target",
        f"features: {cost.features:.2e} FLOPs of the target",
        f"training: {cost.training:.2e} FLOPs of the drafter: {plan.epochs} epochs, {flags.anchors} blocks of "
        f"{plan.drafter.block_size} a text",
        f"steps: {cost.steps:,} of {flags.rows} texts, {cost.steps // flags.accumulate:,} updates of {batch}",
        f"feature cache: {cost.cache_bytes / 1e12:.2f} TB, {cost.cache_bytes // tokens:,} bytes a token",
        f"memory of a device, {flags.mesh.data}x{flags.mesh.model}: {sum(memory.values()) / 1e9:.1f} GB",
        f"  of them {parts}",
        f"hours on {plan.accelerators} accelerators: answers {answers} at {plan.answer_rate:.0e} FLOP/s of each, "
        f"features {features} and training {training} at {plan.train_rate:.0e}",
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code: 0, or 2 for bad input."""
    parser = Parser(
        prog="python -m reanchor_jax.training.cost",
        description="Prints what a recipe's run costs: FLOPs, disk, memory, time.",
        epilog="The rates are the recipe's own ([devices]); nothing is measured.",
    )
    parser.add_argument("recipe", metavar="RECIPE", help="FILE.toml, or the name of a recipe in the package")

    def show() -> int:
        print("\n".join(report(read_plan(parser.parse_args(argv).recipe))))
        return 0

    return run(show)


if __name__ == "__main__":
    sys.exit(main())
