"""What is decoded and how: a study (one pair, one machine, one budget) and its settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from reanchor_jax.config import DecodeConfig
from reanchor_jax.state import RoundRecord

NO_BUDGET = 100_000
"""Trie nodes beyond what any block size can fill: the paper cuts no trie."""

Observer = Callable[[Sequence[RoundRecord], Sequence[int]], dict[str, Any]]
"""Statistics of an answer, as JSON, from its rounds (on the host) and plain decoding's token ids."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Study:
    """What every record of a folder has in common; records of another study are refused."""

    pair: str
    """As it was named; of a path the last part."""
    target: str
    """Fingerprint of the target's weights."""
    block_size: int
    head: str
    """Class of the drafter's head config."""
    variants: dict[str, int]
    """Block sizes of the other drafters, by name."""
    dtype: str
    device: str
    max_new_tokens: int
    seed: int
    nodes: int | None
    """Node budget of every setting that does not vary it; None: no budget, as in the paper."""
    chat_template: bool
    thinking: bool | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """One way to decode."""

    config: DecodeConfig
    drafter: str = ""
    """Name of a variant; empty: the pair's own."""
    block_size: int | None = None
    """In place of the one that the drafter was trained with."""
    observe: Observer | None = None
    """Rounds are driven from the host and handed to this; such a run is not timed."""

    @property
    def changes(self) -> dict[str, Any]:
        """Fields of the config that are not the defaults."""
        fields = {field.name: field.default for field in dataclasses.fields(DecodeConfig)}
        return {name: value for name in fields if (value := getattr(self.config, name)) != fields[name]}

    @property
    def name(self) -> str:
        """Identifies the setting among records: one string for what decodes alike."""
        own = {"drafter": self.drafter, "block_size": self.block_size}
        observe = self.observe.__name__ if self.observe else ""
        parts = {"method": self.config.method, **self.changes, **own, "observe": observe}
        return " ".join(f"{key}={value}" for key, value in parts.items() if value not in (None, ""))

    @property
    def plain(self) -> Setting:
        """Plain decoding, which must give the same tokens."""
        return plain(self.config.temperature)


def plain(temperature: float = 0.0) -> Setting:
    """The target alone."""
    return Setting(config=DecodeConfig(method="ar", temperature=temperature))


def chain(temperature: float = 0.0, **changes: Any) -> Setting:
    """The baseline block alone (DFlash's decoding, whatever the drafter's head)."""
    return _setting({"method": "dflash", "temperature": temperature}, changes)


def reanchor(study: Study, temperature: float = 0.0, **changes: Any) -> Setting:
    """ReAnchor as in the paper: earliest match, the baseline's states, every offset, no node budget."""
    nodes = NO_BUDGET if study.nodes is None else study.nodes
    return _setting({"temperature": temperature, "retain": "baseline", "nodes": nodes}, changes)


def _setting(fields: dict[str, Any], changes: dict[str, Any]) -> Setting:
    own = {key: changes[key] for key in ("drafter", "block_size", "observe") if key in changes}
    # Above 0 the paper's drafts are sampled independently of the target.
    rule = {"draft_rule": "sample" if fields["temperature"] else "greedy"}
    return Setting(config=DecodeConfig(**{**rule, **fields, **{k: changes[k] for k in changes if k not in own}}), **own)
