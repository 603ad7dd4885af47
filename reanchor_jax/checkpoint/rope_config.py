"""The rotary embedding of a config.json, to `RopeConfig`."""

from __future__ import annotations

import json
from typing import Any

from reanchor_jax.checkpoint.fields import Fields
from reanchor_jax.config import (
    LinearScaling,
    Llama3Scaling,
    ProportionalScaling,
    RopeConfig,
    RopeScaling,
    YarnScaling,
)
from reanchor_jax.errors import ReanchorError

MAX_POSITIONS, MAX_THETA = 1 << 28, 1e12
_MOST = 1e6
"""Bound of every factor."""

SCALINGS: dict[type, str] = {
    Llama3Scaling: "llama3",
    LinearScaling: "linear",
    YarnScaling: "yarn",
    ProportionalScaling: "proportional",
}
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


def read_rope_section(section: Fields) -> RopeConfig:
    """The rotary embedding of one kind of layer."""
    return RopeConfig(
        theta=section.number("rope_theta", above=1, below=MAX_THETA),
        scaling=_read_scaling(section),
    )


def rope_fields(rope: RopeConfig) -> dict[str, Any]:
    """The fields that `read_rope_section` reads."""
    return {"rope_theta": rope.theta, **(scaling_fields(rope.scaling) or {"rope_type": "default"})}


def scaling_fields(scaling: RopeScaling | None) -> dict[str, Any] | None:
    """The scaling alone; None where there is none."""
    if scaling is None:
        return None
    given = {name: value for name, value in vars(scaling).items() if value is not None}
    return {"rope_type": SCALINGS[type(scaling)], **given}


def _read_scaling(section: Fields) -> RopeScaling | None:
    kinds = [section.get(name) for name in ("rope_type", "type") if name in section]
    if not kinds or kinds[0] != kinds[-1]:
        raise section.fail("rope_type", kinds, "one type of scaling")
    kind = kinds[0]
    if kind != "proportional":
        section.only("partial_rotary_factor", 1, 1.0)
    section.ignore("rope_theta")
    if kind == "default":
        section.finish()
        return None
    readers = {
        "llama3": _read_llama3,
        "linear": _read_linear,
        "yarn": _read_yarn,
        "proportional": _read_proportional,
    }
    if not isinstance(kind, str) or kind not in readers:
        expected = f"{', '.join(json.dumps(name) for name in ('default', *readers))}; nothing else is supported"
        raise section.fail("rope_type", kind, expected)
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


def _read_proportional(section: Fields) -> ProportionalScaling:
    """Both are 1 where they are left out, by the format's definition."""

    def optional(name: str) -> float:
        return section.number(name, above=0, below=_MOST) if name in section else 1.0

    share = optional("partial_rotary_factor")
    if share > 1:
        raise section.fail("partial_rotary_factor", share, "at most 1")
    return ProportionalScaling(partial_rotary_factor=share, factor=optional("factor"))


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
