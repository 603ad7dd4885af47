"""config.json of a DFlash or Domino drafter in z-lab's format, to `DrafterConfig`."""

from __future__ import annotations

from pathlib import Path

from reanchor_jax.checkpoint import hf_config
from reanchor_jax.checkpoint.fields import Fields, read_json
from reanchor_jax.config import DominoConfig, DrafterConfig, HeadConfig, LMHeadConfig
from reanchor_jax.errors import ReanchorError

DRAFTER_CLASSES = {LMHeadConfig: "DFlashDraftModel", DominoConfig: "DominoDraftModel"}
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
    _only_known(fields)
    section = fields.section("dflash_config")
    head = _read_head(fields, section)
    fields.get("model_type")
    fields.only("model_type", "qwen3", why="other drafter layers are not supported")
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
        block_size=_block_size(fields, section),
        mask_token_id=section.integer("mask_token_id", 0, vocab_size - 1),
        target_layer_ids=tap_ids,
        target_num_layers=num_target_layers,
        vocab_size=vocab_size,
        num_layers=num_layers,
        layer=hf_config.read_layer(fields, qk_norm=True, head_dim_required=True),
        rope=hf_config.read_rope(fields),
        head=head,
    )
    section.finish()
    hf_config.only_plain_layers(fields, num_layers)
    fields.ignore(*hf_config.INERT, *_INERT)
    fields.finish()
    return config


def is_drafter(path: Path) -> bool:
    """Whether the folder's config.json says that it describes a drafter."""
    return path.is_dir() and "DraftModel" in str(read_json(path / "config.json").get("architectures"))


def _only_known(fields: Fields) -> None:
    if "DSpark" in str(fields.get("architectures")) or "markov_rank" in fields or "markov_head_type" in fields:
        raise ReanchorError(
            f"{fields.where} describes a DSpark drafter, which is not supported yet; use a DFlash or Domino drafter"
        )
    fields.only("architectures", *([name] for name in DRAFTER_CLASSES.values()), why="other drafters are not supported")


def _read_head(fields: Fields, section: Fields) -> HeadConfig:
    """The head's config, whose kind `architectures` and `projector_type` name.

    Older Domino files name the class of DFlash, and the head's sizes at top level.
    """
    projector = section.get_or_none("projector_type")
    is_domino = fields.get("architectures") == [DRAFTER_CLASSES[DominoConfig]]
    if projector is None and not is_domino:
        return LMHeadConfig()
    if projector not in ("domino", "causal_v5", *((None,) if is_domino else ())):
        raise section.fail("projector_type", projector, '"domino", or "causal_v5" in older files')

    def size(name: str) -> int:
        return (section if name in section else fields).integer(name, 1, hf_config.MAX_WIDTH)

    # The format's definition of what is left out, not a guess: no shift, every draft corrected.
    return DominoConfig(
        emb_dim=size("emb_dim"),
        gru_hidden_dim=size("gru_hidden_dim"),
        shift_label=section.boolean("shift_label") if "shift_label" in section else False,
        pure_draft_prefix_len=section.integer("pure_draft_prefix_len", 0, MAX_BLOCK)
        if "pure_draft_prefix_len" in section
        else 0,
    )


def _block_size(fields: Fields, section: Fields) -> int:
    """`block_size`, at top level or in `dflash_config`; in both it must be the same."""
    sizes = {place.integer("block_size", 2, MAX_BLOCK) for place in (fields, section) if "block_size" in place}
    if not sizes:
        fields.get("block_size")  # raises: missing
    if len(sizes) > 1:
        raise fields.fail("block_size", sorted(sizes), "the same value in dflash_config")
    return sizes.pop()
