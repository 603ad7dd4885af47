"""Gradient accumulation; parameters and moments in float32 under a bfloat16 forward and backward."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest

from reanchor_jax.config import DominoConfig, DSparkConfig, HeadConfig, LMHeadConfig
from reanchor_jax.errors import ReanchorError
from reanchor_jax.training.checkpoints import Checkpoints
from reanchor_jax.training.data import Text, make_batches
from reanchor_jax.training.features import TextFeatures, TopTokens
from reanchor_jax.training.loss import block_loss, make_vocab
from reanchor_jax.training.optimizer import OptimizerConfig, make_optimizer, update
from tests.tiny import make_pair

pytestmark = pytest.mark.usefixtures("quick_compiles")


def plain_loss(params, batch):
    """Mean squared error of rows, so that the mean of several batches' gradients is that of the joined batch."""
    inputs, labels = batch
    outputs = jnp.tanh(inputs @ params["weight"]) @ params["out"] * params["norm"][None]
    return jnp.mean((outputs - labels) ** 2)


def updated(batches, checkpoints: Checkpoints | None = None, **settings) -> list[dict]:
    """Parameters after every step on a plain loss; with `checkpoints`, each step starts from the last one's file."""
    rng = np.random.default_rng(0)
    shapes = {"weight": (6, 5), "out": (5, 3), "norm": (3,)}
    params = {name: jnp.asarray(rng.normal(size=shape), jnp.float32) for name, shape in shapes.items()}
    optimizer = make_optimizer(
        OptimizerConfig(steps=len(batches), learning_rate=0.02, weight_decay=0.1, **settings),
        jax.tree.map(lambda _: True, params),
    )

    @jax.jit
    def step(params, state, batch):
        return update(optimizer, jax.grad(plain_loss)(params, batch), state, params)

    state, seen = optimizer.init(params), []
    for number, batch in enumerate(batches):
        params, state = step(params, state, batch)
        if checkpoints is not None:
            checkpoints.save(number, (params, state))
            like = jax.tree.map(jnp.zeros_like, (params, state))
            params, state = checkpoints.restore(number, like)
        seen.append(jax.device_get(params))
    return seen


def test_steps_of_an_update_equal_one_step_on_their_joined_batch():
    """Schedule and clipping included: within 1e-6 of weights around 1, whose updates are up to 2e-2."""
    rng = np.random.default_rng(1)
    joined = [(rng.normal(size=(12, 6)), rng.normal(size=(12, 3))) for _ in range(5)]
    joined = [tuple(jnp.asarray(x, jnp.float32) for x in batch) for batch in joined]
    split = [tuple(x[4 * i : 4 * i + 4] for x in batch) for batch in joined for i in range(3)]
    want, got = updated(joined, warmup=2), updated(split, warmup=6, accumulate=3)
    for name in want[0]:
        for k, wanted in enumerate(want):
            np.testing.assert_allclose(got[3 * k + 2][name], wanted[name], rtol=0, atol=1e-6)
            for between in got[3 * k + 3 : 3 * k + 5]:  # between two updates nothing moves at all
                np.testing.assert_array_equal(between[name], got[3 * k + 2][name])
    assert all(np.max(np.abs(want[-1][name] - want[0][name])) > 1e-2 for name in want[0])
    # Negative control: a warm-up of one update instead of two is far outside.
    other = updated(split, warmup=2, accumulate=3)
    assert np.max(np.abs(other[-1]["weight"] - want[-1]["weight"])) > 1e-3


def texts(count: int) -> list[Text]:
    rng = np.random.default_rng(5)
    return [Text(tuple(rng.integers(0, 15, 5).tolist()), tuple(rng.integers(0, 15, 30).tolist())) for _ in range(count)]


def test_resume_between_two_updates_is_bit_for_bit(tmp_path: Path):
    rng = np.random.default_rng(1)
    batches = [(rng.normal(size=(4, 6)), rng.normal(size=(4, 3))) for _ in range(6)]
    batches = [tuple(jnp.asarray(x, jnp.float32) for x in batch) for batch in batches]
    checkpoints = Checkpoints(tmp_path)
    resumed = updated(batches, checkpoints, warmup=0, accumulate=3)
    checkpoints.close()
    for got, want in zip(resumed, updated(batches, warmup=0, accumulate=3), strict=True):
        for name in want:
            np.testing.assert_array_equal(got[name], want[name])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"accumulate": 0}, "--accumulate is 0; expected at least 1"),
        ({"accumulate": 4}, "--steps is 6; expected a multiple of --accumulate, 4"),
        ({"accumulate": 3, "warmup": 4}, "--warmup is 4; expected 0 to 3"),
    ],
)
def test_settings_out_of_range(changes: dict, message: str):
    with pytest.raises(ReanchorError, match=message):
        OptimizerConfig(**{"steps": 6, "learning_rate": 1e-3, "warmup": 0, **changes}).validate()


HEADS = {
    "lm": LMHeadConfig(),
    "domino": DominoConfig(emb_dim=4, gru_hidden_dim=8, shift_label=False, pure_draft_prefix_len=1),
    "dspark": DSparkConfig(
        markov_rank=4, markov_head_type="gated", enable_confidence_head=True, confidence_head_with_markov=True
    ),
}


def loss_function(head: HeadConfig, dtype: str):
    """The loss on one batch as a function of the drafter, the target being in `dtype`; and a drafter."""
    pair = make_pair(6, head=head)
    target = jax.tree.map(lambda x: x.astype(dtype), pair.target)
    batch = make_batches(texts(2), 2, 0)[0]
    features = jnp.asarray(np.random.default_rng(3).normal(size=(2, 128, 64)), jnp.float32)
    top = TopTokens(np.ones((2, 128, 2), np.int32), np.full((2, 128, 2), 0.25, np.float32))

    def loss(drafter):
        text = TextFeatures(features, top)
        vocab, key = make_vocab(16, None), jax.random.key(0)
        return block_loss(drafter, target, vocab, batch, text, key, num_anchors=4, gamma=4.0, distill=0.5)

    return loss, pair.drafter


def test_bfloat16_computes_but_float32_is_what_is_trained():
    """Loss within 0.5%; gradients within 15% in norm, under the tiny pair's sharp attention (bfloat16 has 0.4%)."""
    loss, gradient = loss_and_gradient(*loss_function(HEADS["lm"], "bfloat16"))
    want, wanted = loss_and_gradient(*loss_function(HEADS["lm"], "float32"))
    assert loss.dtype == jnp.float32
    np.testing.assert_allclose(loss, want, rtol=0.005)
    for (path, got), exact in zip(jax.tree_util.tree_leaves_with_path(gradient), jax.tree.leaves(wanted), strict=True):
        error = np.linalg.norm(got - exact) / np.linalg.norm(exact)
        assert 1e-3 < error < 0.15, (jax.tree_util.keystr(path), error)  # it really was computed in fewer bits


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS)
def test_dtypes_of_every_head(head: HeadConfig, dtype: str):
    """Strict promotion refuses a product of two dtypes; here all products of the forward are in the asked one."""
    loss, drafter = loss_function(head, dtype)
    products = [e for e in equations(jax.make_jaxpr(loss)(drafter).jaxpr) if e.primitive.name == "dot_general"]
    assert {str(v.aval.dtype) for e in products for v in e.invars} == {dtype}
    results = jax.eval_shape(jax.value_and_grad(loss), drafter)
    assert {leaf.dtype for leaf in jax.tree.leaves(results)} == {np.dtype("float32")}


def loss_and_gradient(loss, drafter):
    return jax.jit(jax.value_and_grad(loss))(drafter)


def equations(jaxpr):
    """Equations of a jaxpr and of all that are inside it."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            yield from equations(inner)
