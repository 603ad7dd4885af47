"""How fast a drafter trains, and how near that is to the machine's own rate of matrix products.

    python -m experiments.train_speed [--rows 4] [--anchors 56] [--length 384] [--train-vocab 8192]

Takes turns between a train step with features given, the target's forward that gives them, and one
float32 product of the drafter's MLP shape, after one call each that is not timed; compile time apart.
Token ids and features are random: numbers do not change how long a program takes.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from reanchor_jax import Drafter, ReanchorError, Target, load_pair
from reanchor_jax.cli import process
from reanchor_jax.config import LMHeadConfig
from reanchor_jax.default_pair import DEFAULT_PAIR
from reanchor_jax.training.blocks import Batch
from reanchor_jax.training.features import TextFeatures, TopTokens, texts_forward
from reanchor_jax.training.flops import StepSizes, features_flops, step_flops
from reanchor_jax.training.loss import make_vocab
from reanchor_jax.training.optimizer import OptimizerConfig
from reanchor_jax.training.step import TrainState, init_optimizer, train_step


def step_inputs(target: Target, drafter: Drafter, sizes: StepSizes, optimizer: OptimizerConfig) -> tuple[Any, ...]:
    """Arguments of `train_step`: random texts, an eighth of each being the prompt, and random features."""
    rng, shape = np.random.default_rng(0), (sizes.rows, sizes.length)
    vocab_size, width = target.config.vocab_size, drafter.fc[...].shape[1]
    full = np.full(sizes.rows, sizes.length, np.int32)
    batch = Batch(rng.integers(0, vocab_size, shape).astype(np.int32), full // 8, full)
    top = TopTokens(np.zeros((*shape, 0), np.int32), np.zeros((*shape, 0), np.float32))
    text = TextFeatures(rng.normal(size=(*shape, width)).astype(np.float32), top)
    vocab = make_vocab(vocab_size, np.arange(sizes.vocab))
    state = TrainState(drafter, init_optimizer(drafter, optimizer=optimizer))
    return jax.device_put((state, target, vocab, batch, text, jax.random.key(0)))


def compiled(function: Any, *arguments: Any, **static: Any) -> tuple[Any, float]:
    """The program, and the seconds that it took to compile."""
    start = time.monotonic()
    return function.lower(*arguments, **static).compile(), time.monotonic() - start


def main() -> int:
    """Prints one row for each program; exit code 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default=DEFAULT_PAIR)
    parser.add_argument("--drafter", default=DEFAULT_PAIR)
    parser.add_argument("--rows", type=int, default=4, metavar="R", help="texts of a step")
    parser.add_argument("--anchors", type=int, default=56, metavar="K", help="blocks of a text")
    parser.add_argument("--length", type=int, default=384, metavar="S", help="tokens of a text")
    parser.add_argument("--train-vocab", type=int, default=8192, metavar="V", help="tokens that are scored")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    pair = load_pair(options.target, options.drafter)
    if pair.drafter is None or pair.drafter.config.head != LMHeadConfig():
        raise ReanchorError("expected --drafter with DFlash's head and without weights in it")
    for name, got, most in (
        *(("rows", options.rows, None), ("anchors", options.anchors, options.length), ("length", options.length, None)),
        *(("train-vocab", options.train_vocab, pair.target.config.vocab_size), ("repeats", options.repeats, None)),
    ):
        if got < 1 or (most is not None and got > most):
            raise ReanchorError(f"--{name} is {got}; expected at least 1" + (f", at most {most}" if most else ""))
    sizes = StepSizes(options.rows, options.anchors, options.length, options.train_vocab)
    measure(pair.target, pair.drafter, sizes, options.repeats)
    return 0


def measure(target: Target, drafter: Drafter, sizes: StepSizes, repeats: int) -> None:
    """Prints the table."""
    optimizer = OptimizerConfig(steps=1000, learning_rate=1e-6, warmup=0)
    layer, config = drafter.config.layer, drafter.config
    state, *inputs = step_inputs(target, drafter, sizes, optimizer)
    settings = {"optimizer": optimizer, "num_anchors": sizes.anchors, "gamma": 4.0}
    step, step_seconds = compiled(train_step, state, *inputs, **settings)
    tokens = inputs[2].tokens
    forward = {"tap_ids": config.target_layer_ids, "num_top": 0, "dtype": "float32"}
    features, features_seconds = compiled(texts_forward, target, tokens, **forward)
    m, k, n = sizes.rows * sizes.anchors * config.num_slots, layer.hidden_size, layer.intermediate_size
    a, b = (jax.random.normal(jax.random.key(0), shape) for shape in ((m, k), (k, n)))
    matmul, matmul_seconds = compiled(jax.jit(jnp.matmul), a, b)

    def run_step() -> Any:
        nonlocal state  # donated
        state, loss = step(state, *inputs)
        return loss

    programs: dict[str, tuple[Callable[[], Any], float, float]] = {
        f"matmul {m} x {k} x {n}": (lambda: matmul(a, b), 2.0 * m * k * n, matmul_seconds),
        "train step": (run_step, step_flops(config, sizes), step_seconds),
        "features": (lambda: features(target, tokens), features_flops(target.config, sizes), features_seconds),
    }
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for repeat in range(repeats + 1):
        for name, (program, _, _) in programs.items():
            start = time.perf_counter()
            jax.block_until_ready(program())
            if repeat:
                seconds[name].append(time.perf_counter() - start)
    blocks, rate = sizes.rows * sizes.anchors, None
    print(
        "| program | compile s | ms | GFLOP | GFLOP/s | share of the matmul | blocks/s |\n|---|---|---|---|---|---|---|"
    )
    for name, (_, flops, compiling) in programs.items():
        median = statistics.median(seconds[name])
        rate = flops / median if rate is None else rate
        each = "" if name.startswith("matmul") else f"{blocks / median:.1f}"
        print(
            f"| {name} | {compiling:.1f} | {1000 * median:.2f} | {flops / 1e9:.1f} | {flops / median / 1e9:.1f} "
            f"| {flops / median / rate:.0%} | {each} |"
        )


if __name__ == "__main__":
    sys.exit(process.run(main))
