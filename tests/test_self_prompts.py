"""Prompts that the target finishes itself."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from reanchor_jax.tokenizer import load_tokenizer
from reanchor_jax.training import self_prompts
from reanchor_jax.training.answers import Prompt
from reanchor_jax.training.self_prompts import Beginning, beginnings, finished, main, shared_ends
from tests.cli_pair import Folders, folders_and_cache


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Folders]:
    with folders_and_cache(tmp_path_factory.getbasetemp() / "cli_pair") as made:
        yield made


def test_shared_ends_example():
    assert shared_ends([Prompt((1, 7, 8, 2, 9)), Prompt((1, 7, 5, 2, 9)), Prompt((1, 7, 2, 9))]) == (2, 2)
    assert shared_ends([Prompt((1, 2)), Prompt((1, 2))]) == (2, 0)  # an end is not counted twice


def test_beginnings_keep_heads_and_part_of_the_own_words():
    group = [Prompt((1, 2, *range(100 * i + 10, 100 * i + 30), 8, 9), "a") for i in range(5)]
    other = [Prompt((1, 2, 5, 9), "b"), Prompt((1, 2, 6, 9), "b")]  # too short to be cut
    kept = beginnings([*group, *other], copies=2, seed=0)
    assert len(kept) == 10 and all(b.prompt.source == "a" and b.tail == (8, 9) and b.head == 2 for b in kept)
    for b, prompt in zip(kept, group * 2, strict=True):
        assert b.prompt.ids == prompt.ids[: len(b.prompt.ids)] and 5 <= len(b.prompt.ids) <= 14
    assert {len(b.prompt.ids) for b in kept[:5]} != {len(b.prompt.ids) for b in kept[5:]}
    assert kept == beginnings([*group, *other], copies=2, seed=0)


def test_finished_prompts_are_tokenized_anew(folders: Folders):
    tokenizer = load_tokenizer(folders.target)
    assert tokenizer is not None
    eos, skipped = tokenizer.eos_ids[0], next(i for i in range(256, 268) if tokenizer.is_skipped(i))
    beginning = Beginning(Prompt((3, *b"How many")), 1, (4,))
    assert finished(beginning, [*b" apples?", eos], tokenizer) == (3, *tokenizer.encode_plain("How many apples?"), 4)
    assert finished(beginning, [*b" apples?"], tokenizer) is None  # cut off
    assert finished(beginning, [*b" ap", skipped, *b"ples", eos], tokenizer) is None


def test_command_writes_what_was_finished(folders: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    """The target's part is scripted here: a random one hardly ever ends a turn."""
    tokenizer = load_tokenizer(folders.target)
    assert tokenizer is not None
    questions = tmp_path / "sums.jsonl"
    questions.write_text("".join(json.dumps({"prompt": f"Add {i} to {i * i} at once."}) + "\n" for i in range(10, 14)))
    written = [[*b"seven", tokenizer.eos_ids[0]], [*b"never ends"], [*b"seven", tokenizer.eos_ids[0]], [*b"7"]]

    def write(target, prompts, path, *, temperature, **_):
        assert temperature == 0.5 and len(prompts) == 4
        rows = [{"index": i, "source": "sums", "answer_ids": written[i]} for i in (2, 0, 1, 3)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    monkeypatch.setattr(self_prompts, "generate_answers", write)
    out = tmp_path / "more.jsonl"
    flags = ["--target", folders.target, "--prompts", questions, "--out", out, "--temperature", "0.5"]
    assert main([str(flag) for flag in flags]) == 0
    texts = [tokenizer.decode(json.loads(line)["prompt_ids"]) for line in out.read_text().splitlines()]
    assert len(texts) == 2 and all("Add 1" in text and "seven at once." in text for text in texts)
    assert "2 prompts from 4 beginnings" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["more.jsonl", "sums.jsonl"]


def test_bad_input_is_one_line(folders: Folders, tmp_path: Path, capsys):
    same = tmp_path / "same.jsonl"
    same.write_text('{"prompt": "Hello"}\n' * 2)
    for flags, message in (
        ([folders.bare_target, same], "has no tokenizer"),
        ([folders.target, same], "fewer than four tokens"),
        ([folders.target, tmp_path / "none.jsonl"], "cannot be read"),
    ):
        command = ["--target", flags[0], "--prompts", flags[1], "--out", tmp_path / "out.jsonl"]
        assert main([str(flag) for flag in command]) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1
    assert not (tmp_path / "out.jsonl").exists()


def test_nothing_finished_and_bad_places_are_one_line(
    folders: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
):
    questions = tmp_path / "sums.jsonl"
    questions.write_text("".join(json.dumps({"prompt": f"Add {i} to {i * i} at once."}) + "\n" for i in range(10, 14)))
    never = lambda target, prompts, path, **_: path.write_text('{"index": 0, "answer_ids": [55]}\n')
    monkeypatch.setattr(self_prompts, "generate_answers", never)
    for out, message in (("new.jsonl", "finished none of 4 beginnings"), (".", "which is no file")):
        command = ["--target", folders.target, "--prompts", questions, "--out", tmp_path / out]
        assert main([str(flag) for flag in command]) == 2
        error = capsys.readouterr().err.splitlines()[-1]
        assert error.startswith("error: ") and message in error
    assert [path.name for path in tmp_path.iterdir()] == ["sums.jsonl"]
