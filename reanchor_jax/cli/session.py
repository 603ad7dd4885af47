"""Answering of prompts, turn by turn, with a check against plain decoding where it is wanted."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from reanchor_jax.cli.answer import Answer
from reanchor_jax.cli.check import Check, compare
from reanchor_jax.cli.decoder import Decoder
from reanchor_jax.cli.models import Models
from reanchor_jax.cli.prompts import Prompt
from reanchor_jax.cli.trace import Trace
from reanchor_jax.pair import Pair


@dataclasses.dataclass
class Turns:
    """The answers to one prompt, one per turn, and their checks."""

    prompt: Prompt
    answers: list[Answer] = dataclasses.field(default_factory=list)
    checks: list[Check] = dataclasses.field(default_factory=list)


class Session:
    """A loaded pair with the settings of one run."""

    def __init__(self, models: Models, pair: Pair):
        options, config = models.options, models.options.decode
        self._models, self._options, self._pair = models, options, pair
        self._decoder = self._make_decoder(config)
        plain = dataclasses.replace(config, method="ar", logprobs=None)
        self._plain = self._make_decoder(plain) if options.check else None

    def _make_decoder(self, config) -> Decoder:
        return Decoder(
            self._pair,
            config,
            max_new_tokens=self._options.max_new_tokens,
            eos_ids=self._models.eos_ids,
            tokenizer=self._models.tokenizer,
            max_len=self._options.max_len,
            stop=self._options.stop,
            seed=self._options.seed,
        )

    def answer(
        self,
        turns: Turns,
        first_ids: list[int],
        on_text: Callable[[str], None] | None = None,
        trace: Trace | None = None,
    ) -> None:
        """Answers all turns of a prompt in order, each behind the whole conversation before it.

        Args:
          turns: takes the answers; the one under way is its last, so that an interrupted run has it.
          first_ids: the first turn's ids.
          on_text: called with whole characters of the answers as they come.
          trace: takes what happened in every round.

        Raises:
          ReanchorError: the conversation has grown beyond the cache.
        """
        prompt, ids = turns.prompt, first_ids
        for turn in range(max(len(prompt.turns), 1)):
            if turn:
                ids = self._models.encode(prompt, [answer.text or "" for answer in turns.answers])
            answer = Answer(ids)
            turns.answers.append(answer)
            if trace is None:
                self._decoder.decode(answer, prompt.index, on_text)
            else:
                trace.begin(prompt.index, turn, ids)
                self._decoder.decode(answer, prompt.index, on_text, trace.round)
                trace.end(answer)
            if self._plain is not None:
                turns.checks.append(self._check(answer, prompt.index, by_rounds=bool(on_text or trace)))

    def _check(self, answer: Answer, index: int, by_rounds: bool) -> Check:
        assert self._plain is not None
        plain = Answer(answer.prompt_ids)
        # Driven as the answer was, so that the two times compare.
        self._plain.decode(plain, index, (lambda piece: None) if by_rounds else None)
        return compare(self._pair, self._options.decode, answer, plain, self._options.seed, index)
