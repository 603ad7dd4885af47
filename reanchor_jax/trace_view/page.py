"""One HTML file that needs nothing beside itself and takes nothing in a trace for markup or script."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from importlib import resources
from typing import Any

from reanchor_jax.trace_view.origin import (
    ORIGINS,
    Origin,
    count_origins,
    node_origins,
    retained_nodes,
    sequence_origins,
)
from reanchor_jax.trace_view.read import TraceFile
from reanchor_jax.trace_view.records import Round, Sequence

_SCRIPTS = ("text.js", "trie.js", "page.js")
_SHOWN_SETTINGS = ("method", "attach", "retain", "offsets", "nodes", "draft_rule", "temperature", "schedule", "seed")


def make_page(trace: TraceFile, name: str) -> str:
    """The page's text.

    All that a trace holds goes into JSON, of which the page's script makes text nodes. JSON stands in
    blocks that no browser runs, in ASCII and without `<`: nothing in it ends a block. The policy lets
    the page's own script and style in, by their hashes, and nothing else: no request, no form.

    Args:
      trace: what to show.
      name: of its file.
    """
    style, script = _file("page.css"), "\n".join(['"use strict";', "{", *map(_file, _SCRIPTS), "}"])
    policy = f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; base-uri 'none'"
    data = {"overview": overview(trace, name), "pieces": {str(k): v for k, v in (trace.pieces or {}).items()}}
    data |= {f"text-{n}": sequence_data(trace, sequence) for n, sequence in enumerate(trace.sequences)}
    parts = {
        "policy": f"{policy}; form-action 'none'",
        "style": style,
        "script": script,
        # A block for each text: a browser reads the one that is looked at.
        "data": "\n".join(f'<script type="application/json" id="{i}">{_json(v)}</script>' for i, v in data.items()),
    }
    # In one pass: what is put in is not looked at again.
    return re.sub(r"@@(\w+)@@", lambda match: parts[match[1]], _file("page.html"))


def overview(trace: TraceFile, name: str) -> dict[str, Any]:
    """The whole trace in numbers."""
    texts = []
    for sequence in trace.sequences:
        words = "".join((trace.pieces or {}).get(token, "") for token in sequence.tokens[:40])
        texts.append(
            {
                "index": sequence.index,
                "turn": sequence.turn,
                "words": " ".join(words.split())[:60],
                **statistics([sequence]),
            }
        )
    settings = [f"{key} {trace.settings[key]}" for key in _SHOWN_SETTINGS if trace.settings.get(key) is not None]
    models = [str(trace.settings.get(key)) for key in ("target", "drafter") if trace.settings.get(key)]
    return {
        "name": name,
        "settings": ", ".join([" with ".join(models), *settings]),
        "notices": trace.notices,
        "texts": texts,
        "all": statistics(trace.sequences),
    }


def statistics(sequences: list[Sequence]) -> dict[str, Any]:
    """Counts of some texts; tau as the command line reports it, the last rounds in full."""
    rounds = [entry for sequence in sequences for entry in sequence.rounds]
    committed = sum(len(entry.path) for entry in rounds)
    origins: list[Origin] = [origin for sequence in sequences for origin in sequence_origins(sequence)]
    first = sum(bool(sequence.tokens) for sequence in sequences)
    return {
        "tokens": len(origins),
        "rounds": len(rounds),
        "tau": committed / len(rounds) if rounds else 0.0,
        "clipped": first + committed - len(origins),
        "nodes": sum(len(entry.trie.tokens) for entry in rounds),
        "cut": sum(entry.cut for entry in rounds),
        "origins": count_origins(origins),
    }


def sequence_data(trace: TraceFile, sequence: Sequence) -> dict[str, Any]:
    """A text with its rounds; origins as their first letters."""
    return {
        "prompt": sequence.prompt_ids,
        "tokens": sequence.tokens,
        "origins": _letters(sequence_origins(sequence)),
        "end": sequence.finish_reason,
        "rounds": [_round_data(trace, entry) for entry in sequence.rounds],
    }


def _round_data(trace: TraceFile, entry: Round) -> dict[str, Any]:
    return {
        "start": entry.start,
        "anchor": entry.anchor,
        "drafted": [block._asdict() for block in entry.blocks],
        "trie": entry.trie._asdict(),
        "origins": _letters(node_origins(entry)),
        "path": entry.path,
        "clipped": entry.clipped,
        "cut": entry.cut,
        "retained": retained_nodes(entry, trace.settings.get("retain"))[: entry.retained],
    }


def _letters(origins: list[Origin]) -> str:
    assert len({origin[0] for origin in ORIGINS}) == len(ORIGINS)
    return "".join(origin[0] for origin in origins)


def _json(value: Any) -> str:
    """JSON in ASCII; `<`, `>` and `&` only as escapes."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _file(name: str) -> str:
    # As bytes: the hash is that of the text with the line ends it is written with, which are LF.
    return resources.files(__package__ or "").joinpath(name).read_bytes().decode("utf-8").replace("\r\n", "\n")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
