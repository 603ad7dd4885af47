"""Writing of targets and drafters in the formats that `load` reads."""

from __future__ import annotations

import contextlib
import dataclasses
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
from reanchor_jax.checkpoint.drafter_config import DRAFTER_CLASSES, GEMMA_CLASS
from reanchor_jax.checkpoint.fill import named_parameters
from reanchor_jax.checkpoint.gemma_config import pattern_fields
from reanchor_jax.checkpoint.hf_config import CLASSES, TEXT_PARTS
from reanchor_jax.checkpoint.load import float_dtype
from reanchor_jax.checkpoint.rope_config import scaling_fields
from reanchor_jax.checkpoint.rules import Slot, drafter_slots, target_slots
from reanchor_jax.checkpoint.safetensors_source import SINGLE
from reanchor_jax.config import DominoConfig, DrafterConfig, DSparkConfig, LayerConfig, LMHeadConfig, TargetConfig
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
    if config.model_type in TEXT_PARTS:  # written as what it is here, a decoder of text alone
        config = dataclasses.replace(config, model_type=TEXT_PARTS[config.model_type])
    _write(Path(folder), target_fields(config), _tensors(target, target_slots(config), dtype), dtype)


def target_fields(config: TargetConfig) -> dict[str, Any]:
    """config.json of a target, but for its dtype: what `read_target_config` reads back."""
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
    }
    if config.model_type in TEXT_PARTS.values():
        data |= pattern_fields(config.pattern, config.num_layers)
        data["final_logit_softcapping"] = config.logit_softcap
    else:
        data |= _layer_fields(config.layer)
        data["mlp_bias" if config.model_type == "llama" else "use_sliding_window"] = False
    return data


def save_drafter(drafter: Drafter, folder: str | Path, *, dtype: DTypeLike = jnp.bfloat16) -> None:
    """Writes a drafter in the format of its kind; see `save_target` for arguments and errors."""
    config, dtype = drafter.config, float_dtype(dtype)
    if not config.layer.qk_norm:
        raise ReanchorError("the drafter's qk_norm is False; expected True, the DFlash format has no other layers")
    data = {
        "architectures": [DRAFTER_CLASSES[type(config.head)]],
        "model_type": "qwen3",
        "block_size": config.num_slots,
        "num_hidden_layers": config.num_layers,
        "tie_word_embeddings": False,
        "vocab_size": config.vocab_size,
        **_head_fields(config),
    }
    if config.layer.sandwich_norms:
        data |= {"architectures": [GEMMA_CLASS], "model_type": "gemma4_text"}
        data |= pattern_fields((config.layer,), config.num_layers)
    else:
        slides = config.sliding_layers or (False,) * config.num_layers
        data["layer_types"] = ["sliding_attention" if slide else "full_attention" for slide in slides]
        data |= {"sliding_window": config.sliding_window, "use_sliding_window": config.sliding_window is not None}
        data |= _layer_fields(config.layer)
    if config.target_num_layers is not None:
        data["num_target_layers"] = config.target_num_layers
    _write(Path(folder), data, _tensors(drafter, drafter_slots(config), dtype), dtype)


def _head_fields(config: DrafterConfig) -> dict[str, Any]:
    """Fields of the head: DSpark's are at top level, those of the others in a section."""
    own: dict[str, Any] = {"mask_token_id": config.mask_token_id, "target_layer_ids": list(config.target_layer_ids)}
    if isinstance(config.head, DSparkConfig):
        own |= {name: value for name, value in vars(config.head).items() if value is not None}
        # Gemma's: the scaling follows from the class, the softcap has the target's name.
        if own.pop("scaled_embedding"):
            own["final_logit_softcapping"] = own.pop("logit_softcap", None)
        return own
    if isinstance(config.head, DominoConfig):
        own |= {"projector_type": "domino", **vars(config.head)}
    if config.sliding_window is not None:
        own["sliding_attention"] = config.sliding_attention
    if config.sliding_attention == "symmetric":
        own["causal"] = False  # says the same to vLLM
    if isinstance(config.head, LMHeadConfig) and config.head.draft_vocab_size is not None:
        return {"draft_vocab_size": config.head.draft_vocab_size, "dflash_config": own}
    return {"dflash_config": own}


def _layer_fields(layer: LayerConfig) -> dict[str, Any]:
    """Fields of the layer, rotary embedding in the older spelling, which every reader knows."""
    return {
        "attention_bias": layer.attention_bias,
        "head_dim": layer.head_dim,
        "hidden_act": "silu",
        "hidden_size": layer.hidden_size,
        "intermediate_size": layer.intermediate_size,
        "num_attention_heads": layer.num_heads,
        "num_key_value_heads": layer.num_kv_heads,
        "rms_norm_eps": layer.rms_norm_eps,
        "rope_scaling": scaling_fields(layer.rope.scaling),
        "rope_theta": layer.rope.theta,
    }


def _tensors(module: Target | Drafter, slots: dict[str, Slot], dtype: jnp.dtype) -> dict[str, np.ndarray]:
    """The file's tensors: rows of the stacked parameters, by the names that loading expects."""
    arrays = {path: np.asarray(leaf) for path, leaf in named_parameters(module).items()}
    tensors = {}
    for name, slot in slots.items():
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
