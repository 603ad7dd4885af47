"""Text to token ids and back: chat templates, plain prompts, and a stream of whole characters."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from reanchor_jax.checkpoint.hub import resolve
from reanchor_jax.default_pair import target_source
from reanchor_jax.errors import ReanchorError
from reanchor_jax.gguf_tokenizer import read_gguf_tokenizer

# Read before transformers is imported (inside the functions below: it takes seconds): no word about torch,
# which this package does not use, nor any other remark beside the error that a folder gives.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

_VOCABULARY_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
_NO_LENGTH_LIMIT = int(1e30)  # the decoder checks prompt lengths itself
_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")  # how sentencepiece vocabularies spell a single byte


def load_tokenizer(path_or_id: str | Path, revision: str | None = None) -> ChatTokenizer | None:
    """The tokenizer of a GGUF file, a Hugging Face folder, a hub id, or the default pair's name.

    None for a folder without one. A local path is read without network, and no code from the folder is
    run. `revision` is for hub ids. Raises ReanchorError for a missing path, an unreachable hub, or
    tokenizer files that cannot be used.
    """
    path = resolve(target_source(path_or_id), revision)
    if path.is_file():
        return ChatTokenizer(*read_gguf_tokenizer(path))
    if not any((path / name).is_file() for name in _VOCABULARY_FILES):
        return None

    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    # AutoTokenizer rebuilds some classes from their vocabulary alone and loses the file's own pre-tokenizer
    # (SmolLM2 names GPT2Tokenizer: "x  1" then gets other ids than the model was trained with), so it is
    # asked only where there is no tokenizer.json.
    loader = PreTrainedTokenizerFast if (path / "tokenizer.json").is_file() else AutoTokenizer
    try:
        tokenizer = loader.from_pretrained(
            path, local_files_only=True, trust_remote_code=False, model_max_length=_NO_LENGTH_LIMIT
        )
    except Exception as error:  # foreign files, and Rust code that raises bare Exceptions
        raise ReanchorError(
            f"{path} has tokenizer files that cannot be read: {_first_line(error)}; fetch the folder again"
        ) from error
    return ChatTokenizer(tokenizer)


class ChatTokenizer:
    """A tokenizer with its chat template.

    `eos_ids` are the ids that the tokenizer itself names as ends of a text or a turn, without repeats. The
    target's config may name more (`TargetConfig.eos_token_ids`): decoding stops at the union.

    Special tokens written in a text ("<|im_end|>") become the control token, in prompts too, as the chat
    template's own do: both are one string by then, and ids must equal what the model's template gives. A
    program that shows the model text from people it does not trust has to strip such strings first.
    """

    eos_ids: tuple[int, ...]

    def __init__(self, tokenizer: Any, eos_ids: Iterable[int] = ()):
        """Wraps a `transformers.PreTrainedTokenizerFast` or its like; `eos_ids` join its eos token."""
        self._tokenizer = tokenizer
        own = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        self.eos_ids = tuple(dict.fromkeys([*own, *eos_ids]))
        self._special_ids = frozenset(i for i, t in tokenizer.added_tokens_decoder.items() if t.special)
        bos = tokenizer.bos_token_id
        # Asking the tokenizer itself covers add_bos_token flags and post-processors alike.
        self._bos = [bos] if bos is not None and tokenizer.encode("")[:1] == [bos] else []

    @property
    def has_chat_template(self) -> bool:
        return self._tokenizer.chat_template is not None

    def encode_chat(
        self, turns: Sequence[Mapping[str, str]], system: str | None = None, thinking: bool | None = None
    ) -> list[int]:
        """Ids of a conversation after the chat template, ready for the assistant's next words.

        Args:
          turns: messages in order, each with `role` ("user", "assistant") and `content`.
          system: system prompt; None leaves it to the template, which may have its own (SmolLM2's has).
          thinking: sets the template's `enable_thinking`; None leaves it to the template.

        The ids are the template's: BOS is there once if the template writes it, and not otherwise.
        Raises ReanchorError without a chat template, for `thinking` under a template that has no such switch,
        for a malformed turn, and where the template refuses the conversation.
        """
        if not self.has_chat_template:
            raise ReanchorError("the tokenizer has no chat template, expected one; use plain prompts")
        if not turns:
            raise ReanchorError("the conversation is empty, expected at least one turn; give a prompt")
        for i, turn in enumerate(turns):
            if not isinstance(turn.get("role"), str) or not isinstance(turn.get("content"), str):
                raise ReanchorError(
                    f"turn {i} has keys {sorted(turn)}, expected strings `role` and `content`; correct it"
                )
        messages = [*([] if system is None else [{"role": "system", "content": system}]), *map(dict, turns)]
        for message in messages:
            check_text(message["content"], "the prompt")
        switches = {}
        if thinking is not None:
            if not re.search(r"\benable_thinking\b", self._tokenizer.get_chat_template()):
                raise ReanchorError(
                    f"thinking={thinking} was asked, expected a chat template that uses enable_thinking; leave it unset"
                )
            switches["enable_thinking"] = thinking

        try:
            return self._tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=True, return_dict=False, **switches
            )
        except Exception as error:  # a template is a foreign program: it may divide by zero or call a list
            raise ReanchorError(
                f"the chat template refuses the conversation: {_first_line(error)}; change the turns"
            ) from error

    def encode_plain(self, text: str) -> list[int]:
        """Ids of a text without a template, behind one BOS if the tokenizer puts one."""
        check_text(text, "the prompt")
        try:
            ids = self._tokenizer.encode(text, add_special_tokens=False)
        except Exception as error:  # Rust code that raises bare Exceptions, as for a vocabulary without [UNK]
            raise ReanchorError(
                f"the tokenizer cannot encode the prompt: {_first_line(error)}; fetch its files again"
            ) from error
        return ids if ids[:1] == self._bos else [*self._bos, *ids]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids, without special tokens; bytes that are no UTF-8 become U+FFFD."""
        return self._tokenizer.decode(
            [int(i) for i in ids], skip_special_tokens=True, clean_up_tokenization_spaces=False
        )

    def is_skipped(self, token_id: int) -> bool:
        """Whether `decode` leaves the id out: a special token, or a padding row of the target's vocabulary."""
        return token_id in self._special_ids or self._tokenizer.convert_ids_to_tokens(token_id) is None

    def is_byte(self, token_id: int) -> bool:
        """Whether the token is a sentencepiece byte, "<0xE4>"."""
        return bool(_BYTE_TOKEN.fullmatch(self._tokenizer.convert_ids_to_tokens(token_id) or ""))


class TextStream:
    """Text of ids that arrive in pieces: only whole characters; joined, they equal `decode` of all ids.

    Two tokens of one emoji, [F0 9F 98] and [80]: the first push returns "", the second "😀".
    Each push decodes the ids held back and one piece before them, never the whole text.
    """

    def __init__(self, tokenizer: ChatTokenizer):
        self._tokenizer = tokenizer
        self._start()

    def _start(self) -> None:
        self._context: list[int] = []  # the piece before: some decoders drop a space at a text's start
        self._context_len = 0  # characters of it
        self._held: list[int] = []  # ids since the last whole character
        self._sent = 0  # characters of `held` that were returned

    def push(self, ids: Iterable[int]) -> str:
        """Takes the next ids and returns the characters that no later id can change."""
        self._held += [i for i in map(int, ids) if not self._tokenizer.is_skipped(i)]
        # A run of byte tokens is valid or not as a whole: one bad byte at its end turns all of it to U+FFFD.
        if not self._held or self._tokenizer.is_byte(self._held[-1]):
            return ""
        text = self._held_text()
        whole = text.removesuffix("\N{REPLACEMENT CHARACTER}")  # perhaps the first bytes of a character
        piece = whole[self._sent :]
        self._sent += len(piece)
        if text and whole == text:
            self._context, self._held, self._sent = self._held, [], 0
            self._context_len = len(self._tokenizer.decode(self._context))
        return piece

    def flush(self) -> str:
        """Returns what was held back (U+FFFD for half a character); the next push starts a new text."""
        piece = self._held_text()[self._sent :]
        self._start()
        return piece

    def _held_text(self) -> str:
        return self._tokenizer.decode(self._context + self._held)[self._context_len :]


def check_text(text: str, what: str) -> None:
    """Raises ReanchorError where a text cannot be UTF-8 (half a surrogate pair); `what` names it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ReanchorError(
            f"{what} has {text[error.start]!r} at character {error.start}, expected Unicode text; "
            "give it as valid UTF-8"
        ) from error


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
