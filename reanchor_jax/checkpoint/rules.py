"""Which tensor of a checkpoint fills which parameter: tables, one rule a tensor family.

A table reads both ways: its slots are the names that the file must hold, and those that are written.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from reanchor_jax.checkpoint import vocab_map
from reanchor_jax.config import DominoConfig, DrafterConfig, DSparkConfig, LayerConfig, LMHeadConfig, TargetConfig


class Rule(NamedTuple):
    """One tensor family."""

    source: str
    """Name in the file; of a layer's tensor, behind `layers.N.`."""
    path: str
    """Dotted path of the parameter in the module; of a layer's, in the layer."""
    transform: str = "copy"
    """Key of `TRANSFORMS`."""


class Slot(NamedTuple):
    """Where one tensor of the file goes."""

    path: str
    layer: int | None
    """Row on axis 0 of the stacked parameter; None: the whole parameter."""
    transform: str


_LAYER = (
    Rule("input_layernorm.weight", "input_norm"),
    Rule("self_attn.q_proj.weight", "q_proj"),
    Rule("self_attn.k_proj.weight", "k_proj"),
    Rule("self_attn.o_proj.weight", "o_proj"),
    Rule("mlp.gate_proj.weight", "gate_proj"),
    Rule("mlp.up_proj.weight", "up_proj"),
    Rule("mlp.down_proj.weight", "down_proj"),
)
_V_PROJ = (Rule("self_attn.v_proj.weight", "v_proj"),)
_PRE_NORMS = (Rule("post_attention_layernorm.weight", "pre_mlp_norm"),)
_SANDWICH_NORMS = (
    Rule("post_attention_layernorm.weight", "post_attention_norm"),
    Rule("pre_feedforward_layernorm.weight", "pre_mlp_norm"),
    Rule("post_feedforward_layernorm.weight", "post_mlp_norm"),
)
_QK_NORM = (
    Rule("self_attn.q_norm.weight", "q_norm"),
    Rule("self_attn.k_norm.weight", "k_norm"),
)
_ATTENTION_BIAS = (
    Rule("self_attn.q_proj.bias", "q_bias"),
    Rule("self_attn.k_proj.bias", "k_bias"),
    Rule("self_attn.o_proj.bias", "o_bias"),
)
_V_BIAS = (Rule("self_attn.v_proj.bias", "v_bias"),)
_LAYER_SCALAR = (Rule("layer_scalar", "layer_scalar"),)
_DFLASH = (
    Rule("fc.weight", "fc"),
    Rule("hidden_norm.weight", "hidden_norm"),
    Rule("norm.weight", "norm"),
)
_DOMINO = (
    Rule("prefix_gru.weight_ih_l0", "head.gru_ih"),
    Rule("prefix_gru.weight_hh_l0", "head.gru_hh"),
    Rule("embed_proj.0.weight", "head.proj_in"),
    Rule("embed_proj.2.weight", "head.proj_out"),
)
_OWN_EMBEDDING = Rule("embed_tokens.weight", "head.embedding")
_OWN_HEAD = Rule("lm_head.weight", "head.lm_head")
_VOCAB_MAP = Rule(vocab_map.OFFSETS, "head.target_ids", "offsets_to_ids")
_MASK_EMBEDDING = Rule("mask_embedding", "head.mask_embedding")
_MARKOV = (
    Rule("markov_head.markov_w1.weight", "head.markov_in"),
    Rule("markov_head.markov_w2.weight", "head.markov_out"),
)
_MIX = {"gated": "gate_proj", "rnn": "joint_proj"}
_CONFIDENCE = (
    Rule("confidence_head.proj.weight", "head.confidence"),
    Rule("confidence_head.proj.bias", "head.confidence_bias"),
)
OLD_HEAD_PREFIX = "logit_head."
"""Before the names of a head's tensors in older files."""
_GGUF = (Rule("token_embd.weight", "embedding"), Rule("output_norm.weight", "final_norm"))
_GGUF_LAYER = (
    Rule("attn_norm.weight", "input_norm"),
    Rule("attn_q.weight", "q_proj", "pairs_to_halves_q"),
    Rule("attn_k.weight", "k_proj", "pairs_to_halves_k"),
    Rule("attn_v.weight", "v_proj"),
    Rule("attn_output.weight", "o_proj"),
    Rule("ffn_norm.weight", "pre_mlp_norm"),
    Rule("ffn_gate.weight", "gate_proj"),
    Rule("ffn_up.weight", "up_proj"),
    Rule("ffn_down.weight", "down_proj"),
)

OWN_EMBEDDING_NAME, OWN_HEAD_NAME = _OWN_EMBEDDING.source, _OWN_HEAD.source
MASK_EMBEDDING_NAME = _MASK_EMBEDDING.source
HEAD_NAME = "lm_head.weight"
_PREFIX = {"gemma4": "model.language_model.", "gemma4_unified": "model.language_model."}
"""Before the names of a target's tensors, by model type: where text is a part of the model."""

IGNORED = (
    re.compile(r"(model\.)?(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq"),
    re.compile(r"rope_freqs\.weight"),
    re.compile(r"verifier_(norm|lm_head)\.weight"),
    re.compile(r"model\.(vision_embedder|vision_tower|embed_vision|audio_tower|embed_audio)\..+"),
)
"""Tensors that are no parameters: rotary frequencies, which the config defines (those of a GGUF file
are compared with the config where it is read), copies of the target's that training used, and what
reads pictures and sound."""


def target_slots(config: TargetConfig) -> dict[str, Slot]:
    """Every tensor that a target's folder in Hugging Face's format must hold, and where it goes."""
    prefix = _PREFIX.get(config.model_type, "model.")
    rules = (Rule(prefix + "embed_tokens.weight", "embedding"), Rule(prefix + "norm.weight", "final_norm"))
    head = () if config.tie_word_embeddings else (Rule(HEAD_NAME, "lm_head"),)
    return _slots(rules + head) | _pattern_slots(prefix + "layers", config, [_layer_rules(l) for l in config.pattern])


def drafter_slots(config: DrafterConfig, head_prefix: str = "") -> dict[str, Slot]:
    """The same of a drafter in z-lab's format."""
    head = tuple(rule._replace(source=head_prefix + rule.source) for rule in _head_rules(config))
    slots = _slots(_DFLASH + head)
    for layer in range(config.num_layers):
        for rule in _layer_rules(config.layer):
            slots[f"layers.{layer}.{rule.source}"] = Slot(f"layers.{rule.path}", layer, rule.transform)
    return slots


def gguf_slots(config: TargetConfig) -> dict[str, Slot]:
    """The same of a GGUF file of architecture `llama`."""
    head = () if config.tie_word_embeddings else (Rule("output.weight", "lm_head"),)
    return _slots(_GGUF + head) | _pattern_slots("blk", config, [_GGUF_LAYER])


def _slots(rules: tuple[Rule, ...]) -> dict[str, Slot]:
    return {rule.source: Slot(rule.path, None, rule.transform) for rule in rules}


def _pattern_slots(prefix: str, config: TargetConfig, rules: list[tuple[Rule, ...]]) -> dict[str, Slot]:
    """Slots of all layers. In a pattern of 6, layer 8 is row 1 of `layers.2`."""
    slots = {}
    for layer in range(config.num_layers):
        row, position = divmod(layer, len(rules))
        for rule in rules[position]:
            slots[f"{prefix}.{layer}.{rule.source}"] = Slot(f"layers.{position}.{rule.path}", row, rule.transform)
    return slots


def _layer_rules(layer: LayerConfig) -> tuple[Rule, ...]:
    rules = _LAYER + (_SANDWICH_NORMS if layer.sandwich_norms else _PRE_NORMS)
    parts = (
        (_V_PROJ, not layer.shared_kv),
        (_QK_NORM, layer.qk_norm),
        (_ATTENTION_BIAS, layer.attention_bias),
        (_V_BIAS, layer.attention_bias and not layer.shared_kv),
        (_LAYER_SCALAR, layer.layer_scalar),
    )
    return rules + tuple(rule for part, is_there in parts if is_there for rule in part)


def _head_rules(config: DrafterConfig) -> tuple[Rule, ...]:
    head = config.head
    if isinstance(head, DominoConfig):
        return _DOMINO
    if isinstance(head, LMHeadConfig):
        has_head = head.draft_vocab_size is not None
        parts = (
            (_OWN_EMBEDDING, head.own_embedding),
            (_OWN_HEAD, has_head),
            (_VOCAB_MAP, has_head and head.draft_vocab_size != config.vocab_size),
            (_MASK_EMBEDDING, head.mask_embedding),
        )
        return tuple(rule for rule, is_there in parts if is_there)
    assert isinstance(head, DSparkConfig)
    rules = (
        (_OWN_EMBEDDING, _OWN_HEAD)
        + (_MARKOV if head.markov_rank else ())
        + (_CONFIDENCE if head.enable_confidence_head else ())
    )
    if mix := _MIX.get(head.markov_head_type or ""):
        rules += (Rule(f"markov_head.{mix}.weight", "head.mix"), Rule(f"markov_head.{mix}.bias", "head.mix_bias"))
    return rules


def pairs_to_halves(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Undoes the row order that GGUF gives the query and key matrices of `llama` (no other
    architecture): its rotary embedding turns neighbours (2i, 2i+1), ours turns (i, i + H/2).

    One head of H = 6, rows named by their place in the original:
    file [0 3 1 4 2 5] -> result [0 1 2 3 4 5].
    """
    rows, width = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, width)
    return pairs.swapaxes(1, 2).reshape(rows, width)


TRANSFORMS: dict[str, Callable[[np.ndarray, LayerConfig], np.ndarray]] = {
    "copy": lambda weight, _: weight,
    "offsets_to_ids": lambda offsets, _: vocab_map.to_ids(offsets),
    "pairs_to_halves_q": lambda weight, layer: pairs_to_halves(weight, layer.num_heads),
    "pairs_to_halves_k": lambda weight, layer: pairs_to_halves(weight, layer.num_kv_heads),
}
"""None of them changes the shape, so the file's shape is checked before anything is read."""
