"""A trace as a page: where tokens came from, what the page holds, what is refused."""

from __future__ import annotations

import base64
import copy
import hashlib
import html.parser
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from reanchor_jax.cli.trace import Trace
from reanchor_jax.config import DecodeConfig
from reanchor_jax.loop import generate
from reanchor_jax.tokenizer import load_tokenizer
from reanchor_jax.trace_view.main import main
from reanchor_jax.trace_view.origin import node_origins, retained_nodes, sequence_origins
from reanchor_jax.trace_view.page import make_page
from reanchor_jax.trace_view.read import read_trace
from tests import trace_files
from tests.cli_pair import BLOCK_SIZE, VOCAB_SIZE, call, folders_and_cache
from tests.tiny import mix, plain_table, scripted

HAND = ["target", "baseline", "refinement", "refinement", "extension", "target", "baseline"]


class Page(html.parser.HTMLParser):
    """What a browser's parser finds: elements with attributes, and the text of scripts and styles."""

    def __init__(self, text: str):
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.contents: dict[str, list[str]] = {"script": [], "style": []}
        self.data: dict[str, Any] = {}
        self._open: tuple[str, dict[str, str | None]] | None = None
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self._open = self.elements[-1] if tag in self.contents else None

    def handle_data(self, data):
        if self._open is None:
            return
        tag, attributes = self._open
        if attributes.get("type") == "application/json":
            self.data[str(attributes["id"])] = json.loads(data)
        else:
            self.contents[tag].append(data)

    def handle_endtag(self, tag):
        self._open = None


def page_of(path: Path) -> Page:
    return Page(make_page(read_trace(path), path.name))


@pytest.fixture
def hand(tmp_path) -> Path:
    return trace_files.write(tmp_path / "hand.jsonl", trace_files.hand_trace())


def test_origins_of_a_round_computed_by_hand(hand):
    (sequence,) = read_trace(hand).sequences
    assert sequence.tokens == (10, 11, 14, 15, 16, 17, 20)
    assert sequence_origins(sequence) == HAND
    assert node_origins(sequence.rounds[0]) == [
        "target", "baseline", "baseline", "baseline", "refinement", "refinement", "extension",
    ]  # fmt: skip
    data = page_of(hand).data
    assert data["text-0"]["origins"] == "tbrretb"
    assert data["overview"]["all"]["origins"] == {"baseline": 2, "refinement": 2, "extension": 1, "target": 2}
    assert data["overview"]["all"]["tau"] == 3.5 and data["overview"]["all"]["clipped"] == 1


def test_a_schedules_cut_ends_the_baseline_block(tmp_path):
    """g(0) cut behind `10 11`: what g(1) drafts at depths 2, 3 and 4 lies beyond its end."""
    lines = trace_files.hand_trace()
    lines[2]["blocks"][0]["length"] = 2
    lines[2]["trie"] = {
        "tokens": [10, 11, 14, 15, 16],
        "parents": [-1, 0, 1, 2, 3],
        "depths": [0, 1, 2, 3, 4],
        "blocks": [0, 0, 1, 1, 1],
        "target_tokens": [11, 14, 15, 16, 17],
    }
    lines[2]["path"] = [0, 1, 2, 3, 4]
    (sequence,) = read_trace(trace_files.write(tmp_path / "t", lines)).sequences
    assert sequence_origins(sequence) == [*HAND[:2], "extension", "extension", *HAND[4:]]


def test_retained_states_computed_by_hand(hand):
    """Stopped behind `10 11`: the baseline keeps 12 13; the longest path is g(1)'s, which keeps 14 15 16."""
    lines = trace_files.hand_trace()
    lines[2]["trie"]["target_tokens"][1] = 50
    lines[2] |= {"path": [0, 1], "accepted": 1, "committed": 2}
    for rule, nodes in (("baseline", [2, 3]), ("accepted_path", [4, 5, 6])):
        lines[0]["settings"]["retain"] = rule
        lines[2]["retained"] = len(nodes)
        trace = read_trace(trace_files.write(hand, lines[:3]))
        assert retained_nodes(trace.sequences[0].rounds[0], rule) == nodes
        assert page_of(hand).data["text-0"]["rounds"][0]["retained"] == nodes


def test_methods_without_shifted_blocks_retain_nothing(tmp_path):
    """`dflash` drafts the baseline block alone; `ar` nothing at all."""
    chain = trace_files.hand_rounds()[1] | {"start": 1, "anchor": 3, "retained": 0}
    step = {
        **chain,
        "blocks": [{"offset": 0, "tokens": [17], "length": 1, "site": 0}],
        "trie": {"tokens": [17], "parents": [-1], "depths": [0], "blocks": [0], "target_tokens": [20]},
        "path": [0],
        "accepted": 0,
        "committed": 1,
        "clipped": 0,
    }
    for method, entry, origins in (("dflash", chain, "tb"), ("ar", step, "tt")):
        lines = [trace_files.run_line(method=method), trace_files.prompt_line(), entry]
        data = page_of(trace_files.write(tmp_path / method, lines)).data["text-0"]
        assert data["origins"] == origins and data["rounds"][0]["retained"] == []


def test_a_text_cut_by_a_stop_string_has_origins_for_what_is_left(tmp_path):
    lines = trace_files.hand_trace()
    lines[4]["token_ids"] = lines[4]["token_ids"][:4]
    (sequence,) = read_trace(trace_files.write(tmp_path / "t", lines)).sequences
    assert sequence_origins(sequence) == HAND[:4]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    with folders_and_cache(tmp_path_factory.getbasetemp() / "cli_pair") as folders:
        yield folders


def origin_by_blocks(entry: dict[str, Any], depth: int) -> str:
    """Where the accepted draft at a depth came from, by the blocks alone: who drafted these tokens up to there?"""
    accepted = [entry["trie"]["tokens"][node] for node in entry["path"]][: depth + 1]
    baseline, *shifted = entry["blocks"]
    if baseline["tokens"][: baseline["length"]][: depth + 1] == accepted:
        return "baseline"
    paths = [baseline["tokens"][: block["site"]] + block["tokens"] for block in shifted if block["site"] is not None]
    assert any(path[: depth + 1] == accepted for path in paths)
    return "refinement" if depth < BLOCK_SIZE else "extension"


@pytest.mark.parametrize("drafts", ["scripted", "drafted"])
def test_every_token_of_a_run_has_one_origin_and_counts_are_the_runs(folders, capsys, tmp_path, drafts):
    """Scripted: the baseline block is right for one draft, shifted blocks for all. Drafted: by a random drafter."""
    prompts, path, new = tmp_path / "prompts.jsonl", tmp_path / "trace.jsonl", 16
    prompts.write_text('{"prompt": "Say hi."}\n{"turns": ["Say </script>.", "Again, \\u202e!"]}\n')
    flags = ["--prompts", prompts, "--max-new-tokens", new, "--json", "--trace", path]
    script = None
    if drafts == "scripted":
        tokenizer = load_tokenizer(folders.target)
        assert tokenizer is not None
        ids = tokenizer.encode_chat([{"role": "user", "content": "Say hi."}])
        tokens = jax.jit(lambda: generate(
            folders.pair, jnp.array(ids), jnp.int32(len(ids)), key=jax.random.key(0),
            config=DecodeConfig(method="ar"), max_new_tokens=new,
        ).tokens)()  # fmt: skip
        script = mix(plain_table(jnp.array(ids), jnp.int32(len(ids)), tokens), right=1, shifted=BLOCK_SIZE, lucky=True)
        flags += ["--attach", "fixed_unmatched", "--retain", "baseline"]
    else:
        flags += ["--attach", "fallback", "--temperature", 1, "--draft-rule", "coupled", "--ignore-eos"]
    with scripted(script, VOCAB_SIZE):
        records = call(capsys, *folders.flags, *flags).records
    turns = [turn for record in records for turn in record.get("turns", [record])]
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    rounds = iter([line for line in lines if line["kind"] == "round"])

    data = page_of(path).data
    texts = data["overview"]["texts"]
    assert len(turns) == len(texts) == 3
    for number, (turn, text) in enumerate(zip(turns, texts, strict=True)):
        shown = data[f"text-{number}"]
        assert shown["tokens"] == turn["token_ids"] and len(shown["origins"]) == len(turn["token_ids"])
        assert sum(text["origins"].values()) == text["tokens"] == len(turn["token_ids"])
        assert text["tau"] == pytest.approx(turn["tau"]) and text["rounds"] == turn["rounds"]
        assert text["nodes"] == sum(turn["nodes_per_round"]) and text["cut"] == turn["cut_nodes"]
        assert text["clipped"] == turn["clipped_tokens"]
        expected = ["target"]
        for entry, accepted in zip((next(rounds) for _ in shown["rounds"]), turn["accepted_drafts_per_round"],
                                   strict=True):  # fmt: skip
            expected += [origin_by_blocks(entry, depth) for depth in range(1, accepted + 1)] + ["target"]
        assert shown["origins"] == "".join(origin[0] for origin in expected)[: len(turn["token_ids"])]
    assert next(rounds, None) is None
    for name, count in data["overview"]["all"]["origins"].items():
        assert count == sum(text["origins"][name] for text in texts)
        assert count > 0 or drafts == "drafted"


def test_pieces_keep_the_space_that_a_decoder_drops_at_the_start(tmp_path):
    class Decoder:
        def decode(self, ids):
            return "".join({5: " a", 6: "b"}[i] for i in ids).removeprefix(" ")

    trace = Trace(tmp_path / "t", {}, Decoder())  # type: ignore[arg-type]
    trace.begin(0, 0, [5, 6])
    trace.close()
    assert json.loads((tmp_path / "t").read_text().splitlines()[-1])["pieces"] == {"5": " a", "6": "b"}


HOSTILE = [
    "</script><script>alert(1)</script>", "<!--<script>", "]]>", "<img src=x onerror=alert(1)>", "\u202eabc", "\ud800",
    "\0\x07\x1b[31m", "\n\r\n\u2028", "שלום", "@@data@@ @@script@@ \\1", "&lt;b&gt;", "', \"",
    "\U0001f469\u200d\U0001f680",
]  # fmt: skip


def hostile_trace(path: Path) -> Path:
    """The trace by hand, with texts that would do harm as markup, script, JSON or template."""
    lines = trace_files.hand_trace()
    ids = [10, 11, 14, 15, 16, 17, 20, 12, 13, 21, 22, 1, 2]
    lines[-1]["pieces"] |= dict(zip(map(str, ids), HOSTILE, strict=True))
    lines[0]["settings"] |= {"target": HOSTILE[0], "drafter": "\ud800", "temperature": float("nan")}
    lines[4]["finish_reason"] = HOSTILE[3]
    return trace_files.write(path, lines)


def test_nothing_of_a_trace_becomes_markup_or_script(tmp_path, hand):
    path = hostile_trace(tmp_path / "<b>@@data@@.jsonl")
    text = make_page(read_trace(path), path.name)
    page, tame = Page(text), page_of(hand)
    assert page.elements == tame.elements and page.contents == tame.contents
    assert [page.data["pieces"][i] for i in ("10", "11", "14", "15", "16", "17", "20")] == HOSTILE[:7]
    assert page.data["overview"]["name"] == path.name and page.data["text-0"]["end"] == HOSTILE[3]
    (blocks,) = re.findall(r'(?s)(<script type="application/json".*</script>)\s*<script>', text)
    assert blocks.isascii() and blocks.count("<") == 2 * len(page.data) and "\u2028" not in text


def test_the_page_stands_alone_under_a_policy_of_hashes(hand):
    page = page_of(hand)
    for tag, attributes in page.elements:
        assert not {"src", "href", "srcset", "action", "style"} & attributes.keys(), tag
        assert not any(name.startswith("on") for name in attributes), tag
        assert tag not in ("link", "img", "iframe", "object", "embed", "base", "form")
    written = "".join(text for texts in page.contents.values() for text in texts)
    assert not re.search(r"@import|url\(|https?://(?!www\.w3\.org/2000/svg)", written)  # that one is a name
    (policy,) = [a["content"] for _, a in page.elements if a.get("http-equiv") == "Content-Security-Policy"]
    rules = dict(rule.strip().split(" ", 1) for rule in str(policy).split(";"))
    assert rules["default-src"] == rules["base-uri"] == rules["form-action"] == "'none'"
    for tag in ("script", "style"):
        (content,) = page.contents[tag]
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert rules[f"{tag}-src"] == f"'sha256-{digest}'"


def show(capsys, *argv: Any) -> tuple[int, str, str]:
    code = main([str(argument) for argument in argv])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_the_command_writes_the_page(hand, tmp_path, capsys):
    out = tmp_path / "out.html"
    assert show(capsys, hand, "--html", out) == (
        0, f"{out}: 1 text, 2 rounds, 7 tokens (2 baseline, 2 refinement, 1 extension, 2 target)\n", "",
    )  # fmt: skip
    assert Page(out.read_text(encoding="utf-8")).data == page_of(hand).data
    command = [sys.executable, "-m", "reanchor_jax.trace", hand, "--html", out]
    assert subprocess.run(command, capture_output=True).returncode == 0


@pytest.mark.parametrize("lines", [1, 2, 3, 4, 5])
def test_an_interrupted_trace_is_shown_as_far_as_it_goes(hand, tmp_path, capsys, lines):
    content = hand.read_bytes().splitlines(keepends=True)
    hand.write_bytes(b"".join(content[:lines]) + content[lines][: len(content[lines]) // 2])
    code, _, err = show(capsys, hand, "--html", tmp_path / "out.html")
    data = Page((tmp_path / "out.html").read_text()).data
    assert code == 0 and f"note: The file ends within line {lines + 1}:" in err
    assert ("the last text is as far as it came" in err) == (1 < lines < 5)
    assert data["overview"]["notices"] == [line.removeprefix("note: ") for line in err.splitlines()]
    tokens = [[], [], [10, 11, 14, 15, 16, 17], trace_files.hand_trace()[4]["token_ids"]]
    if lines > 1:
        assert data["text-0"]["tokens"] == tokens[min(lines - 1, 3)] and data["pieces"] == {}


def test_a_run_stopped_by_hand_leaves_its_last_text_without_an_end(hand):
    lines = trace_files.hand_trace()
    trace = read_trace(trace_files.write(hand, [*lines[:4], lines[5]]))
    assert trace.notices == ["The run was interrupted: the last text is as far as it came."]
    assert sequence_origins(trace.sequences[0]) == HAND and page_of(hand).data["text-0"]["end"] is None


def test_a_missing_last_line_break_is_no_damage(hand):
    hand.write_bytes(hand.read_bytes().rstrip(b"\n"))
    assert read_trace(hand).notices == []


def changed(*where: Any) -> list[dict[str, Any]]:
    """The trace by hand with one value put in a place."""
    *keys, last, value = where
    lines: Any = copy.deepcopy(trace_files.hand_trace())
    entry = lines
    for key in keys:
        entry = entry[key]
    entry[last] = value
    return lines


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (changed(0, "kind", "other"), "is not a trace"),
        (changed(0, "format", 2), ":1: format is 2; expected 1"),
        (changed(0, "settings", []), ":1: settings is []"),
        (changed(1, "kind", "chapter"), ":2: kind is 'chapter'; expected prompt"),
        (changed(1, "prompt_ids", ["x"]), ":2: an entry of prompt_ids is 'x'"),
        (changed(2, "start", 2), ":3: start is 2; expected an integer from 1 to 1"),
        (changed(2, "anchor", 9), ":3: anchor is 9"),
        (changed(2, "blocks", []), ":3: blocks is []"),
        (changed(2, "blocks", 0, "offset", 1), "block 0: offset is 1"),
        (changed(2, "blocks", 1, "offset", 0), "block 1: offset is 0"),
        (changed(2, "blocks", 1, "tokens", [11]), "block 1: tokens is [11]"),
        (changed(2, "blocks", 1, "site", 4), "block 1: site is 4"),
        (changed(2, "blocks", 0, "site", None), "block 0: site is None"),
        (changed(2, "trie", "tokens", []), "trie: tokens is []"),
        (changed(2, "trie", "parents", 3, 5), "the parent of node 3 is 5"),
        (changed(2, "trie", "parents", 3, -1), "the parent of node 3 is -1"),
        (changed(2, "trie", "depths", 3, 9), "the parent of node 3 is 2"),
        (changed(2, "trie", "blocks", 4, 2), "the block of node 4 is 2"),
        (changed(2, "trie", "blocks", 4, 0), "trie: blocks is [0, 0, 0, 0, 0, 1, 1]"),
        (changed(2, "blocks", 0, "tokens", 3, 77), "expected [0, 0, 0, None, 1, 1, 1], by the blocks"),
        (changed(2, "trie", "target_tokens", 4, 7), ":3: path is [0, 1, 4, 5, 6]"),
        (changed(2, "path", []), ":3: path is []"),
        (changed(2, "path", [0, 99]), "an entry of path is 99"),
        (changed(2, "committed", 4), ":3: committed is 4"),
        (changed(2, "retained", 1), ":3: retained is 1; expected 0"),
        (changed(2, "cut", True), ":3: cut is True"),
        (changed(3, "trie", "tokens", 0, 18), "node 0"),
        (changed(4, "token_ids", 3, 9), ":5: token_ids is [10, 11, 14, 9"),
        (changed(4, "token_ids", [10] * 99), ":5: token_ids"),
        (changed(5, "pieces", "9" * 5000, "x"), ":6: pieces"),
        (changed(5, "pieces", "10", 3), ":6: pieces"),
        ([*trace_files.hand_trace(), trace_files.prompt_line()], ":7 stands behind the pieces"),
        ([trace_files.run_line(), *trace_files.hand_rounds()], ":2: kind is 'round'"),
    ],
)
def test_a_damaged_line_is_named_and_nothing_written(tmp_path, capsys, lines, message):
    path, out = trace_files.write(tmp_path / "t.jsonl", lines), tmp_path / "out.html"
    out.write_text("earlier")
    code, printed, err = show(capsys, path, "--html", out)
    assert code == 2 and printed == "" and err.startswith("error: ") and err.count("\n") == 1
    assert message in err, err
    assert out.read_text() == "earlier" and sorted(os.listdir(tmp_path)) == ["out.html", "t.jsonl"]


@pytest.mark.parametrize("content", [b"", b"\n", b"text\n", b'{"kind": "ru', b"[1]\n", b"\xff\xfe\n", b"[" * 100_000])
def test_what_is_no_trace_is_refused(tmp_path, capsys, content):
    (tmp_path / "t").write_bytes(content)
    code, _, err = show(capsys, tmp_path / "t", "--html", tmp_path / "out")
    assert code == 2 and err == f"error: {tmp_path / 't'} is not a trace; expected a file that generate --trace FILE has written\n"  # fmt: skip # noqa: E501


def test_damaged_json_in_the_middle_names_the_line(hand, tmp_path, capsys):
    content = hand.read_bytes().splitlines(keepends=True)
    for bad in (b'{"kind": "round", \n', b"[" * 100_000 + b"\n", b"\xff\n", b"\n", b"7\n"):
        hand.write_bytes(b"".join([*content[:2], bad, *content[2:]]))
        code, _, err = show(capsys, hand, "--html", tmp_path / "out")
        assert code == 2 and err.count("\n") == 1 and f"{hand}:3 " in err and "write it again" in err


def test_files_that_cannot_be_read_or_written(hand, tmp_path, capsys):
    os.mkfifo(tmp_path / "pipe")
    partial = tmp_path / ".hand.jsonl.partial"
    partial.write_bytes(hand.read_bytes())
    out = tmp_path / "out"
    for argv, message in (
        ([tmp_path / "none", "--html", out], "none is missing; expected a trace"),
        ([tmp_path, "--html", out], "is no regular file"),
        ([tmp_path / "pipe", "--html", out], "is no regular file"),
        ([partial, "--html", out], "is the trace of a run that goes on or was killed"),
        ([hand, "--html", hand], "is the trace itself"),
        ([hand, "--html", tmp_path], "cannot be written: it is a folder"),
        ([hand, "--html", tmp_path / "no" / "out"], "cannot be written: there is no folder"),
        ([hand], "the following arguments are required: --html"),
    ):
        code, printed, err = show(capsys, *argv)
        assert code == 2 and printed == "" and err.count("\n") == 1 and message in err, err
        assert not out.exists()


def test_a_trace_without_texts_or_rounds_makes_a_page(tmp_path):
    start = [trace_files.run_line(), trace_files.prompt_line()]
    ends = [{"kind": "end", "token_ids": ids, "finish_reason": "length"} for ids in ([], [4])]
    for number, lines in enumerate((start[:1], [*start, ends[0]], [*start, ends[1]])):
        data = page_of(trace_files.write(tmp_path / f"{number}", lines)).data
        assert data["overview"]["all"]["tokens"] == (number == 2) and data["overview"]["all"]["clipped"] == 0
