"""Flags: what a run is asked to do. Everything that needs no file is checked here."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from reanchor_jax import __version__
from reanchor_jax.cli.flags import Parser, number, whole
from reanchor_jax.config import AttachRule, Components, DecodeConfig, DraftRule, Method, RetainRule, Schedule
from reanchor_jax.default_pair import DEFAULT_PAIR
from reanchor_jax.errors import ReanchorError
from reanchor_jax.profile import load_profile, profile_text
from reanchor_jax.tokenizer import check_text

_EPILOG = """\
A line of --prompts is an object with `prompt` (a text), `turns` (the user's texts: all are answered in
order, each behind the conversation so far) or `prompt_ids`. Results hold the settings; with `turns`,
their fields are those of the last turn and `turns` has those of every one.

exit codes: 0 done; 1 --check found other ids than plain decoding; 2 bad input, one line on stderr;
130 interrupted (Ctrl-C), with the statistics so far; 141 the reader of the output went away.

The key of a prompt is fold_in(key(--seed), its index in the file), 0 for PROMPT.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """One command line, checked as far as it can be without files and devices."""

    prompt: str | None
    prompts: Path | None
    target: str
    drafter: str | None
    """None: method `ar`, which needs none."""
    revision: str | None
    dtype: str | None
    """None: float32 on CPU, bfloat16 on accelerators."""
    decode: DecodeConfig
    profile: Path | None
    """What verification costs; None: with schedule `hardware`, the device's roofline."""
    max_new_tokens: int
    max_len: int | None
    seed: int
    stop: tuple[str, ...]
    ignore_eos: bool
    system: str | None
    chat_template: bool
    thinking: bool | None
    output: Path | None
    resume: bool
    json: bool
    check: bool
    trace: Path | None
    compile_cache: bool

    def settings(self) -> dict[str, Any]:
        """All that decides a result beside the prompts, for records and for `--resume`."""
        aside = ("prompt", "prompts", "decode", "output", "resume", "json", "trace", "compile_cache")
        own = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name not in aside}
        own |= {"stop": list(self.stop), "profile": None}
        if self.profile is not None:
            own["profile"] = json.loads(profile_text(load_profile(self.profile)))  # as a record will hold it
        decode = dataclasses.asdict(self.decode)
        del decode["costs"]  # they follow from the profile
        return {**own, **decode}


def parse(argv: Sequence[str] | None) -> Options:
    """Options of a command line; None takes that of this process.

    Raises:
      ReanchorError: an unknown flag, a value outside its range, flags that exclude each other.
      SystemExit: after `--help` and `--version`, with code 0.
    """
    flags = vars(_parser().parse_args(argv))
    decode = DecodeConfig(**{field: flags.pop(field) for field in DecodeConfig.__dataclass_fields__ if field in flags})
    # These two are held against the drafter's block size once that is known.
    dataclasses.replace(decode, offsets=None, nodes=None).validate(block_size=2)
    if decode.schedule != "hardware" and flags["profile"] is not None:
        raise ReanchorError(f"--profile is of --schedule hardware; expected that, not {decode.schedule}")
    if decode.schedule != "threshold" and decode.confidence_threshold != DecodeConfig().confidence_threshold:
        raise ReanchorError(f"--confidence-threshold is of --schedule threshold; expected that, not {decode.schedule}")
    if decode.schedule != "none" and decode.method == "ar":
        raise ReanchorError(f"--schedule {decode.schedule} cuts drafts; expected no such flag with --method ar")
    if decode.method == "ar":
        flags["drafter"] = None
    elif flags["drafter"] is None:
        if flags["target"] != DEFAULT_PAIR:
            raise ReanchorError(
                f"--method {decode.method} needs a drafter; name one for {flags['target']} with --drafter, "
                "or take --method ar"
            )
        flags["drafter"] = DEFAULT_PAIR
    flags["stop"] = tuple(flags["stop"])
    options = Options(decode=decode, **flags)
    _check_together(options)
    return options


def _check_together(options: Options) -> None:
    if (options.prompt is None) == (options.prompts is None):
        raise ReanchorError("expected either a PROMPT or --prompts FILE.jsonl; give one of them")
    if options.prompt is not None and not options.prompt.strip():
        raise ReanchorError("the prompt is empty; expected some text")
    texts = [("the prompt", options.prompt), ("--system", options.system), *(("--stop", stop) for stop in options.stop)]
    for what, text in texts:
        check_text(text or "", what)
    if options.resume and options.output is None:
        raise ReanchorError("--resume continues a file of results; name it with --output")
    if options.resume and options.trace is not None:
        raise ReanchorError("--resume would leave a trace without the earlier rounds; trace a run from its start")
    _check_files(options)
    if "" in options.stop:
        raise ReanchorError("--stop is empty; expected some text")
    if not options.chat_template and options.system is not None:
        raise ReanchorError("--system needs the chat template; expected no --no-chat-template with it")
    if not options.chat_template and options.thinking is not None:
        raise ReanchorError("--thinking needs the chat template; expected no --no-chat-template with it")
    if options.max_len is not None and options.max_len <= options.max_new_tokens:
        raise ReanchorError(
            f"--max-len {options.max_len} leaves no room for a prompt beside --max-new-tokens "
            f"{options.max_new_tokens}; expected more than that"
        )


def _check_files(options: Options) -> None:
    """No file is two of --prompts, --output and --trace: the last one written would replace the others."""
    flags = {"--prompts": options.prompts, "--output": options.output, "--trace": options.trace}
    flag_of: dict[str, str] = {}
    for flag, path in flags.items():
        if path is None:
            continue
        other = flag_of.setdefault(os.path.realpath(path), flag)
        if other != flag:
            raise ReanchorError(f"{flag} {path} is the file of {other} too; name another file")


def _parser() -> argparse.ArgumentParser:
    defaults = DecodeConfig()
    parser = Parser(
        prog="python -m reanchor_jax.generate",
        description="Generates text by ReAnchor speculative decoding, and reports what it cost.",
        epilog=_EPILOG,
    )
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help="text to answer or continue")
    parser.add_argument("--version", action="version", version=f"reanchor-jax {__version__}")

    add = parser.add_argument_group("models").add_argument
    add("--target", default=DEFAULT_PAIR, metavar="SOURCE", help="hub id, folder, GGUF file or %(default)s (default)")
    add("--drafter", metavar="SOURCE", help=f"hub id, folder or {DEFAULT_PAIR}; default: that of the default target")
    add("--revision", metavar="REV", help="hub revision of target and drafter")
    add("--dtype", choices=("float32", "bfloat16"), help="default: float32 on CPU, bfloat16 on accelerators")

    add = parser.add_argument_group("decoding").add_argument
    add("--method", choices=get_args(Method), default=defaults.method, help=_default("ar is plain decoding"))
    add("--max-new-tokens", type=whole(0), default=256, metavar="N", help=_default("tokens to generate at most"))
    add("--temperature", type=number, default=defaults.temperature, metavar="T", help=_default("0: the top token"))
    add("--top-k", type=whole(0, 2**31 - 1), default=defaults.top_k, metavar="K", help=_default("0: all tokens"))
    add("--top-p", type=number, default=defaults.top_p, metavar="P", help=_default("1: all tokens"))
    add("--min-p", type=number, default=defaults.min_p, metavar="P", help=_default("0: all tokens"))
    add("--seed", type=whole(0, 2**32 - 1), default=0, metavar="N", help=_default("of all randomness"))
    add("--stop", action="append", default=[], metavar="TEXT", help="end before this text; may be repeated")
    add("--ignore-eos", action="store_true", help="go on after end-of-text tokens")
    add("--max-len", type=whole(2), metavar="N", help="one cache size for all prompts: prompt and new tokens together")

    add = parser.add_argument_group("speculation (never changes which text comes out, only how fast)").add_argument
    rule_help = "how drafts are chosen; sample and coupled draw at temperature 0 too"
    add("--draft-rule", choices=get_args(DraftRule), default=defaults.draft_rule, help=_default(rule_help))
    add(
        "--draft-temperature", type=number, metavar="T", help="of sample and coupled; default: --temperature, or 1 at 0"
    )
    add("--attach", choices=get_args(AttachRule), default=defaults.attach, help=_default("where blocks attach"))
    add("--retain", choices=get_args(RetainRule), default=defaults.retain, help=_default("which states are kept"))
    components_help = "what attached blocks may change: the baseline block, what lies beyond it, or both"
    add("--components", choices=get_args(Components), default=defaults.components, help=_default(components_help))
    add("--offsets", type=whole(0), metavar="D", help="shifted blocks a round; default: block size - 1")
    add("--nodes", type=whole(1), metavar="N", help="node budget of the trie; default: 4 times the block size")
    schedule_help = "cut blocks where a drafter's confidence says so"
    add("--schedule", choices=get_args(Schedule), default=defaults.schedule, help=_default(schedule_help))
    threshold_help = "schedule threshold: least confidence of a draft"
    threshold = defaults.confidence_threshold
    add("--confidence-threshold", type=number, default=threshold, metavar="P", help=_default(threshold_help))
    profile_help = "schedule hardware: costs, measured by reanchor_jax.profile; default: an accelerator's roofline"
    add("--profile", type=Path, metavar="FILE", help=profile_help)

    add = parser.add_argument_group("prompts").add_argument
    add("--prompts", type=Path, metavar="FILE", help="JSONL: `prompt`, `turns` or `prompt_ids` in every line")
    add("--system", metavar="TEXT", help="system prompt; default: the chat template's")
    add("--no-chat-template", dest="chat_template", action="store_false", help="continue the plain text")
    add("--thinking", action=argparse.BooleanOptionalAction, help="switch of the chat template, where it has one")

    add = parser.add_argument_group("results").add_argument
    add("--output", type=Path, metavar="FILE", help="JSONL: one result a line, written as they come")
    add("--resume", action="store_true", help="go on with an --output that was interrupted")
    add("--json", action="store_true", help="print JSON, one result a line, and nothing else")
    logprobs_help = "log-probabilities of every token, and of the top K (default 0); PROMPT stands before it"
    add("--logprobs", type=whole(0), nargs="?", const=0, metavar="K", help=logprobs_help)
    add("--check", action="store_true", help="decode plainly too; compare ids and speed")
    add("--trace", type=Path, metavar="FILE", help="JSONL of every round: blocks, sites, trie, path (replaces FILE)")
    add("--no-compile-cache", dest="compile_cache", action="store_false", help="keep no compiled programs on disk")
    return parser


def _default(text: str) -> str:
    return f"{text} (default %(default)s)"
