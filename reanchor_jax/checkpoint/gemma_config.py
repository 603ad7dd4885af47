"""Layers of a Gemma 4 text decoder, from and to the fields of a config.json.

Sliding and full attention layers alternate in a repeating pattern and differ in head dim, rotary
embedding and number of key/value heads. Decoders with features beyond that (experts, per-layer
inputs, shared caches) are refused by name.
"""

from __future__ import annotations

from typing import Any, Literal

from reanchor_jax.checkpoint.fields import MAX_HEAD_DIM, MAX_MLP_WIDTH, MAX_WIDTH, Fields
from reanchor_jax.checkpoint.rope_config import MAX_POSITIONS, read_rope_section, rope_fields
from reanchor_jax.config import LayerConfig

FULL, SLIDING = "full_attention", "sliding_attention"
LayerType = Literal["full_attention", "sliding_attention"]

MULTIMODAL_FIELDS = (
    "vision_config", "audio_config", "image_token_id", "audio_token_id", "video_token_id", "boi_token_id",
    "eoi_token_id", "boa_token_id", "eoa_token_id", "eoa_token_index", "vision_soft_tokens_per_image",
)  # fmt: skip
"""Of the parts that read pictures and sound, which text alone never reaches."""


def read_layer_types(fields: Fields, num_layers: int) -> tuple[LayerType, ...]:
    """`layer_types`: one for each layer. The last one is full, as transformers would make it."""
    types = fields.get("layer_types")
    fine = isinstance(types, list) and len(types) == num_layers and all(kind in (FULL, SLIDING) for kind in types)
    if not fine or types[-1] != FULL:
        expected = f'"{SLIDING}" or "{FULL}" for each of the {num_layers} layers, "{FULL}" for the last'
        raise fields.fail("layer_types", types, expected)
    return tuple(types)


def read_pattern(fields: Fields, num_layers: int) -> tuple[LayerConfig, ...]:
    """The layers' repeating pattern, as short as it can be.

    Raises:
      ReanchorError: a field that is missing, out of range or in conflict; a feature that is not
        supported.
    """
    _refuse_features(fields)
    types = read_layer_types(fields, num_layers)
    layers: dict[LayerType, LayerConfig] = {kind: _read_layer(fields, kind, types) for kind in sorted(set(types))}
    fields.ignore("global_head_dim", "num_global_key_value_heads", "per_layer_config", "rope_parameters")
    fields.ignore("head_dim", "num_key_value_heads", "sliding_window")  # of sliding layers, which there may be none of
    period = next(n for n in range(1, num_layers + 1) if num_layers % n == 0 and types == types[:n] * (num_layers // n))
    return tuple(layers[kind] for kind in types[:period])


def pattern_fields(pattern: tuple[LayerConfig, ...], num_layers: int) -> dict[str, Any]:
    """The fields that `read_pattern` reads."""
    full = next(layer for layer in pattern if layer.sliding_window is None)
    sliding = next((layer for layer in pattern if layer.sliding_window is not None), full)
    types = [FULL if layer.sliding_window is None else SLIDING for layer in pattern]
    return {
        "attention_bias": full.attention_bias,
        "attention_k_eq_v": full.shared_kv,
        "enable_moe_block": False,
        "global_head_dim": full.head_dim,
        "head_dim": sliding.head_dim,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": full.hidden_size,
        "hidden_size_per_layer_input": 0,
        "intermediate_size": full.intermediate_size,
        "layer_types": types * (num_layers // len(pattern)),
        "num_attention_heads": full.num_heads,
        "num_global_key_value_heads": full.num_kv_heads if full.shared_kv else None,
        "num_key_value_heads": sliding.num_kv_heads,
        "num_kv_shared_layers": 0,
        "rms_norm_eps": full.rms_norm_eps,
        "rope_parameters": {FULL: rope_fields(full.rope), SLIDING: rope_fields(sliding.rope)},
        "sliding_window": sliding.sliding_window or 1,
        "use_bidirectional_attention": None,
        "use_double_wide_mlp": False,
    }


def read_softcap(fields: Fields) -> float | None:
    """`final_logit_softcapping`, if there is one."""
    if fields.get_or_none("final_logit_softcapping") is None:
        return None
    return fields.number("final_logit_softcapping", above=0, below=1e6)


def _read_layer(fields: Fields, kind: LayerType, types: tuple[LayerType, ...]) -> LayerConfig:
    shared_kv = fields.boolean("attention_k_eq_v") and kind == FULL
    head_dim, num_kv_heads = _head_sizes(fields, kind, types, shared_kv)
    num_heads = fields.integer("num_attention_heads", 1, MAX_WIDTH)
    if num_heads % num_kv_heads:
        raise fields.fail(f"number of key/value heads of {kind}", num_kv_heads, f"a divisor of {num_heads} heads")
    if head_dim % 2:
        raise fields.fail(f"head dim of {kind}", head_dim, "an even number, for the rotary embedding")
    ropes = fields.section("rope_parameters")
    return LayerConfig(
        hidden_size=fields.integer("hidden_size", 1, MAX_WIDTH),
        intermediate_size=fields.integer("intermediate_size", 1, MAX_MLP_WIDTH),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=fields.number("rms_norm_eps", above=0, below=1),
        rope=read_rope_section(ropes.section(kind)),
        qk_norm=True,
        attention_bias=fields.boolean("attention_bias") if "attention_bias" in fields else False,
        sliding_window=fields.integer("sliding_window", 1, MAX_POSITIONS) if kind == SLIDING else None,
        activation="gelu_tanh",
        attention_scale=1.0,
        shared_kv=shared_kv,
        v_norm=True,
        sandwich_norms=True,
        layer_scalar=True,
        float32_norms=True,
    )


def _head_sizes(fields: Fields, kind: LayerType, types: tuple[LayerType, ...], shared_kv: bool) -> tuple[int, int]:
    """Head dim and number of key/value heads.

    Those of full layers are in fields of their own, or in transformers 5's `per_layer_config`: for
    each full layer an object of what differs, `{}` or left out where nothing does.
    """
    num_kv_heads = fields.integer("num_key_value_heads", 1, MAX_WIDTH)
    if kind == SLIDING:
        return fields.integer("head_dim", 2, MAX_HEAD_DIM), num_kv_heads
    if "per_layer_config" not in fields:
        if shared_kv and fields.get_or_none("num_global_key_value_heads") is not None:
            num_kv_heads = fields.integer("num_global_key_value_heads", 1, MAX_WIDTH)
        return fields.integer("global_head_dim", 2, MAX_HEAD_DIM), num_kv_heads
    layers = fields.section("per_layer_config")
    full = [str(n) for n, t in enumerate(types) if t == FULL]
    entries = [layers.data.get(n, {}) for n in full]
    if set(layers.data) - set(full) or any(entry != entries[0] for entry in entries):
        raise fields.fail("per_layer_config", layers.data, f"the same entry for each full layer, {', '.join(full)}")
    entry = layers.section(full[0]) if full[0] in layers else Fields({}, layers.where)
    if "num_key_value_heads" in entry:
        num_kv_heads = entry.integer("num_key_value_heads", 1, MAX_WIDTH)
    head_dim = (entry if "head_dim" in entry else fields).integer("head_dim", 2, MAX_HEAD_DIM)
    entry.finish()
    return head_dim, num_kv_heads


def _refuse_features(fields: Fields) -> None:
    """One error for each feature of the family that is not supported."""
    if fields.data.get("model_type") == "gemma4_text":
        fields.get("hidden_size_per_layer_input")  # where it is missing, transformers assumes 256
    for name, allowed, feature in (
        ("enable_moe_block", (False,), "a mixture of experts is"),
        ("hidden_size_per_layer_input", (0, None), "per-layer inputs are"),
        ("num_kv_shared_layers", (0,), "layers that share the keys and values of others are"),
        ("use_double_wide_mlp", (False,), "a double-wide MLP is"),
        ("use_bidirectional_attention", (None, "vision"), "bidirectional attention over text is"),
        ("hidden_activation", ("gelu_pytorch_tanh",), "another activation is"),
        ("quantization_config", (None,), "a quantized checkpoint is"),
    ):
        fields.only(name, *allowed, why=f"{feature} not supported")
    fields.get("hidden_activation")
    fields.ignore("vocab_size_per_layer_input", "num_experts", "top_k_experts", "moe_intermediate_size")
