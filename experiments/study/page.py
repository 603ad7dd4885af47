"""The report: all experiments of a folder on one page, as Markdown and as HTML that needs no other file."""

from __future__ import annotations

import html
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path

from experiments.study.experiment import Experiment, describe, with_plain
from experiments.study.prompts import SYNTHETIC
from experiments.study.records import Records
from experiments.study.results import Results
from experiments.study.tables import Table
from reanchor_jax.errors import ReanchorError
from reanchor_jax.files import write_whole

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 64rem; margin: 2rem auto; padding: 0 1rem; color: #1a1a1a }
h1, h2 { line-height: 1.2 } h2 { margin-top: 3rem; border-top: 1px solid #ccc; padding-top: 1rem }
pre { background: #f4f4f4; padding: .6rem .8rem; overflow-x: auto }
div.table { overflow-x: auto } table { border-collapse: collapse; font-size: 13px; margin: 1rem 0 }
th, td { padding: .25rem .6rem; text-align: left; vertical-align: top; border-bottom: 1px solid #e4e4e4 }
th { border-bottom: 1.5px solid #1a1a1a } .note, .source, figcaption { color: #555; font-size: 13px }
.finding { border-left: 3px solid #d1662f; padding-left: .8rem } figure { margin: 1rem 0 }
figure svg { width: 100%; max-width: 44rem; height: auto }
@media print { h2 { break-before: auto } table, figure { break-inside: avoid } }
"""


def write_report(experiments: Sequence[Experiment], folder: Path) -> list[Path]:
    """Writes every experiment that has records anew, and the two pages.

    Raises:
      ReanchorError: no records, or findings that cannot be read.
    """
    records = Records(folder)
    findings = _findings(folder / "findings.toml")
    study, settings = records.study, with_plain([s for each in experiments for s in each.settings(records.study)])
    title = f"Experiments on {study.pair}"
    head = [describe(Results(records, study, [settings[0]])), _lossless(records), _made(records)]
    head += [findings["summary"]] if "summary" in findings else []
    command = command_of(records)
    markdown = [f"# {title}\n", f"```\n{command}\n```\n", *(f"{line}\n" for line in head)]
    page = [f"<h1>{html.escape(title)}</h1>", f"<pre>{html.escape(command)}</pre>"]
    page += [f"<p>{html.escape(line)}</p>" for line in head]
    for experiment in experiments:
        parts = experiment.write(records, folder)
        if not parts:
            continue
        markdown += [f"## {experiment.title}\n", f"{experiment.source}\n"]
        page += [f"<h2>{html.escape(experiment.title)}</h2>", f"<p class=source>{html.escape(experiment.source)}</p>"]
        if experiment.name in findings:
            markdown.append(f"**{findings[experiment.name]}**\n")
            page.append(f"<p class=finding>{html.escape(findings[experiment.name])}</p>")
        for part in parts[:-1]:  # the last is the lossless table, which the head sums up
            if isinstance(part, Table):
                markdown.append(part.markdown())
                page.append(f"<div class=table>{part.html()}</div>")
            elif (folder / f"{part.stem}.svg").exists():
                markdown.append(f"![{part.caption}]({part.stem}.svg)\n\n{part.caption}\n")
                picture = _inline(folder / f"{part.stem}.svg", part.stem)
                page.append(f"<figure>{picture}<figcaption>{html.escape(part.caption)}</figcaption></figure>")
    paths = [folder / "report.md", folder / "report.html"]
    write_whole(paths[0], "\n".join(markdown))
    document = f"<!doctype html>\n<html lang=en><meta charset=utf-8><title>{html.escape(title)}</title>"
    write_whole(paths[1], f"{document}<style>{_STYLE}</style>\n<body>\n" + "\n".join(page) + "\n</body></html>\n")
    return paths


def command_of(records: Records) -> str:
    """The command that decodes what the records hold, with names in place of paths.

    `--max-prompt` is the longest prompt's length. It takes the same prompts as the limit of the run:
    what that left out is longer still.
    """
    study, rows = records.study, {(record["dataset"], record["row"]) for record in records}
    datasets = list(dict.fromkeys(record["dataset"] for record in records))
    places = "synthetic" if datasets == [SYNTHETIC] else f"PROMPTS --datasets {' '.join(datasets)}"
    flags = {
        "--samples": max(sum(dataset == name for dataset, _ in rows) for name in datasets),
        "--seed": study.seed,
        "--max-prompt": max(record["prompt_tokens"] for record in records),
        "--max-new-tokens": study.max_new_tokens,
        "--nodes": study.nodes,
        "--dtype": study.dtype,
        "--variants": " ".join(f"{name}=DRAFTER" for name in study.variants) or None,
    }
    thinking = "" if study.thinking is None else " --thinking" if study.thinking else " --no-thinking"
    given = " ".join(f"{name} {value}" for name, value in flags.items() if value is not None)
    return f"python -m experiments.all --pair {study.pair} --prompts {places} \\\n  {given}{thinking} --out OUT"


def _lossless(records: Records) -> str:
    checked = [record for record in records if not record["setting"].startswith("method=ar")]
    same = sum(record["equal"] for record in checked)
    settings = len({record["setting"] for record in checked})
    return f"Lossless: {same} of {len(checked)} answers in {settings} settings equal plain decoding, token for token."


def _made(records: Records) -> str:
    made = [record["made"] for record in records]
    commits = ", ".join(dict.fromkeys(each["commit"] for each in made))
    versions = dict.fromkeys(", ".join(f"{k} {v}" for k, v in each["versions"].items()) for each in made)
    compiling = [seconds for record in records if (seconds := record.get("compile_seconds", 0))]
    return (
        f"Made by commit {commits}; {'; '.join(versions)}. Compilation ({sum(compiling):.0f} s for {len(compiling)} "
        "programs) and prefill are not in any time."
    )


def _findings(path: Path) -> dict[str, str]:
    if not path.exists():
        return {}
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ReanchorError(f'{path} is no TOML: {error}; expected NAME = "sentence" lines') from None


def _inline(path: Path, stem: str) -> str:
    """An SVG as an element, its ids made the page's own: two pictures share names for their clips and markers."""
    text = path.read_text(encoding="utf-8")
    text = text[text.index("<svg") :]
    return re.sub(r'(\bid="|"#|url\(#)', lambda found: found[0] + stem + "-", text)
