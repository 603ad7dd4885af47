"""config.json of Gemma 4: both spellings, its own errors, and that saving loads back."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from reanchor_jax.checkpoint import load_drafter, load_target, save_drafter, save_target
from reanchor_jax.checkpoint.drafter_config import read_drafter_config
from reanchor_jax.checkpoint.fill import named_parameters
from reanchor_jax.checkpoint.hf_config import read_target_config
from reanchor_jax.training.start import new_drafter, new_drafter_config
from tests.checkpoint_folders import refuses
from tests.tiny import make_pair

GOLDEN = Path(__file__).parent / "golden"
TARGETS = ("target_gemma4_dense", "target_gemma4_unified")


def config_of(name: str, folder: str = "model") -> dict[str, Any]:
    return json.loads((GOLDEN / name / folder / "config.json").read_text())


def read(folder: Path, config: dict[str, Any]):
    (folder / "config.json").write_text(json.dumps(config))
    return lambda: read_target_config(folder)


@pytest.mark.parametrize("name", TARGETS)
def test_both_spellings_say_the_same(tmp_path, name):
    new = json.loads((GOLDEN / name / "model" / "config.v5.json").read_text())
    config = read(tmp_path, new)()
    assert config == read(tmp_path, config_of(name))()
    assert len(config.pattern) == 4 and config.pattern[3].sliding_window is None and config.scaled_embedding


def test_what_does_not_differ_is_left_out_of_the_newer_spelling(tmp_path):
    config = config_of("target_gemma4_dense") | {"per_layer_config": {}}
    del config["global_head_dim"]
    full = read(tmp_path, config)().pattern[3]
    assert (full.head_dim, full.num_kv_heads) == (16, 2)


@pytest.mark.parametrize("layers", [4, 6, 9])
def test_pattern_is_as_short_as_it_can_be(tmp_path, layers):
    types = ["full_attention" if n % 3 == 2 else "sliding_attention" for n in range(layers - 1)] + ["full_attention"]
    config = config_of("target_gemma4_dense") | {"layer_types": types, "num_hidden_layers": layers}
    pattern = read(tmp_path, config)().pattern
    assert len(pattern) == (4 if layers == 4 else 3)
    assert [layer.sliding_window for layer in pattern] == [8 if t.startswith("s") else None for t in types][
        : len(pattern)
    ]


@pytest.mark.parametrize(
    ("change", "fragments"),
    [
        ({"enable_moe_block": True}, ("enable_moe_block is True", "a mixture of experts is not supported")),
        ({"hidden_size_per_layer_input": 64}, ("is 64; expected 0", "per-layer inputs are not supported")),
        ({"hidden_size_per_layer_input": ...}, ("hidden_size_per_layer_input is missing",)),
        ({"num_kv_shared_layers": 4}, ("is 4; expected 0", "layers that share the keys and values of others")),
        ({"use_double_wide_mlp": True}, ("a double-wide MLP is not supported",)),
        ({"use_bidirectional_attention": "all"}, ("bidirectional attention over text is not supported",)),
        ({"hidden_activation": "gelu"}, ('expected "gelu_pytorch_tanh"',)),
        ({"layer_types": ["full_attention"] * 7}, ("for each of the 8 layers",)),
        ({"layer_types": ["full_attention"] * 7 + ["sliding_attention"]}, ('"full_attention" for the last',)),
        ({"sliding_window": 0}, ("sliding_window is 0",)),
        ({"sliding_window": ...}, ("sliding_window is missing",)),
        ({"global_head_dim": 31}, ("head dim of full_attention is 31; expected an even number",)),
        ({"global_head_dim": ...}, ("global_head_dim is missing",)),
        ({"num_key_value_heads": 3}, ("number of key/value heads", "is 3; expected a divisor of 4 heads")),
        ({"final_logit_softcapping": 0.0}, ("final_logit_softcapping is 0.0; expected a number above 0",)),
        ({"rope_parameters": {}}, ("full_attention is missing",)),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "proportional", "rope_theta": 1e6,
                                                    "partial_rotary_factor": 1.5}}},
            ("partial_rotary_factor is 1.5; expected at most 1",),
        ),
        ({"per_layer_config": {"3": {"head_dim": 32}}}, ("the same entry for each full layer, 3, 7",)),
        ({"per_layer_config": {"0": {"head_dim": 32}}}, ("the same entry for each full layer, 3, 7",)),
        ({"per_layer_config": {"3": {"x": 1}, "7": {"x": 1}}}, ("per_layer_config: 3: unknown field x",)),
        ({"attn_logit_softcapping": 50.0}, ("unknown field attn_logit_softcapping",)),
        ({"model_type": "gemma3_text"}, ("model_type is 'gemma3_text'; expected one of llama", "gemma4_unified")),
        ({"architectures": ["LlamaForCausalLM"]}, ("Gemma4ForCausalLM",)),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_named(tmp_path, change, fragments):
    config = {k: v for k, v in (config_of("target_gemma4_dense") | change).items() if v is not ...}
    refuses(read(tmp_path, config), *fragments)


def test_text_part_of_a_model_of_many_senses(tmp_path):
    config = config_of("target_gemma4_unified")
    refuses(read(tmp_path, config | {"text_config": config["text_config"] | {"model_type": "llama"}}), "text_config",
            "gemma4_unified_text")  # fmt: skip
    refuses(
        read(tmp_path, config | {"tie_word_embeddings": False}), "tie_word_embeddings is False", "as in text_config"
    )
    refuses(read(tmp_path, {k: v for k, v in config.items() if k != "text_config"}), "text_config is missing")
    refuses(read(tmp_path, config | {"thinker_config": {}}), "unknown field thinker_config")


@pytest.mark.parametrize("name", TARGETS)
def test_a_saved_target_loads_back(tmp_path, name):
    target = load_target(GOLDEN / name / "model")
    save_target(target, tmp_path, dtype=jnp.float32)
    loaded = load_target(tmp_path)
    text = {"gemma4_unified": "gemma4_unified_text"}.get(target.config.model_type, target.config.model_type)
    assert loaded.config == dataclasses.replace(target.config, model_type=text)
    for path, leaf in named_parameters(loaded).items():
        np.testing.assert_array_equal(leaf, named_parameters(target)[path])


def test_a_saved_drafter_loads_back(tmp_path):
    drafter = load_drafter(GOLDEN / "dspark_gemma4_vanilla" / "drafter")
    save_drafter(drafter, tmp_path, dtype=jnp.float32)
    loaded = load_drafter(tmp_path)
    assert loaded.config == drafter.config and drafter.config.head.logit_softcap == 30
    for path, leaf in named_parameters(loaded).items():
        np.testing.assert_array_equal(leaf, named_parameters(drafter)[path])


def test_new_drafters_for_gemma_have_layers_of_qwen3(tmp_path):
    target = make_pair(4, family="gemma4_text").target
    config = new_drafter_config(target, num_layers=2, block_size=4, mask_token_id=15, target_layer_ids=(0, 5))
    assert config.layer.sliding_window is None and config.layer.activation == "silu" and not config.layer.sandwich_norms
    refuses(lambda: new_drafter(target, config, "layers", 0), "gemma4_text", "--start random")
    drafter = new_drafter(target, config, "random", 0)
    save_drafter(drafter, tmp_path, dtype=jnp.float32)
    assert load_drafter(tmp_path).config == config


def test_a_drafter_of_sliding_layers_is_refused(tmp_path):
    config = config_of("dspark_gemma4_vanilla", "drafter") | {"layer_types": ["sliding_attention", "full_attention"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    refuses(lambda: read_drafter_config(tmp_path), "layer_types", '"full_attention" alone')
