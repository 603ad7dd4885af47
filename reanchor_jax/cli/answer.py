"""What decoding one turn gave and cost."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from reanchor_jax.sampling import TokenLogprobs


@dataclasses.dataclass
class Answer:
    """One turn's tokens; grows while the turn is decoded, so an interrupted run has what there is.

    The first token comes from prefill and belongs to no round:
    `len(token_ids) == 1 + sum(committed) - clipped`, unless no token was asked for.
    """

    prompt_ids: list[int]
    token_ids: list[int] = dataclasses.field(default_factory=list)
    text: str | None = None
    """None without a tokenizer; while decoding goes on, what was streamed so far."""
    finish_reason: str | None = None
    """`stop` (end-of-text token), `length`, `stop_string`; None while decoding goes on."""
    committed: list[int] = dataclasses.field(default_factory=list)
    """Per round: accepted drafts and the target's own token, before clipping."""
    nodes: list[int] = dataclasses.field(default_factory=list)
    """Per round: verified trie nodes, the anchor included."""
    cut: int = 0
    """Trie nodes lost to the budget, all rounds together."""
    clipped: int = 0
    """Committed tokens beyond the end of the text or the limit."""
    logprobs: list[dict[str, Any]] | None = None
    compile_seconds: float = 0.0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0

    @property
    def accepted(self) -> list[int]:
        """Per round: accepted drafts."""
        return [count - 1 for count in self.committed]

    @property
    def tau(self) -> float:
        """Committed tokens per round; the last round counts in full. 0 without a round."""
        return sum(self.committed) / max(len(self.committed), 1)

    @property
    def tokens_per_second(self) -> float:
        """Tokens that rounds brought, per second of rounds: neither prefill nor its token counts."""
        return max(len(self.token_ids) - 1, 0) / self.decode_seconds if self.decode_seconds else 0.0

    def add_logprobs(self, rows: TokenLogprobs, count: int) -> None:
        """Takes the first `count` rows as those of the tokens that have none yet."""
        self.logprobs = [] if self.logprobs is None else self.logprobs
        tokens = self.token_ids[len(self.logprobs) :]
        for token, chosen, top_ids, top in zip(
            tokens, rows.chosen[:count], rows.top_ids[:count], rows.top[:count], strict=True
        ):
            pairs = [[int(i), float(p)] for i, p in zip(top_ids, top, strict=True)]
            self.logprobs.append({"token_id": token, "logprob": float(chosen), "top": pairs})


def overall(answers: Sequence[Answer]) -> Answer:
    """All answers as one, for totals and means: texts and tokens in a row, counts and times summed."""
    total = Answer([])
    for answer in answers:
        for name in ("prompt_ids", "token_ids", "committed", "nodes"):
            getattr(total, name).extend(getattr(answer, name))
        for name in ("cut", "clipped", "compile_seconds", "prefill_seconds", "decode_seconds"):
            setattr(total, name, getattr(total, name) + getattr(answer, name))
    return total
