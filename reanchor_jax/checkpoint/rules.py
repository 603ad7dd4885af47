"""Which tensor of a checkpoint fills which parameter: tables, one rule a tensor family.

A rule reads both ways: loading expands `{layer}` into the names that the file must hold, saving
expands it into the names that are written.
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
    """Name in the file. With `{layer}` there is one tensor a layer, stacked on axis 0."""
    path: str
    """Dotted path of the parameter in the module."""
    transform: str = "copy"
    """Key of `TRANSFORMS`."""


class Slot(NamedTuple):
    """Where one tensor of the file goes."""

    path: str
    layer: int | None
    """Row on axis 0 of the stacked parameter; None: the whole parameter."""
    transform: str


_LAYER = (
    Rule("layers.{layer}.input_layernorm.weight", "layers.input_norm"),
    Rule("layers.{layer}.self_attn.q_proj.weight", "layers.q_proj"),
    Rule("layers.{layer}.self_attn.k_proj.weight", "layers.k_proj"),
    Rule("layers.{layer}.self_attn.v_proj.weight", "layers.v_proj"),
    Rule("layers.{layer}.self_attn.o_proj.weight", "layers.o_proj"),
    Rule("layers.{layer}.post_attention_layernorm.weight", "layers.post_attention_norm"),
    Rule("layers.{layer}.mlp.gate_proj.weight", "layers.gate_proj"),
    Rule("layers.{layer}.mlp.up_proj.weight", "layers.up_proj"),
    Rule("layers.{layer}.mlp.down_proj.weight", "layers.down_proj"),
)
_QK_NORM = (
    Rule("layers.{layer}.self_attn.q_norm.weight", "layers.q_norm"),
    Rule("layers.{layer}.self_attn.k_norm.weight", "layers.k_norm"),
)
_ATTENTION_BIAS = (
    Rule("layers.{layer}.self_attn.q_proj.bias", "layers.q_bias"),
    Rule("layers.{layer}.self_attn.k_proj.bias", "layers.k_bias"),
    Rule("layers.{layer}.self_attn.v_proj.bias", "layers.v_bias"),
    Rule("layers.{layer}.self_attn.o_proj.bias", "layers.o_bias"),
)
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
_GGUF_LLAMA = (
    Rule("token_embd.weight", "embedding"),
    Rule("output_norm.weight", "final_norm"),
    Rule("blk.{layer}.attn_norm.weight", "layers.input_norm"),
    Rule("blk.{layer}.attn_q.weight", "layers.q_proj", "pairs_to_halves_q"),
    Rule("blk.{layer}.attn_k.weight", "layers.k_proj", "pairs_to_halves_k"),
    Rule("blk.{layer}.attn_v.weight", "layers.v_proj"),
    Rule("blk.{layer}.attn_output.weight", "layers.o_proj"),
    Rule("blk.{layer}.ffn_norm.weight", "layers.post_attention_norm"),
    Rule("blk.{layer}.ffn_gate.weight", "layers.gate_proj"),
    Rule("blk.{layer}.ffn_up.weight", "layers.up_proj"),
    Rule("blk.{layer}.ffn_down.weight", "layers.down_proj"),
)

OWN_EMBEDDING_NAME, OWN_HEAD_NAME = _OWN_EMBEDDING.source, _OWN_HEAD.source
MASK_EMBEDDING_NAME = _MASK_EMBEDDING.source
HEAD_NAME, EMBEDDING_NAME = "lm_head.weight", "model.embed_tokens.weight"

IGNORED = (
    re.compile(r"(model\.)?(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq"),
    re.compile(r"rope_freqs\.weight"),
    re.compile(r"verifier_(norm|lm_head)\.weight"),
)
"""Tensors that are no parameters: rotary frequencies, which the config defines (those of a GGUF file
are compared with the config where it is read), and copies of the target's that training used."""


def target_rules(config: TargetConfig) -> tuple[Rule, ...]:
    """Rules of a `llama` or `qwen3` folder in Hugging Face's format."""
    layer = _layer_rules(config.layer)
    rules = (
        Rule(EMBEDDING_NAME, "embedding"),
        Rule("model.norm.weight", "final_norm"),
        *(rule._replace(source="model." + rule.source) for rule in layer),
    )
    return rules if config.tie_word_embeddings else (*rules, Rule(HEAD_NAME, "lm_head"))


def drafter_rules(config: DrafterConfig, head_prefix: str = "") -> tuple[Rule, ...]:
    """Rules of a drafter in z-lab's format."""
    head = tuple(rule._replace(source=head_prefix + rule.source) for rule in _head_rules(config))
    return _DFLASH + _layer_rules(config.layer) + head


def _layer_rules(layer: LayerConfig) -> tuple[Rule, ...]:
    return _LAYER + (_QK_NORM if layer.qk_norm else ()) + (_ATTENTION_BIAS if layer.attention_bias else ())


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


def gguf_rules(config: TargetConfig) -> tuple[Rule, ...]:
    """Rules of a GGUF file of architecture `llama`."""
    return _GGUF_LLAMA if config.tie_word_embeddings else (*_GGUF_LLAMA, Rule("output.weight", "lm_head"))


def expand(rules: tuple[Rule, ...], num_layers: int) -> dict[str, Slot]:
    """Every tensor name that the rules demand, and where it goes."""
    slots = {}
    for rule in rules:
        if "{layer}" not in rule.source:
            slots[rule.source] = Slot(rule.path, None, rule.transform)
            continue
        for layer in range(num_layers):
            slots[rule.source.format(layer=layer)] = Slot(rule.path, layer, rule.transform)
    return slots


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
