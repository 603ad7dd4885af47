"""Random Gemma 4 text decoders of many shapes against transformers itself, through files on disk."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import (
    AutoModelForCausalLM,
    Gemma4Config,
    Gemma4ForConditionalGeneration,
    Gemma4TextConfig,
    Gemma4UnifiedTextConfig,
)

from tests.parity.test_targets import TOLERANCE, assert_greedy_parity, live_outputs, our_outputs

SLIDING, FULL = "sliding_attention", "full_attention"
VOCAB = 128
BASE = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 6,
    "layer_types": [SLIDING, SLIDING, FULL] * 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 24,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 8192,
    "sliding_window": 8,
    "final_logit_softcapping": 5.0,
    "tie_word_embeddings": True,
    "hidden_size_per_layer_input": 0,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}


def ropes(sliding: float = 1e4, full: float = 1e6, share: float = 0.25, factor: float = 1.0) -> dict[str, Any]:
    return {
        SLIDING: {"rope_type": "default", "rope_theta": sliding},
        FULL: {"rope_type": "proportional", "rope_theta": full, "partial_rotary_factor": share}
        | ({} if factor == 1 else {"factor": factor}),  # read by them, with a warning
    }


def live_model(changes: dict[str, Any], seed: int = 0) -> Any:
    """A random model whose norm weights and layer scalars are away from 1."""
    settings = BASE | {"rope_parameters": ropes()} | changes
    kind = settings.pop("kind", Gemma4TextConfig)
    if kind is Gemma4UnifiedTextConfig:
        del settings["hidden_size_per_layer_input"]
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(kind(**settings), dtype=torch.float32).eval()
    randomize(model)
    return model


@torch.no_grad()
def randomize(model: Any) -> None:
    for name, weight in itertools.chain(model.named_parameters(), model.named_buffers()):
        if "norm" in name or "layer_scalar" in name:
            weight.uniform_(0.6, 1.4)
        elif "inv_freq" not in name and "embed_scale" not in name:
            weight.normal_(0, 0.15)


def assert_parity(folder: Path, changes: dict[str, Any], num_tokens: int) -> np.ndarray:
    """Returns the logits, for comparing configs among each other."""
    model = live_model(changes)
    model.save_pretrained(folder)
    ids = np.random.default_rng(0).integers(0, VOCAB, num_tokens)
    want_logits, want_layers = live_outputs(model, ids)
    logits, layers = our_outputs(folder, ids)
    np.testing.assert_allclose(layers, want_layers, rtol=TOLERANCE, atol=TOLERANCE)
    np.testing.assert_allclose(logits, want_logits, rtol=TOLERANCE, atol=TOLERANCE)
    likelihood = lambda x: np.asarray(jax.nn.log_softmax(x))[np.arange(num_tokens - 1), ids[1:]].sum()
    np.testing.assert_allclose(likelihood(logits), likelihood(want_logits), rtol=TOLERANCE)
    return logits


SHAPES = st.fixed_dictionaries(
    {
        "layer_types": st.sampled_from(
            [[FULL], [SLIDING, FULL], [SLIDING, SLIDING, FULL] * 2, [FULL, SLIDING, FULL], [SLIDING, FULL, FULL, FULL]]
        ),
        "kind": st.sampled_from([Gemma4TextConfig, Gemma4UnifiedTextConfig]),
        "attention_k_eq_v": st.booleans(),
        "num_key_value_heads": st.sampled_from([1, 2, 4]),
        "num_global_key_value_heads": st.sampled_from([None, 1, 2]),
        "head_dim": st.sampled_from([2, 8, 12]),
        "global_head_dim": st.sampled_from([4, 12, 32]),
        "sliding_window": st.sampled_from([1, 5, 100]),
        "rms_norm_eps": st.sampled_from([1e-6, 1e-2]),
        "final_logit_softcapping": st.sampled_from([None, 2.0, 30.0]),
        "tie_word_embeddings": st.booleans(),
        "attention_bias": st.booleans(),
        "rope_parameters": st.builds(
            ropes,
            sliding=st.sampled_from([100.0, 1e4]),
            full=st.sampled_from([500.0, 1e6]),
            share=st.sampled_from([0.25, 0.6, 1.0]),
            factor=st.sampled_from([1.0, 4.0]),
        ),
    }
)


@settings(max_examples=16, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(shape=SHAPES)
def test_random_configs(tmp_path_factory, shape):
    changes = shape | {"num_hidden_layers": len(shape["layer_types"])}
    assert_parity(tmp_path_factory.mktemp("model"), changes, num_tokens=40)


@pytest.mark.parametrize("window", [8, 1024])
def test_long_prompt(tmp_path, window):
    """4096 tokens: rotary and window errors grow with the position."""
    changes = {"num_hidden_layers": 2, "layer_types": [SLIDING, FULL], "sliding_window": window}
    assert_parity(tmp_path, changes, num_tokens=4096)


CHANGES = {
    "base": {},
    "rms_norm_eps": {"rms_norm_eps": 1e-1},
    "sliding_window": {"sliding_window": 9},
    "softcap": {"final_logit_softcapping": 3.0},
    "no softcap": {"final_logit_softcapping": None},
    "sliding theta": {"rope_parameters": ropes(sliding=500.0)},
    "full theta": {"rope_parameters": ropes(full=500.0)},
    "partial_rotary_factor": {"rope_parameters": ropes(share=0.5)},
    "factor": {"rope_parameters": ropes(factor=8.0)},
}
"""Fields that leave the weights alone: the same ones are drawn for each."""


def test_every_field_that_matters_changes_the_output_as_theirs(tmp_path):
    """Parity holds for each change, and no two configs give the same logits."""
    logits = {name: assert_parity(tmp_path / name, changes, num_tokens=64) for name, changes in CHANGES.items()}
    for one, other in itertools.combinations(logits, 2):
        assert np.abs(logits[one] - logits[other]).max() > 20 * TOLERANCE, (one, other)


def test_text_of_a_model_that_sees(tmp_path):
    """`gemma4`: text is a part; the tensors of the eye are there and left alone."""
    text = Gemma4TextConfig(**(BASE | {"rope_parameters": ropes(), "pad_token_id": 0}))
    eye = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
           "num_key_value_heads": 2, "head_dim": 16}  # fmt: skip
    torch.manual_seed(0)
    model = Gemma4ForConditionalGeneration(Gemma4Config(text_config=text, vision_config=eye, audio_config=None)).eval()
    randomize(model)
    model.save_pretrained(tmp_path)
    ids = np.random.default_rng(0).integers(0, VOCAB, 40)
    logits, layers = our_outputs(tmp_path, ids)
    want_logits, want_layers = live_outputs(model, ids)
    np.testing.assert_allclose(layers, want_layers, rtol=TOLERANCE, atol=TOLERANCE)
    np.testing.assert_allclose(logits, want_logits, rtol=TOLERANCE, atol=TOLERANCE)


def test_greedy_decoding(tmp_path):
    """`generate` of transformers and ours, token for token; 100 tokens, window 8."""
    assert_greedy_parity(tmp_path, live_model({}, seed=3))
