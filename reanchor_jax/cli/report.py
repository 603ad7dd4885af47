"""Statistics of a run, for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from reanchor_jax.cli.answer import Answer, overall
from reanchor_jax.cli.check import Check

_BARS = "▁▂▃▄▅▆▇█"


def make_report(
    answers: Sequence[Answer],
    checks: Sequence[Check],
    settings: dict[str, Any],
    load_seconds: float,
    device: str,
    prompts: str = "",
) -> str:
    """A few aligned lines: what came out, how fast, and what it cost.

    Args:
      answers: of all turns; the last may be incomplete.
      checks: comparisons with plain decoding, where they were asked for.
      settings: of the run.
      load_seconds: for weights and tokenizer.
      device: what it ran on.
      prompts: how many were answered, in words; empty for a single one.
    """
    total = overall(answers)
    rounds = len(total.committed)
    per_round = f"{total.tau:.2f} tokens per round" if rounds else "no rounds"
    nodes = f"{sum(total.nodes) / rounds:.1f} nodes per round" if rounds else "no nodes"
    cut = f", {total.cut} cut by the budget" if total.cut else ""
    clipped = f", {total.clipped} beyond the end" if total.clipped else ""
    rows = [
        ("tau", f"{per_round} ({rounds} rounds, {len(total.token_ids)} tokens{clipped})"),
        ("rounds", _histogram(total.committed) if settings["method"] != "ar" else ""),
        ("nodes", f"{nodes}{cut}"),
        ("speed", f"{_speed(answers):.1f} tokens/s" if rounds else "not measured"),
        (
            "seconds",
            f"load {load_seconds:.1f}, compile {total.compile_seconds:.1f}, "
            f"prefill {total.prefill_seconds:.2f}, decode {total.decode_seconds:.2f}",
        ),
        ("method", _method(settings)),
        ("device", f"{device}, {settings['dtype']}"),
    ]
    if prompts:
        rows.insert(0, ("prompts", prompts))
    if checks:
        rows.append(("lossless", _lossless(checks)))
    return "\n".join(f"{name:9}{value}" for name, value in rows if value)


def _method(settings: dict[str, Any]) -> str:
    parts = [settings["method"]]
    if settings["method"] == "reanchor":
        parts += [f"attach {settings['attach']}", f"retain {settings['retain']}"]
        if settings["components"] != "both":
            parts.append(f"components {settings['components']}")
    if settings["method"] != "ar":
        parts.append(f"draft {settings['draft_rule']}")
    if settings["schedule"] != "none":
        parts.append(f"schedule {settings['schedule']}")
    return ", ".join([*parts, f"temperature {settings['temperature']:g}"])


def _histogram(committed: Sequence[int]) -> str:
    """`█▄ ▁ (1:30 2:12 4:3, tokens:rounds)`: 30 rounds committed 1 token, 12 rounds 2, 3 rounds 4."""
    if not committed:
        return ""
    counts = Counter(committed)
    most = max(counts.values())
    bars = "".join(
        _BARS[-(-counts[n] * len(_BARS) // most) - 1] if counts[n] else " " for n in range(1, max(counts) + 1)
    )
    return f"{bars} ({' '.join(f'{n}:{counts[n]}' for n in sorted(counts))}, tokens:rounds)"


def _lossless(checks: Sequence[Check]) -> str:
    total = sum(len(check.answer.token_ids) for check in checks)
    same = sum(
        len(check.answer.token_ids) if check.first_difference is None else check.first_difference for check in checks
    )
    yes = all(check.equal for check in checks)
    parts = [f"{'yes' if yes else 'no'} ({same} of {total} tokens equal plain decoding)"]
    if not yes:
        number, first = next((i, check) for i, check in enumerate(checks) if not check.equal)
        where = f"token {first.first_difference}" + (f" of answer {number}" if len(checks) > 1 else "")
        gap = "unknown" if first.gap is None else f"{first.gap:.3g}"
        parts.append(f"first difference at {where}, logit gap there {gap}")
    plain = _speed([check.plain for check in checks])
    if plain:
        parts.append(f"{_speed([check.answer for check in checks]) / plain:.2f} times its speed")
    return "; ".join(parts)


def _speed(answers: Sequence[Answer]) -> float:
    """Tokens per second of rounds. A turn's first token comes from prefill: it belongs to no round."""
    seconds = sum(answer.decode_seconds for answer in answers)
    return sum(max(len(answer.token_ids) - 1, 0) for answer in answers) / seconds if seconds else 0.0
