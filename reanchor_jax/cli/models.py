"""Target, drafter and tokenizer: opened and held against the request before any weight is read."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from reanchor_jax.checkpoint.hub import find_local, resolve
from reanchor_jax.checkpoint.load import Plan, plan_drafter, plan_target
from reanchor_jax.cli.arguments import Options
from reanchor_jax.cli.prompts import Prompt
from reanchor_jax.config import TargetConfig
from reanchor_jax.default_pair import DEFAULT_PAIR, drafter_source, target_source
from reanchor_jax.drafter import Drafter
from reanchor_jax.errors import ReanchorError
from reanchor_jax.pair import Pair, check_pair, check_schedule
from reanchor_jax.profile import load_profile, roofline
from reanchor_jax.target import Target
from reanchor_jax.tokenizer import ChatTokenizer, load_tokenizer


@dataclasses.dataclass(frozen=True)
class Models:
    """What is known of the models without their weights."""

    options: Options
    target: Plan[Target]
    drafter: Plan[Drafter] | None
    tokenizer: ChatTokenizer | None

    @property
    def config(self) -> TargetConfig:
        """The target's."""
        return self.target.abstract.config

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Tokens that end a text: the union of the config's and the tokenizer's; none to ignore them."""
        if self.options.ignore_eos:
            return ()
        own = () if self.tokenizer is None else self.tokenizer.eos_ids
        return tuple(sorted({*self.config.eos_token_ids, *own}))

    def load(self) -> Pair:
        """Reads the weights.

        Raises:
          ReanchorError: tensors that cannot be read.
        """
        drafter = None if self.drafter is None else self.drafter.run()
        return jax.block_until_ready(Pair(self.target.run(), drafter))

    def encode(self, prompt: Prompt, answers: Sequence[str] = ()) -> list[int]:
        """Token ids of a prompt, or of its conversation up to the turn behind `answers`.

        Raises:
          ReanchorError: text without a tokenizer, turns without a chat template, ids outside the
            vocabulary, a prompt that does not fit beside the new tokens.
        """
        if prompt.ids:
            ids = list(prompt.ids)
        elif self.tokenizer is None:
            raise ReanchorError(
                f"{prompt.where} is text, but {self.options.target} has no tokenizer; give prompt_ids with --prompts"
            )
        elif self.options.chat_template and self.tokenizer.has_chat_template:
            turns = [{"role": "user", "content": prompt.turns[0]}]
            for answer, turn in zip(answers, prompt.turns[1:], strict=False):
                turns += [{"role": "assistant", "content": answer}, {"role": "user", "content": turn}]
            ids = self.tokenizer.encode_chat(turns, self.options.system, self.options.thinking)
        else:
            self._check_plain(prompt)
            ids = self.tokenizer.encode_plain(prompt.turns[0])
        self._check_ids(ids, prompt.where)
        return ids

    def _check_plain(self, prompt: Prompt) -> None:
        if self.options.system is not None or self.options.thinking is not None:
            raise ReanchorError(
                f"{self.options.target} has no chat template; expected one for --system and --thinking: leave them out"
            )
        if len(prompt.turns) > 1:
            raise ReanchorError(f"{prompt.where} has {len(prompt.turns)} turns; expected one without a chat template")

    def _check_ids(self, ids: list[int], where: str) -> None:
        new, vocab_size = self.options.max_new_tokens, self.config.vocab_size
        if not ids:
            raise ReanchorError(f"{where} has no tokens; expected at least one")
        outside = [token for token in ids if not 0 <= token < vocab_size]
        if outside:
            raise ReanchorError(f"{where} has the token id {outside[0]}; expected ids from 0 to {vocab_size - 1}")
        room, limit = self.config.max_position_embeddings - new, "the target's limit"
        if self.options.max_len is not None and self.options.max_len - new < room:
            room, limit = self.options.max_len - new, "the cache of --max-len"
        if len(ids) > room:
            raise ReanchorError(
                f"{where} has {len(ids)} tokens, {len(ids) + new} with --max-new-tokens {new}; expected at most "
                f"{room + new}, {limit}: shorten the prompt or ask for fewer tokens"
            )


def open_models(options: Options, dtype: jnp.dtype) -> Models:
    """Opens both checkpoints and the tokenizer; reads configs and headers, no weights.

    Args:
      options: of the command line.
      dtype: of the weights to be loaded.

    Raises:
      ReanchorError: something is missing, corrupt, unsupported, does not fit the other, or does not
        fit the options.
    """
    revisions = _revisions(options)
    # The drafter first: the default one is here, while the default target may have to be fetched.
    drafter = None
    if options.drafter is not None:
        drafter = plan_drafter(resolve(drafter_source(options.drafter), revisions[options.drafter]), dtype)
        drafter.check()
        options.decode.validate(drafter.abstract.config.block_size)
        check_schedule(drafter.abstract.config, options.decode)
    path = resolve(target_source(options.target), revisions[options.target])
    target = plan_target(path, dtype)
    target.check()
    if drafter is not None:
        check_pair(target.abstract, drafter.abstract)
        options = _with_costs(options, target.abstract.config, drafter.abstract.config.block_size, dtype)
    _check_options(options, target.abstract.config)
    tokenizer = load_tokenizer(path)
    if tokenizer is None and options.stop:
        raise ReanchorError(f"--stop needs text, but {options.target} has no tokenizer; leave it out")
    return Models(options, target, drafter, tokenizer)


def _with_costs(options: Options, target: TargetConfig, block_size: int, dtype: jnp.dtype) -> Options:
    """The options with what verification costs, where the schedule asks for it."""
    if options.decode.schedule != "hardware":
        return options
    if options.profile is not None:
        profile = load_profile(options.profile)
    else:
        profile = roofline(target, dtype, first_device().device_kind)
    return dataclasses.replace(options, decode=dataclasses.replace(options.decode, costs=profile.costs(block_size)))


def _check_options(options: Options, config: TargetConfig) -> None:
    most = config.vocab_size
    if options.decode.logprobs is not None and options.decode.logprobs > most:
        raise ReanchorError(f"--logprobs is {options.decode.logprobs}; expected at most the vocabulary, {most}")
    most = config.max_position_embeddings
    if options.max_len is not None and options.max_len > most:
        raise ReanchorError(f"--max-len is {options.max_len}; expected at most {most}, the target's limit")
    if options.max_new_tokens >= most:
        raise ReanchorError(
            f"--max-new-tokens is {options.max_new_tokens}; expected less than {most}, the target's limit for "
            "prompt and new tokens together"
        )


def _revisions(options: Options) -> dict[str, str | None]:
    """--revision for those of the two sources that are hub ids."""
    sources = [source for source in (options.target, options.drafter) if source is not None]
    on_hub = [source for source in sources if source != DEFAULT_PAIR and find_local(source) is None]
    if options.revision is not None and not on_hub:
        raise ReanchorError(f"--revision is {options.revision}, but neither model is a hub id; leave it out")
    return {source: options.revision if source in on_hub else None for source in sources}


def default_dtype() -> str:
    """float32 on CPU, bfloat16 on accelerators.

    Raises:
      ReanchorError: JAX finds no device.
    """
    return "float32" if first_device().platform == "cpu" else "bfloat16"


def first_device() -> Any:
    """What the run is on.

    Raises:
      ReanchorError: JAX finds no device.
    """
    try:
        return jax.devices()[0]
    except (RuntimeError, AssertionError) as error:  # an assertion where a named platform is not installed
        reason = str(error) or "that of JAX_PLATFORMS is not there"
        raise ReanchorError(f"JAX finds no device: {reason}; check JAX_PLATFORMS and the installed plugin") from None
