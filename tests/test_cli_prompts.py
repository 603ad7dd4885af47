"""Prompt files, result files, and going on after an interruption."""

import json
import os

import pytest

from reanchor_jax.cli.prompts import read_prompts
from reanchor_jax.errors import ReanchorError
from reanchor_jax.tokenizer import load_tokenizer
from tests.cli_pair import MAX_POSITIONS, call, folders_and_cache, untimed

LINES = [
    {"prompt": "one", "category": "left alone"},
    {"turns": ["two", "and then?"]},
    {"prompt_ids": [5, 6, 7]},
    {"prompt": "a longer prompt of the same size"},
]
NEW = 6


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    with folders_and_cache(tmp_path_factory.getbasetemp() / "cli_pair") as folders:
        yield folders


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n\n".join(json.dumps(line) for line in LINES))
    return path


def test_results_come_in_order_and_survive_an_interruption(folders, prompts, capsys, tmp_path, monkeypatch):
    output = tmp_path / "out.jsonl"
    flags = [*folders.flags, "--prompts", prompts, "--max-new-tokens", NEW, "--temperature", 0.8]
    result = call(capsys, *flags, "--output", output)
    assert result.code == 0 and "prompts  4 of 4" in result.out and "4/4" in result.err
    lines = output.read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert [record["index"] for record in records] == [0, 1, 2, 3]
    # Two cache sizes: the conversation outgrows the first. A prompt of a known size compiles nothing.
    assert records[0]["seconds"]["compile"] > 0
    assert records[2]["seconds"]["compile"] == records[3]["seconds"]["compile"] == 0

    # The second turn's prompt is the conversation up to there.
    conversation, tokenizer = records[1], load_tokenizer(folders.target)
    first, second = conversation["turns"]
    assert all(conversation[name] == second[name] for name in second)
    said = [("user", "two"), ("assistant", first["text"]), ("user", "and then?")]
    ids = tokenizer.encode_chat([{"role": role, "content": text} for role, text in said])
    assert second["prompt_tokens"] == len(ids) > first["prompt_tokens"]
    assert records[2]["prompt_tokens"] == 3
    assert records[2]["text"] == tokenizer.decode(records[2]["token_ids"])

    # A result that was being written when the run was killed is done again; the others are kept.
    output.write_text(lines[0] + "\n" + lines[2] + "\n" + lines[1][:40])
    result = call(capsys, *flags, "--output", output, "--resume")
    assert result.code == 0 and "2 done before" in result.out
    again = output.read_text().splitlines()
    assert again[:2] == [lines[0], lines[2]]
    by_index = {json.loads(line)["index"]: untimed(json.loads(line)) for line in again}
    assert by_index == {record["index"]: untimed(record) for record in records} and len(again) == 4

    # Nothing left: no model is loaded, nothing is written.
    monkeypatch.setattr("reanchor_jax.cli.main.open_models", None)
    result = call(capsys, *flags, "--output", output, "--resume", "--json")
    assert (result.code, result.out) == (0, "") and output.read_text().splitlines() == again

    # Other settings, other prompts, foreign files, and no --resume.
    for more, word in [
        (["--seed", 1, "--resume"], "was made with seed 0; expected 1"),
        (["--method", "ar", "--resume"], "made with "),
        ([], "exists"),
    ]:
        result = call(capsys, *flags, "--output", output, *more)
        assert result.code == 2 and word in result.err and result.out == "" and result.err.count("\n") == 1
    prompts.write_text("\n".join(json.dumps(line) for line in reversed(LINES)))
    result = call(capsys, *flags, "--output", output, "--resume")
    assert result.code == 2 and f"{output}:1 answers another prompt" in result.err
    result = call(capsys, *flags, "--output", prompts, "--resume")
    assert result.code == 2 and "is the file of --prompts too" in result.err
    assert output.read_text().splitlines() == again


@pytest.mark.parametrize("content", [b"my notes", b'{"my": "notes"}', b"\xff", b"[" * 99999 + b"\n", b"{}\n"])
def test_a_foreign_file_is_never_gone_on_with(capsys, tmp_path, content):
    path = tmp_path / "notes"
    path.write_bytes(content)
    result = call(capsys, "x", "--output", path, "--resume")
    assert result.code == 2 and f"{path}:1 is no result of this program" in result.err
    assert path.read_bytes() == content


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (lambda path: os.mkfifo(path), "it is no regular file"),
        (lambda path: path.symlink_to(path), "its links go in a circle"),
        (lambda path: path.symlink_to(path.parent / "none" / "x"), "there is no folder"),
    ],
)
@pytest.mark.parametrize("flag", ["--output", "--trace"])
def test_places_that_cannot_be_written(capsys, tmp_path, made, reason, flag):
    made(tmp_path / "place")
    result = call(capsys, "x", flag, tmp_path / "place")
    assert result.code == 2 and f"{flag} {tmp_path / 'place'} cannot be written: {reason}" in result.err
    assert [path.name for path in tmp_path.iterdir()] == ["place"]


def test_a_conversation_that_cannot_fit_is_refused_before_its_first_turn(folders, capsys, prompts):
    prompts.write_text(json.dumps({"turns": ["x", "y" * MAX_POSITIONS]}))
    result = call(capsys, *folders.flags, "--prompts", prompts, "--max-new-tokens", NEW)
    assert result.code == 2 and result.out == ""
    assert result.err.startswith(f"error: {prompts}:1 has ") and result.err.count("\n") == 1


def test_json_and_plain_text(folders, prompts, capsys):
    flags = [*folders.flags, "--prompts", prompts, "--max-new-tokens", NEW, "--method", "ar"]
    records = call(capsys, *flags, "--json").records
    assert [record["index"] for record in records] == [0, 1, 2, 3]
    out = call(capsys, *flags).out
    for name, text in [("[0]", records[0]["text"]), ("[1.1]", records[1]["text"]), ("[3]", records[3]["text"])]:
        assert f"{name} {text}\n" in out
    assert "prompts  4 of 4" in out


def test_without_a_tokenizer_ids_go_in_and_out(folders, prompts, capsys):
    flags = ["--target", folders.bare_target, "--drafter", folders.drafter, "--method", "dflash", "--json"]
    result = call(capsys, *flags, "--prompts", prompts)
    assert result.code == 2 and f"{prompts}:1 is text, but {folders.bare_target} has no tokenizer" in result.err
    prompts.write_text('{"prompt_ids": [5, 6, 7]}')
    for more in ([], ["--trace", prompts.with_name("trace.jsonl")]):
        (record,) = call(capsys, *flags, "--prompts", prompts, "--max-new-tokens", NEW, *more).records
        assert record["text"] is None and len(record["token_ids"]) == NEW
    result = call(capsys, *flags, "--prompts", prompts, "--stop", "x")
    assert result.code == 2 and "--stop needs text" in result.err


def test_one_cache_size_for_all_prompts(folders, capsys, tmp_path):
    path = tmp_path / "prompts.jsonl"
    flags = ["--target", folders.bare_target, "--method", "ar", "--json", "--prompts", path]
    path.write_text("\n".join(json.dumps({"prompt_ids": [3] * n}) for n in (10, 150)))
    records = call(capsys, *flags, "--max-new-tokens", NEW, "--max-len", 150 + NEW).records
    assert [record["seconds"]["compile"] > 0 for record in records] == [True, False]
    result = call(capsys, *flags, "--max-new-tokens", NEW + 1, "--max-len", 150 + NEW)
    assert result.code == 2 and f"{path}:2 has 150 tokens, 157 with --max-new-tokens 7" in result.err
    assert "expected at most 156, the cache of --max-len" in result.err and result.out == ""


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", ":2 is no JSON"),
        ("[1]", ":2 is [1]; expected an object"),
        ("{}", ":2 has the fields (none)"),
        ('{"text": "x"}', ':2 has the fields "text"'),
        ('{"prompt": "x", "turns": ["y"]}', ":2 has prompt and turns"),
        ('{"prompt": 3}', ":2: prompt is 3; expected a string"),
        ('{"prompt": "  "}', ":2: prompt is empty"),
        ('{"turns": []}', ":2: turns is []"),
        ('{"turns": ["x", ""]}', ":2: turns is empty"),
        ('{"turns": "x"}', ':2: turns is "x"'),
        (r'{"turns": ["x", "\ud800"]}', ":2: turns has '\\ud800' at character 0"),
        ('{"prompt_ids": []}', ":2: prompt_ids is []"),
        ('{"prompt_ids": [1, true]}', ":2: prompt_ids is [1, true]"),
        ('{"prompt_ids": [1.0]}', ":2: prompt_ids is [1.0]"),
        (b"\xff", ":2 is no JSON"),
    ],
)
def test_bad_lines_are_named(tmp_path, line, message):
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b'{"prompt": "fine"}\n' + (line if isinstance(line, bytes) else line.encode()))
    with pytest.raises(ReanchorError) as caught:
        read_prompts(path)
    assert f"{path}{message}" in str(caught.value)


def test_a_file_without_prompts(tmp_path):
    (tmp_path / "empty").write_text("\n\n")
    for path, word in [
        (tmp_path / "empty", "has no prompts"),
        (tmp_path / "none", "cannot be read"),
        (tmp_path, "is a directory"),
    ]:
        with pytest.raises(ReanchorError, match=f"(?i){word}"):
            read_prompts(path)
