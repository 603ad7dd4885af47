"""Writing of targets and drafters in the formats that `load` reads."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from safetensors import SafetensorError
from safetensors.numpy import save_file

from reanchor_jax.checkpoint import vocab_map
from reanchor_jax.checkpoint.drafter_config import DRAFTER_CLASSES
from reanchor_jax.checkpoint.fill import named_parameters
from reanchor_jax.checkpoint.hf_config import CLASSES
from reanchor_jax.checkpoint.load import float_dtype
from reanchor_jax.checkpoint.rope_config import SCALINGS
from reanchor_jax.checkpoint.rules import Rule, drafter_rules, expand, target_rules
from reanchor_jax.checkpoint.safetensors_source import SINGLE
from reanchor_jax.config import DominoConfig, DSparkConfig, LayerConfig, LMHeadConfig, RopeConfig
from reanchor_jax.drafter import Drafter
from reanchor_jax.errors import ReanchorError
from reanchor_jax.target import Target


def save_target(target: Target, folder: str | Path, *, dtype: DTypeLike = jnp.bfloat16) -> None:
    """Writes a target as a Hugging Face folder: config.json and model.safetensors.

    An earlier checkpoint in the folder is replaced; its other files stay. Stopped at any moment,
    the folder holds the earlier checkpoint, the new one, or no config.json, which does not load.

    Args:
      target: what to write.
      folder: where; made where there is none.
      dtype: what the parameters are cast to; their own loads back bit by bit.

    Raises:
      ReanchorError: the folder cannot be written.
    """
    config, dtype = target.config, float_dtype(dtype)
    ids = config.eos_token_ids
    data = {
        "architectures": [CLASSES[config.model_type]],
        "model_type": config.model_type,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": ids[0] if len(ids) == 1 else list(ids) or None,
        "max_position_embeddings": config.max_position_embeddings,
        "num_hidden_layers": config.num_layers,
        "tie_word_embeddings": config.tie_word_embeddings,
        "vocab_size": config.vocab_size,
        **_layer_fields(config.layer, config.rope),
    }
    if config.model_type == "llama":
        data["mlp_bias"] = False
    else:
        data["use_sliding_window"] = False
    _write(Path(folder), data, _tensors(target, target_rules(config), config.num_layers, dtype), dtype)


def save_drafter(drafter: Drafter, folder: str | Path, *, dtype: DTypeLike = jnp.bfloat16) -> None:
    """Writes a drafter in the format of its kind; see `save_target` for arguments and errors."""
    config, dtype = drafter.config, float_dtype(dtype)
    if not config.layer.qk_norm:
        raise ReanchorError("the drafter's qk_norm is False; expected True, the DFlash format has no other layers")
    own = {"mask_token_id": config.mask_token_id, "target_layer_ids": list(config.target_layer_ids)}
    top = {}
    if isinstance(config.head, LMHeadConfig) and config.head.draft_vocab_size is not None:
        top["draft_vocab_size"] = config.head.draft_vocab_size
    if isinstance(config.head, DominoConfig):
        own |= {"projector_type": "domino", **vars(config.head)}
    slides = config.sliding_layers or (False,) * config.num_layers
    if config.sliding_window is not None:
        own["sliding_attention"] = config.sliding_attention
    if config.sliding_attention == "symmetric":
        own["causal"] = False  # says the same to vLLM
    if isinstance(config.head, DSparkConfig):
        own |= {name: value for name, value in vars(config.head).items() if value is not None}
    else:
        own = {"dflash_config": own}
    data = {
        "architectures": [DRAFTER_CLASSES[type(config.head)]],
        "model_type": "qwen3",
        "block_size": config.num_slots,
        "layer_types": ["sliding_attention" if slide else "full_attention" for slide in slides],
        "num_hidden_layers": config.num_layers,
        "sliding_window": config.sliding_window,
        "tie_word_embeddings": False,
        "use_sliding_window": config.sliding_window is not None,
        "vocab_size": config.vocab_size,
        **own,
        **top,
        **_layer_fields(config.layer, config.rope),
    }
    if config.target_num_layers is not None:
        data["num_target_layers"] = config.target_num_layers
    _write(Path(folder), data, _tensors(drafter, drafter_rules(config), config.num_layers, dtype), dtype)


def _layer_fields(layer: LayerConfig, rope: RopeConfig) -> dict[str, Any]:
    """Fields of the layer, rotary embedding in the older spelling, which every reader knows."""
    scaling = None
    if rope.scaling is not None:
        given = {name: value for name, value in vars(rope.scaling).items() if value is not None}
        scaling = {"rope_type": SCALINGS[type(rope.scaling)], **given}
    return {
        "attention_bias": layer.attention_bias,
        "head_dim": layer.head_dim,
        "hidden_act": "silu",
        "hidden_size": layer.hidden_size,
        "intermediate_size": layer.intermediate_size,
        "num_attention_heads": layer.num_heads,
        "num_key_value_heads": layer.num_kv_heads,
        "rms_norm_eps": layer.rms_norm_eps,
        "rope_scaling": scaling,
        "rope_theta": rope.theta,
    }


def _tensors(
    module: Target | Drafter, rules: tuple[Rule, ...], num_layers: int, dtype: jnp.dtype
) -> dict[str, np.ndarray]:
    """The file's tensors: rows of the stacked parameters, by the names that loading expects."""
    arrays = {path: np.asarray(leaf) for path, leaf in named_parameters(module).items()}
    tensors = {}
    for name, slot in expand(rules, num_layers).items():
        if slot.transform == "offsets_to_ids":
            tensors |= vocab_map.to_tensors(arrays[slot.path], module.config.vocab_size)
        else:
            array = arrays[slot.path]
            tensors[name] = (array if slot.layer is None else array[slot.layer]).astype(dtype)
    return tensors


def _write(folder: Path, config: dict[str, Any], tensors: dict[str, np.ndarray], dtype: jnp.dtype) -> None:
    """Both files are complete beside their place before either is moved there. config.json goes
    first and comes last: weights never stand beside the config of others."""
    config = {**config, "dtype": dtype.name}
    places = [folder / SINGLE, folder / "config.json"]
    aside = [place.with_name(f".{place.name}.partial") for place in places]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, aside[0], metadata={"format": "pt"})  # the key that transformers demands
        aside[1].write_text(json.dumps(config, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        shutil.copymode(aside[1], aside[0])  # the library gives its file to the owner alone
        for path in aside:
            with path.open("rb") as file:
                os.fsync(file.fileno())
        places[1].unlink(missing_ok=True)
        for path, place in zip(aside, places, strict=True):
            os.replace(path, place)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ReanchorError(f"{folder} cannot be written: {reason}; choose another folder") from None
    finally:
        for path in aside:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
