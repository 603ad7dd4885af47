"""The rotary embedding of a config.json, to `RopeConfig`."""

from __future__ import annotations

from reanchor_jax.checkpoint.fields import Fields
from reanchor_jax.config import LinearScaling, Llama3Scaling, RopeConfig, RopeScaling, YarnScaling
from reanchor_jax.errors import ReanchorError

MAX_POSITIONS, MAX_THETA = 1 << 28, 1e12
_MOST = 1e6
"""Bound of every factor."""

SCALINGS: dict[type, str] = {Llama3Scaling: "llama3", LinearScaling: "linear", YarnScaling: "yarn"}
"""`rope_type` of each scaling."""


def read_rope(fields: Fields) -> RopeConfig:
    """The rotary embedding: `rope_theta` and `rope_scaling`, or transformers 5's `rope_parameters`.

    A base or scaling that is given twice must be the same twice. A missing base is an error.
    """
    thetas, scalings = [], []
    if "rope_theta" in fields:
        thetas.append(fields.number("rope_theta", above=1, below=MAX_THETA))
    for name in ("rope_scaling", "rope_parameters"):
        if fields.get_or_none(name) is None:
            if name == "rope_scaling" and name in fields:
                scalings.append(None)
            continue
        section = fields.section(name)
        if "rope_theta" in section:
            thetas.append(section.number("rope_theta", above=1, below=MAX_THETA))
        scalings.append(_read_scaling(section))
    if not thetas:
        raise ReanchorError(f"{fields.where}: rope_theta is missing; add it, no default is assumed")
    if len(set(thetas)) > 1:
        raise fields.fail("rope_theta", thetas, "one value in all places")
    if len(set(scalings)) > 1:
        raise fields.fail("rope_scaling", scalings, "the same scaling as in rope_parameters")
    return RopeConfig(theta=thetas[0], scaling=scalings[0] if scalings else None)


def _read_scaling(section: Fields) -> RopeScaling | None:
    kinds = [section.get(name) for name in ("rope_type", "type") if name in section]
    if not kinds or kinds[0] != kinds[-1]:
        raise section.fail("rope_type", kinds, "one type of scaling")
    kind = kinds[0]
    section.only("partial_rotary_factor", 1, 1.0)
    section.ignore("rope_theta")
    if kind == "default":
        section.finish()
        return None
    readers = {"llama3": _read_llama3, "linear": _read_linear, "yarn": _read_yarn}
    if not isinstance(kind, str) or kind not in readers:
        raise section.fail("rope_type", kind, '"default", "llama3", "linear" or "yarn"; nothing else is supported')
    scaling = readers[kind](section)
    section.finish()
    return scaling


def _read_llama3(section: Fields) -> Llama3Scaling:
    scaling = Llama3Scaling(
        factor=section.number("factor", above=0, below=_MOST),
        low_freq_factor=section.number("low_freq_factor", above=0, below=_MOST),
        high_freq_factor=section.number("high_freq_factor", above=0, below=_MOST),
        original_max_position_embeddings=section.integer("original_max_position_embeddings", 1, MAX_POSITIONS),
    )
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        expected = f"more than low_freq_factor, {scaling.low_freq_factor:g}"
        raise section.fail("high_freq_factor", scaling.high_freq_factor, expected)
    return scaling


def _read_linear(section: Fields) -> LinearScaling:
    return LinearScaling(factor=section.number("factor", above=0, below=_MOST))


def _read_yarn(section: Fields) -> YarnScaling:
    """What may be left out has a value by the format's definition."""

    def optional(name: str) -> float | None:
        return None if section.get_or_none(name) is None else section.number(name, above=0, below=_MOST)

    scaling = YarnScaling(
        factor=section.number("factor", above=0, below=_MOST),
        original_max_position_embeddings=section.integer("original_max_position_embeddings", 1, MAX_POSITIONS),
        beta_fast=optional("beta_fast") or 32.0,
        beta_slow=optional("beta_slow") or 1.0,
        truncate=section.boolean("truncate") if "truncate" in section else True,
        attention_factor=optional("attention_factor"),
        mscale=optional("mscale"),
        mscale_all_dim=optional("mscale_all_dim"),
    )
    if scaling.beta_fast <= scaling.beta_slow:
        raise section.fail("beta_fast", scaling.beta_fast, f"more than beta_slow, {scaling.beta_slow:g}")
    return scaling
