"""Training of a tiny byte-level target: plain next-token cross entropy."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from reanchor_jax.config import LayerConfig, RopeConfig, TargetConfig
from reanchor_jax.target import Target, forward_text
from reanchor_jax.training.optimizer import OptimizerConfig, make_optimizer, update

MASK_ID, BOS_ID, EOS_ID, VOCAB_SIZE = 128, 129, 130, 132
"""Ids 0 to 127 are ASCII bytes; 131 fills the table up to a multiple of 4."""


def byte_target_config(model_type: str) -> TargetConfig:
    """A `llama` or `qwen3` of 0.3 M parameters."""
    return TargetConfig(
        model_type=model_type,
        vocab_size=VOCAB_SIZE,
        num_layers=6,
        pattern=(
            LayerConfig(
                hidden_size=64,
                intermediate_size=160,
                num_heads=4,
                num_kv_heads=2,
                head_dim=16,
                rms_norm_eps=1e-6,
                rope=RopeConfig(theta=10000.0, scaling=None),
                qk_norm=model_type == "qwen3",
            ),
        ),
        tie_word_embeddings=True,
        max_position_embeddings=2048,
        bos_token_id=BOS_ID,
        eos_token_ids=(EOS_ID,),
    )


def encode(text: str) -> list[int]:
    """BOS and the text's ASCII bytes; anything else becomes `?`."""
    return [BOS_ID, *text.encode("ascii", "replace")]


def windows(documents: Sequence[str], size: int) -> np.ndarray:
    """[n, size] int32 windows: the first `size` ids of each document that is long enough."""
    rows = [ids[:size] for ids in map(encode, documents) if len(ids) >= size]
    return np.array(rows, np.int32)


def next_token_loss(target: Target, tokens: jax.Array) -> jax.Array:
    """Mean cross entropy of tokens [R, T] given those before them, () float32."""

    def one_text(tokens: jax.Array) -> jax.Array:
        logits = target.logits(forward_text(target, tokens).hidden[:-1])
        at_label = jnp.take_along_axis(logits, tokens[1:, None], axis=1)[:, 0]
        return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - at_label)

    return jnp.mean(jax.vmap(one_text)(tokens))


def train_target(
    config: TargetConfig,
    texts: np.ndarray,
    *,
    steps: int,
    num_rows: int,
    learning_rate: float,
    seed: int,
    echo: Callable[[str], None],
) -> Target:
    """Trains a target on windows [n, T] int32; a function of its arguments alone."""
    target = Target(config, dtype=jnp.float32, rngs=nnx.Rngs(seed))
    settings = OptimizerConfig(steps=steps, learning_rate=learning_rate, warmup=min(50, steps // 10))
    optimizer = make_optimizer(settings, jax.tree.map(lambda _: True, target))

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(target: Target, opt_state: Any, tokens: jax.Array):
        loss, gradient = jax.value_and_grad(next_token_loss)(target, tokens)
        return *update(optimizer, gradient, opt_state, target), loss

    opt_state = jax.jit(optimizer.init)(target)
    rng = np.random.default_rng((seed, 4))
    start = time.monotonic()
    for number in range(1, steps + 1):
        rows = texts[rng.integers(len(texts), size=num_rows)]
        target, opt_state, loss = step(target, opt_state, rows)
        if number % 100 == 0 or number == steps:
            echo(f"target step {number} of {steps}: loss {float(loss):.3f}, {time.monotonic() - start:.0f} s")
    return target
