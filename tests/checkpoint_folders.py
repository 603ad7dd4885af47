"""Small checkpoints on disk, made in the test: configs as dicts, tensors from a seed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from reanchor_jax.errors import ReanchorError

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


def target_config(model_type: str = "llama", **changes: Any) -> dict[str, Any]:
    """A config.json of a target; a change to `...` removes the field."""
    config = {
        "architectures": [{"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}[model_type]],
        "model_type": model_type,
        "attention_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "hidden_size": 64,
        "intermediate_size": 96,
        "max_position_embeddings": 512,
        "num_attention_heads": 4,
        "num_hidden_layers": 3,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "vocab_size": 160,
    }
    return changed(config, changes)


def drafter_config(**changes: Any) -> dict[str, Any]:
    """A config.json of a DFlash drafter for such a target."""
    config = target_config("qwen3")
    for name in ("bos_token_id", "eos_token_id", "max_position_embeddings", "tie_word_embeddings"):
        del config[name]
    config |= {
        "architectures": ["DFlashDraftModel"],
        "block_size": 6,
        "dflash_config": {"mask_token_id": 150, "target_layer_ids": [0, 2]},
        "num_hidden_layers": 2,
        "num_target_layers": 3,
    }
    return changed(config, changes)


def changed(config: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """The config with fields replaced, or removed where the change is `...`."""
    merged = config | changes
    return {name: value for name, value in merged.items() if value is not ...}


def _layers(config: dict[str, Any], prefix: str, qk_norm: bool) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    width, mlp, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    for layer in range(config["num_hidden_layers"]):
        at = f"{prefix}layers.{layer}."
        shapes |= {
            at + "input_layernorm.weight": (width,),
            at + "self_attn.q_proj.weight": (queries, width),
            at + "self_attn.k_proj.weight": (keys, width),
            at + "self_attn.v_proj.weight": (keys, width),
            at + "self_attn.o_proj.weight": (width, queries),
            at + "post_attention_layernorm.weight": (width,),
            at + "mlp.gate_proj.weight": (mlp, width),
            at + "mlp.up_proj.weight": (mlp, width),
            at + "mlp.down_proj.weight": (width, mlp),
        }
        if qk_norm:
            shapes |= {at + "self_attn.q_norm.weight": (head_dim,), at + "self_attn.k_norm.weight": (head_dim,)}
    return shapes


def random_tensors(shapes: dict[str, tuple[int, ...]], seed: int = 0) -> dict[str, np.ndarray]:
    """float32 tensors; norms scatter around one, so that no weight is neutral."""
    rng = np.random.default_rng(seed)
    return {
        name: (rng.normal(size=shape) * (0.2 if len(shape) == 1 else 0.15) + (len(shape) == 1)).astype(np.float32)
        for name, shape in shapes.items()
    }


def target_tensors(config: dict[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """Tensors of a target's checkpoint."""
    vocab, width = config["vocab_size"], config["hidden_size"]
    shapes = {"model.embed_tokens.weight": (vocab, width), "model.norm.weight": (width,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, width)
    return random_tensors(shapes | _layers(config, "model.", config["model_type"] == "qwen3"), seed)


def drafter_tensors(config: dict[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """Tensors of a drafter's checkpoint."""
    taps, width = len(config["dflash_config"]["target_layer_ids"]), config["hidden_size"]
    shapes = {"fc.weight": (width, taps * width), "hidden_norm.weight": (width,), "norm.weight": (width,)}
    return random_tensors(shapes | _layers(config, "", True), seed)


def write_folder(folder: Path, config: object, tensors: dict[str, np.ndarray]) -> Path:
    """A folder with one safetensors file."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def write_sharded(folder: Path, config: object, tensors: dict[str, np.ndarray], num_shards: int = 3) -> dict:
    """A folder with shards and an index; returns the index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    shard_of = {name: f"model-{n % num_shards + 1:05}-of-{num_shards:05}.safetensors" for n, name in enumerate(tensors)}
    for shard in set(shard_of.values()):
        save_file({name: t for name, t in tensors.items() if shard_of[name] == shard}, folder / shard)
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": shard_of}
    write_index(folder, index)
    return index


def write_index(folder: Path, index: object) -> None:
    """Writes the shards' index."""
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def refuses(run, *fragments: str) -> str:
    """Demands a `ReanchorError` of one line that holds the fragments; returns the line."""
    with pytest.raises(ReanchorError) as caught:
        run()
    line = str(caught.value)
    assert "\n" not in line and len(line) < 1000
    for fragment in fragments:
        assert fragment in line, line
    return line
