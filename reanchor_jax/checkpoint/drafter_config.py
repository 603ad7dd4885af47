"""config.json of a DFlash, Domino or DSpark drafter, to `DrafterConfig`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

from reanchor_jax.checkpoint import gemma_config, hf_config, kinds, rope_config, speculators
from reanchor_jax.checkpoint.fields import Fields, read_json
from reanchor_jax.config import (
    DominoConfig,
    DrafterConfig,
    DSparkConfig,
    HeadConfig,
    LayerConfig,
    LMHeadConfig,
    MarkovHead,
    SlidingAttention,
)

DRAFTER_CLASSES = {
    LMHeadConfig: "DFlashDraftModel",
    DominoConfig: "DominoDraftModel",
    DSparkConfig: "Qwen3DSparkModel",
}
GEMMA_CLASS = "Gemma4DSparkModel"
"""DSpark over layers of Gemma 4."""
MAX_BLOCK = 256
# Token ids, table and length are the target's.
_INERT = ("bos_token_id", "eos_token_id", "tie_word_embeddings", "max_position_embeddings")


def read_drafter_config(folder: Path) -> DrafterConfig:
    """Reads config.json.

    Raises:
      ReanchorError: a field that is missing, out of range, in conflict, unsupported or unknown;
        a drafter of another kind.
    """
    path = folder / "config.json"
    fields = Fields(read_json(path), str(path))
    if speculators.is_speculators(fields.data):
        fields = Fields(speculators.flatten(fields), str(path))
    if fields.get_or_none("architectures") not in [[name] for name in (*DRAFTER_CLASSES.values(), GEMMA_CLASS)]:
        raise kinds.unsupported(fields)
    # DSpark's own fields are at top level, those of the others in a section.
    is_gemma = fields.get("architectures") == [GEMMA_CLASS]
    is_dspark = is_gemma or fields.get("architectures") == [DRAFTER_CLASSES[DSparkConfig]]
    section = fields if is_dspark else fields.section("dflash_config")
    head = _read_dspark(fields, is_gemma) if is_dspark else _read_dflash(fields, section)
    fields.get("model_type")
    model_types = ("gemma4_text", "gemma4_unified_text") if is_gemma else ("qwen3",)
    fields.only("model_type", *model_types, why="other drafter layers are not supported")
    vocab_size = fields.integer("vocab_size", 1, hf_config.MAX_VOCAB)
    num_layers = fields.integer("num_hidden_layers", 1, hf_config.MAX_LAYERS)
    num_target_layers = None
    if fields.get_or_none("num_target_layers") is not None:
        num_target_layers = fields.integer("num_target_layers", 1, hf_config.MAX_LAYERS)
    last_layer = (num_target_layers or hf_config.MAX_LAYERS) - 1
    tap_ids = section.integers("target_layer_ids", 0, last_layer)
    if not tap_ids or len(set(tap_ids)) != len(tap_ids):
        raise section.fail("target_layer_ids", list(tap_ids), "at least one id, and each once")
    config = DrafterConfig(
        # DSpark counts drafts, the others the anchor too.
        block_size=_block_size(fields, section, 1) + 1 if is_dspark else _block_size(fields, section, 2),
        mask_token_id=section.integer("mask_token_id", 0, vocab_size - 1),
        target_layer_ids=tap_ids,
        target_num_layers=num_target_layers,
        vocab_size=vocab_size,
        num_layers=num_layers,
        layer=_read_gemma_layer(fields, num_layers)
        if is_gemma
        else hf_config.read_layer(fields, qk_norm=True, head_dim_required=True),
        head=head,
        **({} if is_gemma else _read_sliding(fields, section, num_layers)),
    )
    if section is not fields:
        section.finish()
    if not is_gemma:
        hf_config.only_plain_layers(fields)
    fields.ignore(*hf_config.INERT, *_INERT)
    fields.finish()
    return config


def is_drafter(path: Path) -> bool:
    """Whether the folder's config.json says that it describes a drafter, of whatever kind."""
    if not path.is_dir():
        return False
    data = read_json(path / "config.json")
    architectures = str(data.get("architectures"))
    return "DraftModel" in architectures or "DSpark" in architectures or speculators.is_speculators(data)


def _read_gemma_layer(fields: Fields, num_layers: int) -> LayerConfig:
    """The layer that all layers of a Gemma drafter are: Gemma's full attention layer."""
    layer, *others = gemma_config.read_pattern(fields, num_layers)
    if others:
        raise fields.fail("layer_types", fields.get("layer_types"), '"full_attention" alone, as DSpark drafters have')
    fields.ignore("target_model_type", "target_text_model_type")
    return layer


def _read_dspark(fields: Fields, is_gemma: bool) -> DSparkConfig:
    rank = fields.integer("markov_rank", 0, hf_config.MAX_WIDTH)
    kind = fields.get_or_none("markov_head_type")
    if rank and kind not in get_args(MarkovHead):
        raise fields.fail("markov_head_type", kind, f"one of {', '.join(get_args(MarkovHead))}")
    confidence = fields.boolean("enable_confidence_head")
    temperatures = None
    if confidence and fields.get_or_none("confidence_temperatures") is not None:
        temperatures = fields.numbers("confidence_temperatures", above=0, below=1e6)
        num_drafts = fields.integer("block_size", 1, MAX_BLOCK)
        if len(temperatures) != num_drafts:
            raise fields.fail(
                "confidence_temperatures", list(temperatures), f"{num_drafts} numbers, one for each draft"
            )
    # Of training; the others say something of a confidence, which there may be none of.
    fields.ignore("num_anchors", "confidence_head_with_markov", "confidence_temperatures")
    return DSparkConfig(
        markov_rank=rank,
        markov_head_type=kind if rank else None,
        enable_confidence_head=confidence,
        confidence_head_with_markov=confidence and fields.boolean("confidence_head_with_markov"),
        confidence_temperatures=temperatures,
        scaled_embedding=is_gemma,
        logit_softcap=gemma_config.read_softcap(fields) if is_gemma else None,
    )


def _read_dflash(fields: Fields, section: Fields) -> HeadConfig:
    """The head's config, whose kind `architectures` and `projector_type` name.

    Older Domino files name the class of DFlash, and the head's sizes at top level.
    """
    projector = section.get_or_none("projector_type")
    is_domino = fields.get("architectures") == [DRAFTER_CLASSES[DominoConfig]]
    if projector is None and not is_domino:
        return _read_lm(fields, section)
    if projector not in ("domino", "causal_v5", *((None,) if is_domino else ())):
        raise section.fail("projector_type", projector, '"domino", or "causal_v5" in older files')

    def size(name: str) -> int:
        found = {at.integer(name, 1, hf_config.MAX_WIDTH) for at in (fields, section) if name in at}
        if not found:
            section.get(name)  # raises: missing
        if len(found) > 1:
            raise fields.fail(name, sorted(found), "the same value in dflash_config")
        return found.pop()

    # The format's definition of what is left out, not a guess: no shift, every draft corrected.
    return DominoConfig(
        emb_dim=size("emb_dim"),
        gru_hidden_dim=size("gru_hidden_dim"),
        shift_label=section.boolean("shift_label") if "shift_label" in section else False,
        pure_draft_prefix_len=section.integer("pure_draft_prefix_len", 0, MAX_BLOCK)
        if "pure_draft_prefix_len" in section
        else 0,
    )


def _read_lm(fields: Fields, section: Fields) -> LMHeadConfig:
    """How many tokens the drafter's own LM head has; which weights it has else, the file alone says."""
    ids = fields.get_or_none("eagle_aux_hidden_state_layer_ids")  # vLLM's numbering of the tapped layers
    if ids is not None and ids != [layer_id + 1 for layer_id in section.integers("target_layer_ids", 0, 1 << 10)]:
        raise fields.fail("eagle_aux_hidden_state_layer_ids", ids, "target_layer_ids, each plus one")
    fields.only("target_hidden_size", None, fields.get("hidden_size"), why="target and drafter are equally wide")
    if fields.get_or_none("draft_vocab_size") is None:
        return LMHeadConfig()
    vocab_size = fields.integer("vocab_size", 1, hf_config.MAX_VOCAB)
    return LMHeadConfig(draft_vocab_size=fields.integer("draft_vocab_size", 1, vocab_size))


def _read_sliding(fields: Fields, section: Fields, num_layers: int) -> dict[str, Any]:
    """The sliding layers, their window and how it is read; nothing where all layers are full.

    The reading is that of published checkpoints, `causal`, unless the file says otherwise: with
    vLLM's `causal` (false: symmetric), or with this package's own `sliding_attention`.
    """
    types = fields.get_or_none("layer_types")
    if not isinstance(types, list) or "sliding_attention" not in types:
        if types == ["full_attention"] * num_layers:
            fields.ignore("use_sliding_window", "sliding_window")  # of layers that there are none of
        else:
            hf_config.only_full_attention(fields, num_layers)
        section.only("causal", False, why="causal full attention is not supported")
        return {}
    if len(types) != num_layers or any(kind not in ("sliding_attention", "full_attention") for kind in types):
        expected = f'"sliding_attention" or "full_attention" for each of the {num_layers} layers'
        raise fields.fail("layer_types", types, expected)
    if not fields.boolean("use_sliding_window"):
        raise fields.fail("use_sliding_window", False, "true, since layer_types names sliding layers")
    layers = tuple(kind == "sliding_attention" for kind in types)
    causal = section.boolean("causal") if "causal" in section else None
    if causal and not all(layers):
        raise section.fail("causal", True, "false or nothing: causal full attention is not supported")
    attention: SlidingAttention = "symmetric" if causal is False else "causal"
    if "sliding_attention" in section:
        own = section.get("sliding_attention")
        if own not in get_args(SlidingAttention) or (causal is not None and own != attention):
            expected = f"one of {', '.join(get_args(SlidingAttention))}, not against causal"
            raise section.fail("sliding_attention", own, expected)
        attention = own
    return {
        "sliding_layers": layers,
        "sliding_window": fields.integer("sliding_window", 1, rope_config.MAX_POSITIONS),
        "sliding_attention": attention,
    }


def _block_size(fields: Fields, section: Fields, least: int) -> int:
    """`block_size`, at top level or in `dflash_config`; in both it must be the same."""
    sizes = {place.integer("block_size", least, MAX_BLOCK) for place in (fields, section) if "block_size" in place}
    if not sizes:
        fields.get("block_size")  # raises: missing
    if len(sizes) > 1:
        raise fields.fail("block_size", sorted(sizes), "the same value in dflash_config")
    return sizes.pop()
