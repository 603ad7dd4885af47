"""Decoding of one turn: round by round where text is streamed, as one program otherwise."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from reanchor_jax.cli.answer import Answer
from reanchor_jax.cli.programs import Programs
from reanchor_jax.cli.text import AnswerText
from reanchor_jax.config import DecodeConfig
from reanchor_jax.pair import Pair
from reanchor_jax.state import RoundRecord
from reanchor_jax.tokenizer import ChatTokenizer

SMALLEST_SIZE = 128
"""Prompts are padded to this size, or to the next power of two."""


class Decoder:
    """A pair with one set of settings. Its calls share compiled programs and nothing else."""

    def __init__(
        self,
        pair: Pair,
        config: DecodeConfig,
        *,
        max_new_tokens: int,
        eos_ids: Sequence[int],
        tokenizer: ChatTokenizer | None,
        max_len: int | None = None,
        stop: Sequence[str] = (),
        seed: int = 0,
    ):
        """Compiles nothing yet.

        Args:
          pair: networks.
          config: decoding settings.
          max_new_tokens: tokens to generate at most.
          eos_ids: tokens that end the text; empty: none does.
          tokenizer: for text and stop strings.
          max_len: one cache size for all prompts; None sizes the cache by the prompt.
          stop: texts that end the answer; they need a tokenizer.
          seed: of the keys of all prompts.
        """
        self.pair, self.config = pair, config
        self._tokenizer, self._stop, self._seed = tokenizer, tuple(stop), seed
        self._limit, self._max_len = max_new_tokens, max_len
        self._eos_ids = tuple(eos_ids) or (-1,)
        # Where no token is asked for, prefill still chooses one: it needs its slot.
        self._programs = Programs(pair, config, max(max_new_tokens, 1))

    def decode(
        self,
        answer: Answer,
        index: int = 0,
        on_text: Callable[[str], None] | None = None,
        on_round: Callable[[RoundRecord], None] | None = None,
    ) -> None:
        """Answers one prompt.

        The host drives every round where text is streamed, a stop string may end it, or rounds are
        traced; otherwise all rounds are one program. Both give the same ids.

        Args:
          answer: holds the prompt's ids, whose length has been checked, and takes the result.
          index: which prompt it is; its key is fold_in(key(seed), index).
          on_text: called with whole characters as they come.
          on_round: called with the record, on the host, of each round.
        """
        size = self._size(len(answer.prompt_ids))
        state, first = self._programs.prefill(answer, size, self._limit, self._eos_ids, self._seed, index)
        text = AnswerText(answer, self._tokenizer, self._stop, on_text)
        done = bool(first.done)
        if self._limit > 0:
            answer.token_ids.append(int(first.token))
            if self.config.logprobs is not None:
                answer.add_logprobs(first.logprobs, 1)
        if on_text is None and on_round is None and not self._stop:
            if not done:
                self._all_rounds(answer, size, state)
            text.whole()
        else:
            text.push(answer.token_ids)
            while not done and not text.stopped:
                state, done = self._round(answer, size, state, text, on_round)
            text.end()
        if answer.finish_reason is None:
            ended = answer.token_ids[-1:] and answer.token_ids[-1] in self._eos_ids
            answer.finish_reason = "stop" if ended else "length"

    def _size(self, prompt_len: int) -> int:
        if self._max_len is not None:
            return self._max_len - self._limit
        return padded_size(prompt_len, self.pair.target.config.max_position_embeddings - self._limit)

    def _round(self, answer, size, state, text: AnswerText, on_round):
        state, result = self._programs.round(answer, size, state, traced=on_round is not None)
        if on_round is not None:
            on_round(result.record)
        tokens = [int(token) for token in result.tokens[: int(result.kept)]]
        tokens = tokens[: text.push(tokens)]
        answer.token_ids += tokens
        answer.committed.append(int(result.committed))
        answer.nodes.append(int(result.nodes))
        answer.cut += int(result.cut)
        answer.clipped += int(result.committed) - len(tokens)
        if self.config.logprobs is not None:
            answer.add_logprobs(result.logprobs, len(tokens))
        return state, bool(result.done)

    def _all_rounds(self, answer: Answer, size: int, state) -> None:
        result = self._programs.all_rounds(answer, size, state)
        rounds, num_tokens = int(result.rounds), int(result.num_tokens)
        answer.token_ids = [int(token) for token in result.tokens[:num_tokens]]
        answer.committed = [int(n) for n in result.counts.committed[:rounds]]
        answer.nodes = [int(n) for n in result.counts.nodes[:rounds]]
        answer.cut = int(result.counts.cut.sum())
        answer.clipped = int(result.clipped)
        if self.config.logprobs is not None:
            answer.logprobs = None
            answer.add_logprobs(result.logprobs, num_tokens)


def padded_size(prompt_len: int, most: int) -> int:
    """The next power of two from `SMALLEST_SIZE` on; at most `most`, which holds the prompt."""
    return min(max(SMALLEST_SIZE, 1 << (prompt_len - 1).bit_length()), most)
