"""The text of an answer that arrives in pieces: whole characters, up to a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from reanchor_jax.cli.answer import Answer
from reanchor_jax.tokenizer import ChatTokenizer, TextStream


class StopScanner:
    """Lets text through up to the first stop string, and holds back what may become one.

    Stop string "END", pieces "the E", "N", "D": the first push returns "the ", because "E" may be
    the start of "END"; the third finds it. Where several occur, the one that is complete first
    counts, so the cut does not depend on how the text was divided.
    """

    def __init__(self, stops: Sequence[str]):
        self._stops = tuple(stops)
        self._held = ""
        self.stopped = False

    def push(self, piece: str) -> str:
        """Takes the next piece; returns text that no later piece can turn into a stop string."""
        if self.stopped:
            return ""
        self._held += piece
        # (end, start) of each stop string's first occurrence.
        found = [(at + len(stop), at) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            self.stopped = True
            free, self._held = self._held[: min(found)[1]], ""
            return free
        kept = len(self._held) - max((self._overlap(stop) for stop in self._stops), default=0)
        free, self._held = self._held[:kept], self._held[kept:]
        return free

    def flush(self) -> str:
        """What was held back, at the end of the text."""
        free, self._held = self._held, ""
        return free

    def _overlap(self, stop: str) -> int:
        """Length of the longest end of the held text that `stop` starts with."""
        longest = min(len(stop) - 1, len(self._held))
        return next((n for n in range(longest, 0, -1) if self._held.endswith(stop[:n])), 0)


class AnswerText:
    """Writes an answer's text, and its finish reason where a stop string ends it."""

    def __init__(
        self,
        answer: Answer,
        tokenizer: ChatTokenizer | None,
        stop: Sequence[str],
        on_text: Callable[[str], None] | None,
    ):
        self._answer, self._tokenizer, self._on_text = answer, tokenizer, on_text
        self._stream = None if tokenizer is None else TextStream(tokenizer)
        self._scanner = StopScanner(stop)

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found."""
        return self._scanner.stopped

    def push(self, ids: Sequence[int]) -> int:
        """Takes the next tokens; returns how many of them belong to the answer.

        That is all of them, or those up to the one that completed a stop string.
        """
        if self._stream is None:
            return len(ids)
        piece, used = "", 0
        for token in ids:
            if self.stopped:
                break
            piece += self._scanner.push(self._stream.push([token]))
            used += 1
        self._write(piece)
        return used

    def end(self) -> None:
        """No more tokens: what was held back is text, or completes a stop string."""
        if self._stream is not None:
            piece = self._scanner.push(self._stream.flush())
            self._write(piece + self._scanner.flush())

    def whole(self) -> None:
        """Takes the text of all tokens at once."""
        if self._tokenizer is not None:
            self._answer.text = self._tokenizer.decode(self._answer.token_ids)

    def _write(self, piece: str) -> None:
        self._answer.text = (self._answer.text or "") + piece
        if self.stopped:
            self._answer.finish_reason = "stop_string"
        if piece and self._on_text is not None:
            self._on_text(piece)
