"""Published checkpoints are read as they are; drafters of other kinds, and misfits, are named."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from reanchor_jax.checkpoint import load_drafter
from reanchor_jax.checkpoint.drafter_config import is_drafter, read_drafter_config
from reanchor_jax.checkpoint.fill import TensorInfo, compare, named_parameters
from reanchor_jax.checkpoint.hf_config import read_target_config
from reanchor_jax.checkpoint.rules import drafter_slots, target_slots
from reanchor_jax.drafter import Drafter
from reanchor_jax.target import Target
from tests.checkpoint_folders import drafter_config, drafter_tensors, refuses, write_folder

MANIFESTS = sorted((Path(__file__).parent / "golden" / "manifests").glob("*.json"))
OTHER_SENSES = ("model.vision_embedder.", "model.embed_vision.", "model.embed_audio.")
TAPS = {"mask_token_id": 150, "target_layer_ids": [0, 2]}
DOMINO = {"projector_type": "domino", "emb_dim": 8, "gru_hidden_dim": 8}


def tensor(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float32)


GRU = {"prefix_gru.weight_ih_l0": tensor(24, 64), "prefix_gru.weight_hh_l0": tensor(24, 8)}
MARKOV = {"markov_head.markov_w1.weight": tensor(160, 8), "markov_head.markov_w2.weight": tensor(160, 8)}


def dspark_config(**changes: Any) -> dict[str, Any]:
    """A DSpark config without a confidence."""
    config = drafter_config(architectures=["Qwen3DSparkModel"], dflash_config=..., **TAPS)
    own = {"markov_rank": 8, "markov_head_type": "vanilla", "enable_confidence_head": False}
    return config | own | changes


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_published_checkpoints_are_read_as_they_are(tmp_path, path):
    """Every field of the config is known, every tensor is used once, every parameter is filled."""
    manifest = json.loads(path.read_text())
    (tmp_path / "config.json").write_text(json.dumps(manifest["config"]))
    if is_drafter(tmp_path):
        config = read_drafter_config(tmp_path)
        network, slots = Drafter, drafter_slots(config)
    else:
        config = read_target_config(tmp_path)
        network, slots = Target, target_slots(config)
    abstract = jax.eval_shape(lambda: network(config, dtype=jnp.dtype(jnp.bfloat16), rngs=nnx.Rngs(0)))
    tensors = {name: TensorInfo(tuple(shape), "BF16") for name, shape in manifest["keys"].items()}
    compare(tensors, slots, named_parameters(abstract), frozenset({"BF16"})).check(path.stem)
    others = {name for name in tensors if name.startswith(OTHER_SENSES)}
    assert len(slots) == len(tensors) - len(others) == len({(slot.path, slot.layer) for slot in slots.values()})
    assert len(others) == (11 if path.stem == "Gemma-4-12B" else 0)
    size = sum(math.prod(leaf.shape) for leaf in named_parameters(abstract).values())
    assert size == manifest["num_params"] - sum(math.prod(tensors[name].shape) for name in others)


def test_configs_of_no_supported_kind_say_what_was_found(tmp_path):
    def read(config: dict[str, Any]):
        return lambda: read_drafter_config(write_folder(tmp_path, config, {}))

    eagle = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "draft_vocab_size": 32000}
    refuses(read(eagle), "LlamaForCausalLMEagle3", "model_type 'llama'", "DFlash", "Domino", "DSpark", "speculators")
    refuses(read({"hidden_size": 64}), "none of architectures", "expected DFlash")
    refuses(read(drafter_config(architectures=["Other"], dflash_config=TAPS | DOMINO)), "projector_type 'domino'")
    nested = {"speculators_model_type": "eagle3", "transformer_layer_config": {}}
    refuses(read(nested), "speculators_model_type is 'eagle3'; expected \"dflash\"")


@pytest.mark.parametrize(
    ("config", "extra", "fragments"),
    [
        (drafter_config(), GRU, ("says DFlash", "prefix_gru", "looks like Domino", 'projector_type "domino"')),
        (drafter_config(), MARKOV, ("says DFlash", "markov_head", "looks like DSpark", "Qwen3DSparkModel")),
        (drafter_config(), {"midlayer.x": tensor(1)}, ("says DFlash", "midlayer", "looks like EAGLE-3")),
        (drafter_config(dflash_config=TAPS | DOMINO), {}, ("says Domino", "no tensor is named prefix_gru.")),
        (drafter_config(dflash_config=TAPS | DOMINO), MARKOV, ("says Domino", "looks like DSpark")),
        (dspark_config(), {}, ("says DSpark", "no tensor is named markov_head.", "markov_rank 0")),
        (dspark_config(), GRU, ("says DSpark", "looks like Domino")),
        (dspark_config(markov_rank=0), MARKOV, ("no place for: markov_head",)),
    ],
)
def test_tensors_of_another_kind_than_the_config_s(tmp_path, config, extra, fragments):
    tensors = drafter_tensors(drafter_config()) | extra
    refuses(lambda: load_drafter(write_folder(tmp_path, config, tensors)), str(tmp_path), *fragments)
