"""Random targets of many shapes against transformers itself, through files on disk.

Needs torch: `pip install -e '.[test,parity]' && pytest tests/parity`.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from reanchor_jax.checkpoint import load_target
from reanchor_jax.checkpoint.hf_config import read_target_config
from reanchor_jax.config import DecodeConfig
from reanchor_jax.loop import generate
from reanchor_jax.pair import Pair
from reanchor_jax.rope import attention_factor, rope_frequencies
from reanchor_jax.target import forward_text

TOLERANCE = 2e-4
CONFIGS = {"llama": LlamaConfig, "qwen3": Qwen3Config}
BASE = {
    "vocab_size": 128,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}


def llama3(factor: float = 8.0, low: float = 1.0, high: float = 4.0, positions: int = 64) -> dict[str, Any]:
    return {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": positions,
    }


def yarn(factor: float = 4.0, positions: int = 16) -> dict[str, Any]:
    return {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": factor,
        "original_max_position_embeddings": positions,
    }


def live_model(model_type: str, changes: dict[str, Any], seed: int = 0) -> Any:
    """A random model of transformers, with norm weights away from 1 so that leaving one out shows."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIGS[model_type](**(BASE | changes)), dtype=torch.float32).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.uniform_(0.5, 1.5)
            else:
                weight.normal_(0, 0.15)
    return model


def live_outputs(model: Any, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Logits [P, V] and hidden states behind each layer [L, P, D]; the last one behind the final norm."""
    with torch.no_grad():
        out = model(torch.from_numpy(ids[None]).long(), output_hidden_states=True, use_cache=False)
    return out.logits[0].numpy(), np.stack([hidden[0].numpy() for hidden in out.hidden_states[1:]])


def our_outputs(folder: Path, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    target = load_target(folder)
    output = forward_text(target, jnp.asarray(ids, jnp.int32), tuple(range(target.config.num_layers)))
    layers = np.asarray(output.features).reshape(len(ids), target.config.num_layers, -1).swapaxes(0, 1)
    return np.asarray(target.logits(output.hidden)), layers


def assert_parity(folder: Path, model_type: str, changes: dict[str, Any], num_tokens: int) -> np.ndarray:
    """Returns the logits, for comparing configs among each other."""
    model = live_model(model_type, changes)
    model.save_pretrained(folder)
    ids = np.random.default_rng(0).integers(0, BASE["vocab_size"], num_tokens)
    want_logits, want_layers = live_outputs(model, ids)
    logits, layers = our_outputs(folder, ids)
    np.testing.assert_allclose(layers, want_layers, rtol=TOLERANCE, atol=TOLERANCE)
    np.testing.assert_allclose(logits, want_logits, rtol=TOLERANCE, atol=TOLERANCE)
    return logits


SHAPES = st.fixed_dictionaries(
    {
        "num_hidden_layers": st.integers(1, 4),
        "num_key_value_heads": st.sampled_from([1, 2, 4]),
        "head_dim": st.sampled_from([2, 8, 12, 32]),
        "intermediate_size": st.sampled_from([16, 80]),
        "rms_norm_eps": st.sampled_from([1e-6, 1e-2]),
        "tie_word_embeddings": st.booleans(),
        "attention_bias": st.booleans(),
    }
)
LINEAR_ROPES = st.sampled_from([2.0, 5.0]).map(
    lambda factor: {"rope_type": "linear", "rope_theta": 10000.0, "factor": factor}
)
YARN_ROPES = st.builds(
    lambda factor, positions, extra: yarn(factor, positions) | extra,
    st.sampled_from([1.0, 2.0, 8.0]),
    st.sampled_from([16, 64]),
    st.sampled_from(
        [
            {},
            {"beta_fast": 8.0, "beta_slow": 2.0, "truncate": False},
            {"attention_factor": 1.3},
            {"mscale": 0.7, "mscale_all_dim": 0.3},
        ]
    ),
)
DEFAULT_ROPES = st.sampled_from([100.0, 1e4, 1e6]).map(lambda theta: {"rope_type": "default", "rope_theta": theta})
LLAMA3_ROPES = st.builds(
    llama3,
    factor=st.sampled_from([2.0, 8.0]),
    high=st.sampled_from([2.0, 4.0]),
    positions=st.sampled_from([16, 64]),
)


@pytest.mark.parametrize("model_type", CONFIGS)
@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(shape=SHAPES, rope=DEFAULT_ROPES | LLAMA3_ROPES | LINEAR_ROPES | YARN_ROPES)
def test_random_configs(tmp_path_factory, model_type, shape, rope):
    changes = shape | {"rope_parameters": rope}
    assert_parity(tmp_path_factory.mktemp("model"), model_type, changes, num_tokens=40)


@pytest.mark.parametrize(
    ("model_type", "rope"),
    [
        ("llama", BASE["rope_parameters"]),
        ("llama", llama3(positions=512)),
        ("qwen3", BASE["rope_parameters"]),
        ("qwen3", {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}),
        ("llama", yarn(positions=512)),
    ],
    ids=["llama", "llama3", "qwen3", "linear", "yarn"],
)
def test_long_prompt(tmp_path, model_type, rope):
    """4096 tokens: a rotary error grows with the position."""
    assert_parity(tmp_path, model_type, {"num_hidden_layers": 2, "rope_parameters": rope}, num_tokens=4096)


CHANGES = {
    "base": {},
    "rms_norm_eps": {"rms_norm_eps": 1e-1},
    "rope_theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    "llama3": {"rope_parameters": llama3(positions=16)},
    "low_freq_factor": {"rope_parameters": llama3(positions=16, low=2.0)},
    "factor": {"rope_parameters": llama3(positions=16, factor=2.0)},
    "linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    "yarn": {"rope_parameters": yarn(positions=256)},
    "beta_fast": {"rope_parameters": yarn(positions=256) | {"beta_fast": 2.0}},
    "attention_factor": {"rope_parameters": yarn(positions=256) | {"attention_factor": 1.5}},
}
"""Fields that leave the weights alone: the same ones are drawn for each."""


@pytest.mark.parametrize("model_type", CONFIGS)
def test_every_field_that_matters_changes_the_output_as_theirs(tmp_path, model_type):
    """Parity holds for each change, and no two configs give the same logits."""
    logits = {
        name: assert_parity(tmp_path / name, model_type, changes, num_tokens=64) for name, changes in CHANGES.items()
    }
    for one, other in itertools.combinations(logits, 2):
        assert np.abs(logits[one] - logits[other]).max() > 100 * TOLERANCE, (one, other)


@pytest.mark.parametrize(
    "scaling",
    [
        llama3(positions=512),
        {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0},
        yarn(4.0, 512),
        yarn(8.0, 512) | {"beta_fast": 16.0, "beta_slow": 2.0, "truncate": False},
        yarn(8.0, 512) | {"mscale": 0.7, "mscale_all_dim": 0.3},
        yarn(1.0, 512),
        yarn(40.0, 4096) | {"attention_factor": 1.25},
    ],
)
@pytest.mark.parametrize("head_dim", [16, 64, 128])
def test_rope_frequencies_and_attention_factor(tmp_path, scaling, head_dim):
    """`ROPE_INIT_FUNCTIONS` itself."""
    config = Qwen3Config(**(BASE | {"head_dim": head_dim, "rope_parameters": scaling}))
    want, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, torch.device("cpu"))
    config.architectures = ["Qwen3ForCausalLM"]
    config.save_pretrained(tmp_path)
    rope = read_target_config(tmp_path).layer.rope
    np.testing.assert_allclose(rope_frequencies(rope, head_dim), want.numpy(), rtol=1e-6)
    np.testing.assert_allclose(attention_factor(rope), factor, rtol=1e-12)


@pytest.mark.parametrize("model_type", CONFIGS)
def test_greedy_decoding(tmp_path, model_type):
    """`generate` of transformers and ours, token for token; 100 tokens behind a padded prompt."""
    assert_greedy_parity(tmp_path, live_model(model_type, {"num_hidden_layers": 2}, seed=3))


def assert_greedy_parity(folder: Path, model: Any) -> None:
    model.save_pretrained(folder)
    ids = np.random.default_rng(1).integers(0, BASE["vocab_size"], 21)
    with torch.no_grad():
        out = model.generate(
            torch.from_numpy(ids[None]).long(), do_sample=False, max_new_tokens=100, output_logits=True,
            return_dict_in_generate=True,
        )  # fmt: skip
    margins = np.diff(torch.stack(out.logits)[:, 0].topk(2).values.numpy(), axis=-1)
    assert np.abs(margins).min() > TOLERANCE, "a near-tie; take another seed"
    padded = jnp.zeros(32, jnp.int32).at[:21].set(jnp.asarray(ids, jnp.int32))
    result = jax.jit(lambda pair: generate(pair, padded, jnp.int32(21), key=jax.random.key(0),
                                           config=DecodeConfig(method="ar"), max_new_tokens=100))(
        Pair(load_target(folder), None)
    )  # fmt: skip
    np.testing.assert_array_equal(result.tokens[:100], out.sequences[0, 21:].numpy())
