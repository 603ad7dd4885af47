"""config.json is untrusted: every field is read, fixed, inert or refused."""

from __future__ import annotations

import json
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from reanchor_jax.cache import init_cache
from reanchor_jax.checkpoint import load_drafter, load_target
from reanchor_jax.checkpoint.drafter_config import read_drafter_config
from reanchor_jax.checkpoint.hf_config import read_target_config
from reanchor_jax.config import DominoConfig, Llama3Scaling
from reanchor_jax.target import forward_text
from tests.checkpoint_folders import (
    LLAMA3,
    YARN,
    changed,
    drafter_config,
    drafter_tensors,
    refuses,
    target_config,
    target_tensors,
    write_folder,
)

GOLDEN = Path(__file__).parent / "golden"


def folder_with(tmp_path: Path, config: object) -> Path:
    text = config if isinstance(config, str) else json.dumps(config)
    (tmp_path / "config.json").write_text(text)
    return tmp_path


# ---------------------------------------------------------------- spellings


@pytest.mark.parametrize(
    "name", ["target_llama3_rope", "target_llama_tied", "target_qwen3_tied", "target_qwen3_untied"]
)
def test_both_spellings_of_golden_configs_agree(tmp_path, name):
    model = GOLDEN / name / "model"
    old = read_target_config(model)
    (tmp_path / "generation_config.json").write_text((model / "generation_config.json").read_text())
    new = read_target_config(folder_with(tmp_path, (model / "config.v5.json").read_text()))
    assert old == new
    assert (old.layer.rope.scaling is not None) == (name == "target_llama3_rope")


def test_llama3_scaling_is_read_in_both_spellings(tmp_path):
    want = Llama3Scaling(factor=8, low_freq_factor=1, high_freq_factor=4, original_max_position_embeddings=32)
    old_type = {"type": "llama3"} | {k: v for k, v in LLAMA3.items() if k != "rope_type"}
    for changes in (
        {"rope_scaling": LLAMA3},
        {"rope_scaling": old_type},
        {"rope_theta": ..., "rope_scaling": ..., "rope_parameters": LLAMA3 | {"rope_theta": 10000}},
        {"rope_scaling": LLAMA3, "rope_parameters": LLAMA3 | {"rope_theta": 10000.0}},
    ):
        rope = read_target_config(folder_with(tmp_path, target_config(**changes))).layer.rope
        assert (rope.theta, rope.scaling) == (10000.0, want)


def test_head_dim_of_llama_is_defined_by_its_width(tmp_path):
    config = read_target_config(folder_with(tmp_path, target_config(head_dim=...)))
    assert config.layer.head_dim == 16
    refuses(
        lambda: read_target_config(folder_with(tmp_path, target_config("qwen3", head_dim=...))), "head_dim is missing"
    )


@pytest.mark.parametrize(
    ("ours", "generation", "want"),
    [
        (2, None, (2,)),
        ([5, 2], None, (2, 5)),
        (None, None, ()),
        (2, {"eos_token_id": [7, 2]}, (2, 7)),
        (..., {"eos_token_id": 9}, (9,)),
        ([3], {"temperature": 0.6}, (3,)),
    ],
)
def test_eos_ids_are_the_union_of_both_files(tmp_path, ours, generation, want):
    folder_with(tmp_path, target_config(eos_token_id=ours))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert read_target_config(tmp_path).eos_token_ids == want


def test_block_size_may_stand_in_dflash_config(tmp_path):
    nested = {"mask_token_id": 150, "target_layer_ids": [0, 2], "block_size": 6}
    config = drafter_config(block_size=..., dflash_config=nested)
    assert read_drafter_config(folder_with(tmp_path, config)).block_size == 6


def test_inert_fields_are_ignored(tmp_path):
    """Among them `auto_map`: no code of a repository is ever imported."""
    plain = read_target_config(folder_with(tmp_path, target_config()))
    inert = {"auto_map": {"AutoModel": "evil.Model"}, "torch_dtype": "bfloat16", "transformers_version": "4.57.1"}
    inert |= {"attention_dropout": 0.5, "use_cache": False, "pretraining_tp": 2, "id2label": {"0": "A"}}
    assert read_target_config(folder_with(tmp_path, target_config(**inert))) == plain


# ---------------------------------------------------------------- refusals

HUGE = int("9" * 30)
BOTH = {  # fields of targets and drafters alike
    "vocab_size": [0, -1, "160", 160.0, True, None, HUGE, ..., [160]],
    "hidden_size": [0, -64, HUGE, "64", ...],
    "intermediate_size": [0, HUGE, None, ...],
    "num_hidden_layers": [0, -1, HUGE, 1.5, ...],
    "num_attention_heads": [0, HUGE, ...],
    "num_key_value_heads": [0, 3, 8, ...],
    "head_dim": [0, 15, -16, HUGE, "16"],
    "rms_norm_eps": [0, -1e-5, 1.0, float("nan"), float("inf"), "1e-5", None, True, ...],
    "rope_theta": [0, 1, -1.0, float("nan"), float("inf"), HUGE, None, "10000", ...],
    "hidden_act": ["gelu", None, [], ...],
    "attention_bias": [None, 0, "true"],
    "mlp_bias": [True],
    "partial_rotary_factor": [0.5, 2],
    "quantization_config": [{"quant_method": "gptq"}],
    "use_sliding_window": [True, "false"],
    "sliding_window": [4096],
    "layer_types": [["sliding_attention"], [], "full_attention", ["full_attention"] * 9],
    "model_type": ["gemma3_text", "mistral", None, 3, ["llama"], {}, ...],
    "rope_scaling": [
        {"rope_type": "yarn", "factor": 4.0},
        YARN | {"beta_fast": 1.0},
        YARN | {"mscale": "1"},
        YARN | {"truncate": 1},
        YARN | {"attention_factor": -1.0},
        YARN | {"low_freq_factor": 1.0},
        {"rope_type": "linear", "factor": 0},
        {"rope_type": "linear", "factor": 2.0, "beta_fast": 32},
        {"rope_type": "dynamic", "factor": 2.0},
        {"rope_type": ["llama3"]},
        {"type": "default", "rope_type": "llama3"},
        {"rope_type": "default", "factor": 8.0},
        {"factor": 8.0},
        {},
        "llama3",
        3,
        [],
        LLAMA3 | {"beta_fast": 32},
        LLAMA3 | {"low_freq_factor": 4.0},
        LLAMA3 | {"low_freq_factor": 9.0},
        *[{k: v for k, v in LLAMA3.items() if k != missing} for missing in LLAMA3],
        *[
            LLAMA3 | {name: bad}
            for name in LLAMA3
            if name != "rope_type"
            for bad in (0, -1, float("nan"), "8", None, HUGE)
        ],
    ],
    "rope_parameters": [
        {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}},
        {"rope_type": "default", "rope_theta": 20000.0},
        LLAMA3 | {"rope_theta": 10000.0},  # rope_scaling says null
        "default",
    ],
    "some_new_trick": [1, None, True],
    "bad\nname": [1],
}
TARGET = {
    "tie_word_embeddings": [None, 0, "true", ...],
    "max_position_embeddings": [0, HUGE, None, ...],
    "eos_token_id": [-1, 160, "2", [2, 160], [None], 2.0, True, {}],
    "bos_token_id": [-1, 160, "1", [1]],
    "architectures": [["Qwen3ForCausalLM"], "LlamaForCausalLM", []],
    "rope_interleaved": [True],
    "dflash_config": [{}],
}
DRAFTER = {
    "block_size": [0, 1, -3, 257, "6", None, ...],
    "num_target_layers": [0, -1, "3"],
    "architectures": [["Qwen3ForCausalLM"], ["DFlashDraftModel", "Other"], "DFlashDraftModel", None, ...],
    "dflash_config": [
        None,
        [],
        {},
        {"mask_token_id": 150},
        {"target_layer_ids": [0, 2]},
        *[{"mask_token_id": bad, "target_layer_ids": [0, 2]} for bad in (-1, 160, None, "150", 1.0, True)],
        *[
            {"mask_token_id": 150, "target_layer_ids": bad}
            for bad in ([], [0, 0], [-1, 2], [0, 3], [0, 1.0], ["0"], 3, None, {"0": 2})
        ],
        {"mask_token_id": 150, "target_layer_ids": [0, 2], "block_size": 7},
        {"mask_token_id": 150, "target_layer_ids": [0, 2], "causal": True},
    ],
}


ERROR_NAMES = {"rope_scaling": "rope_", "rope_parameters": "rope_", "bad\nname": "bad name"}
"""What an error calls a field, where not by its name."""


@pytest.mark.parametrize("kind", ["llama", "qwen3", "drafter"])
def test_every_bad_value_is_refused_by_name(tmp_path, kind):
    """One error line each; it names the field, also where a line break is in the name."""
    if kind == "drafter":
        read, good, table = read_drafter_config, drafter_config(), BOTH | DRAFTER
    else:
        read, good, table = read_target_config, target_config(kind), BOTH | TARGET
    read(folder_with(tmp_path, good))
    for name, values in table.items():
        for bad in values:
            config = changed(good, {name: bad})
            if config == good:  # the other model type's value
                continue
            line = refuses(lambda config=config: read(folder_with(tmp_path, config)), str(tmp_path))
            line = line.removeprefix(str(tmp_path))
            assert ERROR_NAMES.get(name, name) in line or (name == "dflash_config" and "drafter" in line), line


def test_spellings_of_a_domino_head(tmp_path):
    """The one that is written today, without what may be left out, and that of older files."""
    sizes = {"emb_dim": 24, "gru_hidden_dim": 32}
    nested = {"mask_token_id": 150, "target_layer_ids": [0, 2]}
    full = sizes | {"shift_label": True, "pure_draft_prefix_len": 1, "projector_type": "domino"}
    short = DominoConfig(**sizes, shift_label=False, pure_draft_prefix_len=0)
    for changes, head in (
        ({"architectures": ["DominoDraftModel"], "dflash_config": nested | full}, DominoConfig(
            **sizes, shift_label=True, pure_draft_prefix_len=1)),
        ({"architectures": ["DominoDraftModel"], "dflash_config": nested | sizes}, short),
        ({"dflash_config": nested | {"projector_type": "causal_v5"}, **sizes}, short),
    ):  # fmt: skip
        assert read_drafter_config(folder_with(tmp_path, drafter_config(**changes))).head == head
    missing = {"architectures": ["DominoDraftModel"], "dflash_config": nested | {"emb_dim": 24}}
    refuses(lambda: read_drafter_config(folder_with(tmp_path, drafter_config(**missing))), "gru_hidden_dim")


def test_drafters_of_other_kinds_are_named(tmp_path):
    read = lambda **changes: lambda: read_drafter_config(folder_with(tmp_path, drafter_config(**changes)))
    nested = {"mask_token_id": 150, "target_layer_ids": [0, 2]}
    refuses(read(emb_dim=24, gru_hidden_dim=32), "unknown field emb_dim, gru_hidden_dim")
    refuses(read(dflash_config=nested | {"projector_type": "dflash2"}), "projector_type", "domino")
    refuses(read(architectures=["Llama4DSparkModel"]), "Qwen3DSparkModel", "other drafters")
    refuses(read(architectures=["Qwen3DSparkModel"], markov_rank=8), "markov_head_type", "vanilla")
    refuses(read(architectures=["EagleModel"]), "DFlashDraftModel", "DominoDraftModel", "other drafters")
    refuses(read(num_target_layers=2), "target_layer_ids", "0 to 1")


def test_target_and_drafter_are_not_confused(tmp_path):
    refuses(lambda: read_target_config(folder_with(tmp_path, drafter_config())), "load_drafter")
    refuses(lambda: read_drafter_config(folder_with(tmp_path, target_config())), "DFlashDraftModel")


@pytest.mark.parametrize(
    ("text", "fragment"),
    [
        ("", "not valid JSON"),
        ("{", "not valid JSON"),
        ("[1]", "list"),
        ("null", "NoneType"),
        ('{"a": 1, "a": 2}', "twice"),
        ('{"rope_scaling": {"factor": 1, "factor": 2}}', "twice"),
        ("[" * 100_000, "not valid JSON"),
        ('{"vocab_size": ' + "9" * 6000 + "}", "not valid JSON"),
        ("\x00", "not valid JSON"),
    ],
)
def test_broken_json_is_refused(tmp_path, text, fragment):
    refuses(lambda: read_target_config(folder_with(tmp_path, text)), "config.json", fragment)


def test_missing_and_unreadable_config(tmp_path):
    refuses(lambda: read_target_config(tmp_path), "config.json is missing")
    (tmp_path / "config.json").write_bytes(b"\xff\xfe{}")
    refuses(lambda: read_target_config(tmp_path), "not valid JSON")
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").mkdir()
    refuses(lambda: read_target_config(tmp_path), "cannot be read")
    (tmp_path / "config.json").rmdir()
    os.mkfifo(tmp_path / "config.json")
    refuses(lambda: read_target_config(tmp_path), "cannot be read")


def test_bad_generation_config_is_refused(tmp_path):
    folder_with(tmp_path, target_config())
    for text, fragment in (("{", "not valid JSON"), ('{"eos_token_id": 160}', "eos_token_id"), ("[]", "list")):
        (tmp_path / "generation_config.json").write_text(text)
        refuses(lambda: read_target_config(tmp_path), "generation_config.json", fragment)


def test_huge_sizes_meet_the_file_before_any_allocation(tmp_path):
    """The largest sizes that pass the range checks would be terabytes."""
    config = target_config()
    tensors = target_tensors(config)
    huge = changed(config, {"vocab_size": 1 << 22, "hidden_size": 1 << 17, "num_hidden_layers": 1 << 10})
    refuses(lambda: load_target(write_folder(tmp_path, huge, tensors)), "missing tensors", "wrong shapes")


# ---------------------------------------------------------------- each field changes the model


@jax.jit
def target_output(target) -> jax.Array:
    return forward_text(target, jnp.arange(40, dtype=jnp.int32) * 7 % 150).hidden


@jax.jit
def drafter_output(drafter) -> jax.Array:
    keys = jax.random.split(jax.random.key(0))
    features = jax.random.normal(keys[0], (40, drafter.fc[...].shape[1]))
    cache = drafter.context(features, jnp.arange(40, dtype=jnp.int32))
    none = init_cache(drafter.config.layer, drafter.config.num_layers, 0, jnp.float32)
    block = jax.random.normal(keys[1], (6, 64))
    return drafter(block, 40 + jnp.arange(6, dtype=jnp.int32), cache, jnp.int32(40), none, jnp.int32(0))


# Without the same shapes the file would not load: see test_sizes_that_do_not_fit_the_file.
MODEL_CHANGES = {
    "rope_theta": {"rope_theta": 20000.0},
    "rope_parameters": {
        "rope_theta": ...,
        "rope_parameters": {"rope_type": "default", "rope_theta": 20000.0},
        "rope_scaling": ...,
    },
    "rms_norm_eps": {"rms_norm_eps": 1e-2},
    "heads": {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32},
    "rope_type": {"rope_scaling": LLAMA3},
}
SCALING_CHANGES = {
    "factor": {"factor": 4.0},
    "low_freq_factor": {"low_freq_factor": 2.0},
    "high_freq_factor": {"high_freq_factor": 8.0},
    "original_max_position_embeddings": {"original_max_position_embeddings": 16},
}


# Heads of another size would change the shapes of the drafter's q_norm and k_norm.
CHANGES = [
    (kind, what)
    for kind in ("llama", "drafter")
    for what in (*MODEL_CHANGES, *SCALING_CHANGES)
    if (kind, what) != ("drafter", "heads")
]


@pytest.mark.parametrize(("kind", "what"), CHANGES)
def test_each_field_changes_the_output(tmp_path, kind, what):
    if kind == "drafter":
        make, tensors, load, output = drafter_config, drafter_tensors, load_drafter, drafter_output
    else:
        make, tensors, load, output = target_config, target_tensors, load_target, target_output
    if what in MODEL_CHANGES:
        before, after = make(), make(**MODEL_CHANGES[what])
    else:
        before, after = make(rope_scaling=LLAMA3), make(rope_scaling=LLAMA3 | SCALING_CHANGES[what])
    first = load(write_folder(tmp_path / "before", before, tensors(before)))
    second = load(write_folder(tmp_path / "after", after, tensors(before)))
    assert float(jnp.abs(output(first) - output(second)).max()) > 1e-3


def test_drafter_fields_without_weights_are_kept(tmp_path):
    """What the drafter's own forward does not use reaches the config that decoding uses."""
    nested = {"mask_token_id": 149, "target_layer_ids": [2, 0]}
    config = read_drafter_config(folder_with(tmp_path, drafter_config(block_size=9, dflash_config=nested)))
    assert (config.block_size, config.mask_token_id, config.target_layer_ids) == (9, 149, (2, 0))
    assert config.target_num_layers == 3
    absent = read_drafter_config(folder_with(tmp_path, drafter_config(num_target_layers=...)))
    assert absent.target_num_layers is None


@pytest.mark.parametrize(
    ("changes", "fragment"),
    [
        ({"num_hidden_layers": 2}, "no place for: model.layers.2."),
        ({"num_hidden_layers": 4}, "missing tensors: model.layers.3."),
        ({"hidden_size": 128}, "expected"),
        ({"intermediate_size": 97}, "gate_proj.weight is 96x64, expected 97x64"),
        ({"vocab_size": 161}, "embed_tokens.weight is 160x64, expected 161x64"),
        ({"num_attention_heads": 8}, "q_proj.weight is 64x64, expected 128x64"),
        ({"num_key_value_heads": 4}, "k_proj.weight is 32x64, expected 64x64"),
        ({"head_dim": 32}, "q_proj.weight is 64x64, expected 128x64"),
        ({"tie_word_embeddings": False}, "missing tensors: lm_head.weight"),
        ({"model_type": "qwen3", "architectures": ...}, "q_norm.weight"),
    ],
)
def test_sizes_that_do_not_fit_the_file(tmp_path, changes, fragment):
    tensors = target_tensors(target_config())
    folder = write_folder(tmp_path, target_config(**changes), tensors)
    refuses(lambda: load_target(folder), str(tmp_path), fragment)
