"""config.json of a DFlash drafter as the speculators library writes it, in z-lab's layout.

There the layer's fields are nested in `transformer_layer_config`, and the tapped layers are numbered
as hidden states: the output of layer n is hidden state n + 1, and entry 3 our layer id 2.
"""

from __future__ import annotations

from typing import Any

from reanchor_jax.checkpoint.fields import Fields

NESTED = "transformer_layer_config"
MODEL_TYPE = "speculators_model_type"
_MOST = 1 << 10

# fmt: off
_INERT = (
    # the target, and how many drafts to take; which files belong together is not checked by it
    "speculators_config", "speculators_version",
    # training only
    "max_anchors", "auf", "lambda_base_start", "lambda_base_decay_ratio",
    # of a Domino head, written for every projector
    "pure_draft_prefix_len", "emb_dim", "gru_hidden_dim",
    # bookkeeping
    "architectures", "auto_map", "dtype", "model_type", "torch_dtype", "transformers_version", "tie_word_embeddings",
)
# fmt: on


def is_speculators(data: dict[str, Any]) -> bool:
    """Whether a config.json is one of the speculators library."""
    return MODEL_TYPE in data or NESTED in data


def flatten(fields: Fields) -> dict[str, Any]:
    """The same config in z-lab's layout; what the library's own fields say is read here, the rest there.

    Raises:
      ReanchorError: another kind of drafter, or a field that is bad, missing or unknown.
    """
    fields.get(MODEL_TYPE)
    fields.only(MODEL_TYPE, "dflash", why="other drafters of the speculators library are not supported")
    fields.only("projector_type", "dflash", why="Domino is read in the format of its authors")
    fields.only("sample_from_anchor", False)
    fields.only("shift_label", False, None)
    nested = fields.section(NESTED).data
    fields.only("target_hidden_size", None, nested.get("hidden_size"), why="target and drafter are equally wide")
    own: dict[str, Any] = {
        "mask_token_id": fields.get("mask_token_id"),
        "target_layer_ids": [entry - 1 for entry in fields.integers("aux_hidden_state_layer_ids", 1, _MOST)],
    }
    if "sliding_window_non_causal" in fields and fields.boolean("sliding_window_non_causal"):
        own["causal"] = False
    flat = nested | {
        "architectures": ["DFlashDraftModel"],
        "block_size": fields.get("block_size"),
        "dflash_config": own,
        "draft_vocab_size": fields.get("draft_vocab_size"),
    }
    fields.ignore(*_INERT)
    fields.finish()
    return flat
