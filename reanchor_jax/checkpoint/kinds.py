"""Which kind of drafter a folder holds: by what its config says, and by what its tensors are."""

from __future__ import annotations

from collections.abc import Iterable

from reanchor_jax.checkpoint.fields import Fields
from reanchor_jax.config import DominoConfig, DrafterConfig, DSparkConfig
from reanchor_jax.errors import ReanchorError

SUPPORTED = (
    'DFlash (architectures ["DFlashDraftModel"]), Domino (["DominoDraftModel"], or projector_type "domino"), '
    'DSpark (["Qwen3DSparkModel"] or ["Gemma4DSparkModel"]), or DFlash of the speculators library '
    '(speculators_model_type "dflash")'
)
_TELLING = {
    "DSpark": ("markov_head.", "confidence_head."),
    "Domino": ("prefix_gru.", "embed_proj.", "logit_head.prefix_gru.", "logit_head.embed_proj."),
    "EAGLE-3": ("midlayer.", "layers.0.hidden_norm."),
}
"""Names that only one kind of drafter has, by their beginning."""
_FIELDS = {
    "DFlash": "no projector_type",
    "Domino": 'projector_type "domino", emb_dim and gru_hidden_dim in dflash_config',
    "DSpark": 'architectures ["Qwen3DSparkModel"] and markov_rank at top level',
    "EAGLE-3": "a config of another program, as EAGLE-3 is not supported",
}


def unsupported(fields: Fields) -> ReanchorError:
    """The error for a config of no supported kind."""
    section = fields.data.get("dflash_config")
    places = {**fields.data, **(section if isinstance(section, dict) else {})}
    names = ("architectures", "model_type", "projector_type", "speculators_model_type")
    found = ", ".join(f"{name} {places[name]!r:.80}" for name in names if name in places)
    found = " ".join(found.split()) or "none of architectures, model_type, projector_type"
    return ReanchorError(
        f"{fields.where} describes no supported drafter: it says {found}; expected {SUPPORTED}; "
        "other drafters are not supported"
    )


def check_tensors(where: str, names: Iterable[str], config: DrafterConfig) -> None:
    """Raises ReanchorError where the tensors are those of another kind than the config's.

    Args:
      where: the folder.
      names: of its tensors.
      config: what its config.json says.
    """
    names = list(names)
    said = {DominoConfig: "Domino", DSparkConfig: "DSpark"}.get(type(config.head), "DFlash")
    for kind, beginnings in _TELLING.items():
        telling = [name for name in names if name.startswith(beginnings)]
        if telling and kind != said:
            raise ReanchorError(
                f"{where}: its config says {said}, but {telling[0]} looks like {kind}; "
                f"expected {_FIELDS[kind]} in config.json for that, or files that belong together"
            )
    if said != "DFlash" and not any(name.startswith(_TELLING[said]) for name in names) and _needs_tensors(config):
        raise ReanchorError(
            f"{where}: its config says {said}, but no tensor is named {' or '.join(_TELLING[said][:2])}...; "
            "expected files that belong together, or the config of a drafter without them (DFlash: "
            f"{_FIELDS['DFlash']}; DSpark: markov_rank 0)"
        )


def _needs_tensors(config: DrafterConfig) -> bool:
    head = config.head
    return not isinstance(head, DSparkConfig) or head.markov_rank > 0 or head.enable_confidence_head
