"""config.json of a target, in both spellings, to `TargetConfig`.

A config is untrusted input. Fields fall into four lists: those read, those that may have one value
only, those that do not change the computation, and all others, which are an error.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from reanchor_jax.checkpoint import gemma_config
from reanchor_jax.checkpoint.fields import (
    MAX_HEAD_DIM,
    MAX_LAYERS,
    MAX_MLP_WIDTH,
    MAX_VOCAB,
    MAX_WIDTH,
    Fields,
    read_json,
)
from reanchor_jax.checkpoint.rope_config import MAX_POSITIONS, read_rope
from reanchor_jax.config import LayerConfig, TargetConfig
from reanchor_jax.errors import ReanchorError

# fmt: off
INERT = (
    # bookkeeping
    "_attn_implementation", "_attn_implementation_autoset", "_name_or_path", "dtype", "torch_dtype",
    "transformers_version", "auto_map", "is_llama_config", "name_or_path", "tokenizer_class",
    "transformers.js_config", "use_cache",
    # training only
    "attention_dropout", "initializer_range", "pretraining_tp",
    # read by nothing while `use_sliding_window` is false
    "max_window_layers",
    # ids that only text handling uses
    "pad_token_id", "sep_token_id", "decoder_start_token_id",
    # written into every config by older versions, for other models or for sampling
    "add_cross_attention", "bad_words_ids", "begin_suppress_tokens", "chunk_size_feed_forward",
    "cross_attention_hidden_size", "diversity_penalty", "do_sample", "early_stopping",
    "encoder_no_repeat_ngram_size", "exponential_decay_length_penalty", "finetuning_task",
    "forced_bos_token_id", "forced_eos_token_id", "id2label", "is_decoder", "is_encoder_decoder",
    "label2id", "length_penalty", "max_length", "max_new_tokens", "min_length", "no_repeat_ngram_size",
    "num_beam_groups", "num_beams", "num_return_sequences", "output_attentions", "output_hidden_states",
    "output_scores", "prefix", "problem_type", "pruned_heads", "remove_invalid_values",
    "repetition_penalty", "return_dict", "return_dict_in_generate", "suppress_tokens",
    "task_specific_params", "temperature", "tf_legacy_loss", "tie_encoder_decoder", "top_k", "top_p",
    "torchscript", "typical_p", "use_bfloat16",
)
# fmt: on

CLASSES = {
    "llama": "LlamaForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma4_text": "Gemma4ForCausalLM",
    "gemma4_unified_text": "Gemma4UnifiedForCausalLM",
    "gemma4": "Gemma4ForConditionalGeneration",
    "gemma4_unified": "Gemma4UnifiedForConditionalGeneration",
}
TEXT_PARTS = {"gemma4": "gemma4_text", "gemma4_unified": "gemma4_unified_text"}
"""Model types that read more than text, and what `text_config` says of theirs."""


def read_target_config(folder: Path) -> TargetConfig:
    """Reads config.json, and the EOS ids of generation_config.json where there is one.

    Raises:
      ReanchorError: a field that is missing, out of range, in conflict, unsupported or unknown.
    """
    path = folder / "config.json"
    fields = Fields(read_json(path), str(path))
    config = target_config(fields)
    generation = folder / "generation_config.json"
    if not generation.exists():
        return config
    more = _eos_ids(Fields(read_json(generation), str(generation)), config.vocab_size)
    ids = tuple(sorted({*config.eos_token_ids, *more}))
    return dataclasses.replace(config, eos_token_ids=ids)


def target_config(fields: Fields) -> TargetConfig:
    """The config in the fields of a config.json; raises as `read_target_config` does."""
    _refuse_drafter(fields)
    model_type = fields.get("model_type")
    if not isinstance(model_type, str) or model_type not in CLASSES:
        raise fields.fail("model_type", model_type, f"one of {', '.join(CLASSES)}, the supported targets")
    fields.only("architectures", [CLASSES[model_type]])
    text = _text_part(fields, model_type) if model_type in TEXT_PARTS else fields
    vocab_size = text.integer("vocab_size", 1, MAX_VOCAB)
    num_layers = text.integer("num_hidden_layers", 1, MAX_LAYERS)
    is_gemma = model_type.startswith("gemma4")
    if is_gemma:
        pattern = gemma_config.read_pattern(text, num_layers)
    else:
        pattern = (read_layer(text, qk_norm=model_type == "qwen3", head_dim_required=model_type != "llama"),)
    config = TargetConfig(
        model_type=model_type,
        vocab_size=vocab_size,
        num_layers=num_layers,
        pattern=pattern,
        tie_word_embeddings=text.boolean("tie_word_embeddings"),
        max_position_embeddings=text.integer("max_position_embeddings", 1, MAX_POSITIONS),
        bos_token_id=None
        if text.get_or_none("bos_token_id") is None
        else text.integer("bos_token_id", 0, vocab_size - 1),
        eos_token_ids=tuple(sorted({*_eos_ids(text, vocab_size), *_eos_ids(fields, vocab_size)})),
        scaled_embedding=is_gemma,
        logit_softcap=gemma_config.read_softcap(text) if is_gemma else None,
    )
    if not is_gemma:
        only_plain_layers(fields)
        only_full_attention(fields, num_layers)
    for part in (text, fields):
        part.ignore(*INERT)
        part.finish()
    return config


def _text_part(fields: Fields, model_type: str) -> Fields:
    """The section that describes the text decoder of a model that reads more than text."""
    text = fields.section("text_config")
    if text.get("model_type") != TEXT_PARTS[model_type]:
        raise text.fail("model_type", text.get("model_type"), f'"{TEXT_PARTS[model_type]}"')
    # Given twice, it must be the same twice.
    fields.only("tie_word_embeddings", text.data.get("tie_word_embeddings"), why="as in text_config")
    fields.ignore(*gemma_config.MULTIMODAL_FIELDS)
    return text


def read_layer(fields: Fields, *, qk_norm: bool, head_dim_required: bool) -> LayerConfig:
    """Sizes of a decoder layer."""
    width = fields.integer("hidden_size", 1, MAX_WIDTH)
    num_heads = fields.integer("num_attention_heads", 1, MAX_WIDTH)
    num_kv_heads = fields.integer("num_key_value_heads", 1, MAX_WIDTH)
    if num_heads % num_kv_heads:
        raise fields.fail("num_key_value_heads", num_kv_heads, f"a divisor of the {num_heads} attention heads")
    if fields.get_or_none("head_dim") is None and not head_dim_required:
        # The format's definition of `llama`, not a guess.
        if width % num_heads:
            raise fields.fail("hidden_size", width, f"a multiple of the {num_heads} heads (head_dim is not given)")
        head_dim = width // num_heads
    else:
        head_dim = fields.integer("head_dim", 2, MAX_HEAD_DIM)
    if head_dim % 2:
        raise fields.fail("head_dim", head_dim, "an even number, for the rotary embedding")
    if fields.get("hidden_act") != "silu":
        raise fields.fail("hidden_act", fields.get("hidden_act"), '"silu"; nothing else is supported')
    return LayerConfig(
        hidden_size=width,
        intermediate_size=fields.integer("intermediate_size", 1, MAX_MLP_WIDTH),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=fields.number("rms_norm_eps", above=0, below=1),
        rope=read_rope(fields),
        qk_norm=qk_norm,
        attention_bias=fields.boolean("attention_bias") if "attention_bias" in fields else False,
    )


def only_plain_layers(fields: Fields) -> None:
    """Refuses what the layer does not compute: biases of the MLP, partial rotary, quantization."""
    fields.only("mlp_bias", False)
    fields.only("rope_interleaved", False)
    fields.only("partial_rotary_factor", 1, 1.0, None)
    fields.only("quantization_config", None, why="quantized checkpoints are not supported, use the original")


def only_full_attention(fields: Fields, num_layers: int) -> None:
    """Refuses sliding windows."""
    fields.only("use_sliding_window", False, why="sliding-window attention is not supported here")
    if fields.data.get("use_sliding_window") is None:
        fields.only("sliding_window", None, why="sliding-window attention is not supported here")
    fields.ignore("sliding_window")
    layer_types = fields.get_or_none("layer_types")
    if layer_types is not None and layer_types != ["full_attention"] * num_layers:
        expected = f'"full_attention" for each of the {num_layers} layers; other attention is not supported here'
        raise fields.fail("layer_types", layer_types, expected)


def _eos_ids(fields: Fields, vocab_size: int) -> tuple[int, ...]:
    """`eos_token_id`: an integer, a list of them, or none."""
    value = fields.get_or_none("eos_token_id")
    if value is None:
        return ()
    if isinstance(value, list):
        return tuple(sorted(set(fields.integers("eos_token_id", 0, vocab_size - 1))))
    return (fields.integer("eos_token_id", 0, vocab_size - 1),)


def _refuse_drafter(fields: Fields) -> None:
    if (
        "dflash_config" in fields
        or "markov_rank" in fields
        or "speculators_model_type" in fields
        or "DFlashDraftModel" in str(fields.data.get("architectures"))
    ):
        raise ReanchorError(f"{fields.where} describes a drafter; expected a target: load it with load_drafter")
