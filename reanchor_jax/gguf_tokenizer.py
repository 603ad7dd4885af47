"""Byte-level BPE tokenizers out of a GGUF file's metadata (keys `tokenizer.ggml.*`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from reanchor_jax.checkpoint.gguf_file import open_gguf
from reanchor_jax.errors import ReanchorError

# How a text is cut before byte-level BPE, by the file's name for it (`tokenizer.ggml.pre`).
# The cut decides ids: "x  1" is [x][  ][1] under smollm, but [x][ ][ 1] under plain GPT-2.
PRE_TOKENIZERS = ("smollm", "gpt-2", "llama-bpe", "qwen2")

# Llama 3 and Qwen 2 share this split: contractions in any case, a word with one leading non-letter, numbers
# of a few digits, punctuation with its line ends, line ends, spaces. They differ in digits a number piece.
_WORD_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DIGITS = {"llama-bpe": "{1,3}", "qwen2": ""}

_CONTROL, _USER_DEFINED = 3, 4  # values of `tokenizer.ggml.token_type`


def read_gguf_tokenizer(path: Path) -> tuple[Any, tuple[int, ...]]:
    """A `transformers.PreTrainedTokenizerFast` and the ids that end a text, from a GGUF file.

    The ids that end a text are the file's eos, eot (end of turn) and eom (end of message) ids.
    Raises ReanchorError for a file that is no GGUF file, has no tokenizer, or has one of another kind.
    """
    try:
        fields = open_gguf(path).fields
        metadata = {name: field.contents() for name, field in fields.items() if name.startswith("tokenizer.")}
    except Exception as error:  # the reader trusts its input: a damaged file raises anything
        reason = " ".join(str(error).split())
        raise ReanchorError(f"{path} is not a readable GGUF file: {reason}; fetch the file again") from error
    return tokenizer_from_metadata(metadata, str(path))


def tokenizer_from_metadata(metadata: dict[str, Any], name: str) -> tuple[Any, tuple[int, ...]]:
    """As `read_gguf_tokenizer`, from the metadata's `tokenizer.*` entries; `name` is used in errors."""
    from tokenizers import processors
    from transformers import PreTrainedTokenizerFast

    def get(key: str, default: Any = None) -> Any:
        return metadata.get(f"tokenizer.ggml.{key}", default)

    def wrong(key: str, expected: str) -> ReanchorError:
        return ReanchorError(f"{name} has {key} = {metadata[key]!r:.60}, expected {expected}; convert the file again")

    kind, pre, tokens = get("model"), get("pre"), get("tokens")
    if kind != "gpt2" or pre not in PRE_TOKENIZERS:
        raise ReanchorError(
            f"{name} has a tokenizer of model {kind!r} and pre-tokenizer {pre!r}, expected 'gpt2' with one "
            f"of {', '.join(PRE_TOKENIZERS)}; use a folder with tokenizer.json instead"
        )
    merges, token_types = get("merges"), get("token_type")
    complete = _all_are(str, tokens) and tokens and _all_are(str, merges) and _all_are(int, token_types)
    if not complete or len(token_types) != len(tokens):
        raise ReanchorError(
            f"{name} has an incomplete tokenizer: expected tokenizer.ggml.tokens, .merges and one .token_type "
            "each; convert the file again or use a folder with tokenizer.json"
        )

    def token(key: str) -> str | None:
        token_id = get(key)
        if token_id is None:
            return None
        if type(token_id) is not int or not 0 <= token_id < len(tokens):
            raise wrong(f"tokenizer.ggml.{key}", f"an id below {len(tokens)}")
        return tokens[token_id]

    add_bos, template = get("add_bos_token", pre == "llama-bpe"), metadata.get("tokenizer.chat_template")
    if not isinstance(add_bos, bool):
        raise wrong("tokenizer.ggml.add_bos_token", "true or false")
    if not isinstance(template, str | None):
        raise wrong("tokenizer.chat_template", "a text")
    backend = _byte_level_bpe(tokens, merges, token_types, pre, name)
    bos = token("bos_token_id")
    if bos is not None and add_bos:
        backend.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"], pair=[bos, "$A", "$B"], special_tokens=[(bos, get("bos_token_id"))]
        )
    named = {
        "bos_token": bos,
        "eos_token": token("eos_token_id"),
        "unk_token": token("unknown_token_id"),
        "pad_token": token("padding_token_id"),
    }
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=template,
        clean_up_tokenization_spaces=False,
        **{role: text for role, text in named.items() if text is not None},
    )
    ends = [get(key) for key in ("eos_token_id", "eot_token_id", "eom_token_id") if token(key) is not None]
    return tokenizer, tuple(dict.fromkeys(ends))


def _all_are(kind: type, values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(value, kind) for value in values)


def _byte_level_bpe(tokens: list[str], merges: list[str], token_types: list[int], pre: str, name: str) -> Any:
    """The `tokenizers.Tokenizer`; control tokens are special, user-defined ones are matched but shown."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    vocab = {token: i for i, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise ReanchorError(
            f"{name} has {len(tokens) - len(vocab)} tokens twice in tokenizer.ggml.tokens, expected each "
            "once; convert the file again"
        )
    try:
        # "Ġ t" merges "Ġ" and "t": a space inside a token is written "Ġ", so the one space separates.
        pairs = [(left, right) for left, right in (merge.split(" ") for merge in merges)]
        bpe = models.BPE(vocab, pairs, ignore_merges=pre == "llama-bpe")
    except Exception as error:  # the Rust library raises bare Exceptions
        raise ReanchorError(f"{name} has unusable tokenizer.ggml.merges: {error}; convert the file again") from error
    backend = Tokenizer(bpe)
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    if pre == "smollm":
        cut = pre_tokenizers.Digits(individual_digits=True)
    elif pre == "gpt-2":
        cut = None
    else:
        cut = pre_tokenizers.Split(Regex(_WORD_SPLIT.replace("DIGITS", _DIGITS[pre])), behavior="isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre not in _DIGITS)
    backend.pre_tokenizer = to_bytes if cut is None else pre_tokenizers.Sequence([cut, to_bytes])
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens(
        [
            AddedToken(token, special=kind == _CONTROL, normalized=False)
            for token, kind in zip(tokens, token_types, strict=True)
            if kind in (_CONTROL, _USER_DEFINED)
        ]
    )
    return backend
