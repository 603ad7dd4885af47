"""Experiments: records that are read again, and where prompts come from."""

from __future__ import annotations

import dataclasses
import gzip
import json
import sys
import types

import pytest

from experiments.study import hub
from experiments.study.prompts import load_datasets
from experiments.study.records import Records
from experiments.study.settings import chain
from reanchor_jax import ReanchorError
from tests.test_experiments import STUDY, made

# Records.


def test_half_a_line_is_dropped(tmp_path):
    records = Records(tmp_path, STUDY)
    for row in (0, 1):
        records.add(made(chain(), "a", row, prompt="p", token_ids=[row]))
    path = tmp_path / "records.jsonl"
    path.write_bytes(path.read_bytes()[:-9])
    again = Records(tmp_path, STUDY)
    assert [record["row"] for record in again] == [0] and path.read_bytes().endswith(b"}\n")
    again.add(made(chain(), "a", 1, prompt="p", token_ids=[1]))
    assert [record["row"] for record in Records(tmp_path)] == [0, 1]


def test_other_records_are_refused(tmp_path):
    Records(tmp_path, STUDY).add(made(chain(), "a", 0, prompt="p"))
    with pytest.raises(ReanchorError, match="max_new_tokens is 12, in this run it is 13; use another --out"):
        Records(tmp_path, dataclasses.replace(STUDY, max_new_tokens=13))
    with pytest.raises(ReanchorError, match="variants"):
        Records(tmp_path, dataclasses.replace(STUDY, variants={"domino": 8}))
    joined = dataclasses.replace(STUDY, variants={"dspark": 8})  # may join later
    Records(tmp_path, joined).add({**made(chain(drafter="dspark"), "a", 0), "study": dataclasses.asdict(joined)})
    assert Records(tmp_path).study.variants == {"domino": 4, "dspark": 8}
    with pytest.raises(ReanchorError, match="answers another prompt as row 0 of a"):
        Records(tmp_path, STUDY).get(chain().name, "a", 0, "q")
    path = tmp_path / "records.jsonl"
    path.write_text("{}\n" + path.read_text())
    with pytest.raises(ReanchorError, match="line 1 is no record"):
        Records(tmp_path)
    with pytest.raises(ReanchorError, match="has no records"):
        Records(tmp_path / "empty")


def test_packed_records_are_read_and_not_added_to(tmp_path):
    line = json.dumps(made(chain(), "a", 0, prompt="p"))
    (tmp_path / "records.jsonl.gz").write_bytes(gzip.compress(f"{line}\n".encode()))
    records = Records(tmp_path)
    assert records.study == STUDY and records.get(chain().name, "a", 0)
    with pytest.raises(ReanchorError, match="gunzip"):
        records.add(made(chain(), "a", 1, prompt="p"))


# Prompts.


def test_datasets_are_files_folders_and_the_hub(tmp_path, monkeypatch):
    for name, count in (("a", 3), ("b", 2)):
        lines = [json.dumps({"turns": [f"{name} {i}"]}) for i in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    found = load_datasets([str(tmp_path)], ["b"], "", 2, seed=0)
    assert {name: len(rows) for name, rows in found.items()} == {"b": 2}
    again = load_datasets([str(tmp_path / "a.jsonl")], [], "", 2, seed=0)["a"]
    assert [prompt.turns for prompt in again] == [
        prompt.turns for prompt in load_datasets([str(tmp_path)], [], "", 2, seed=0)["a"]
    ]
    with pytest.raises(ReanchorError, match="has no dataset c"):
        load_datasets([str(tmp_path)], ["a", "c"], "", 2, seed=0)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ReanchorError, match="needs the package datasets"):
        load_datasets(["hub"], ["gsm8k"], "", 2, seed=0)
    with pytest.raises(ReanchorError, match="expected one of gsm8k"):
        load_datasets(["hub"], ["gsm9k"], "", 2, seed=0)
    with pytest.raises(ReanchorError, match="needs the recipe's folder"):
        load_datasets(["synthetic"], [], str(tmp_path), 2, seed=0)


def test_hub_rows_become_turns(monkeypatch):
    tables = {
        "openai/gsm8k": [{"question": "1 + 1?"}],
        "tatsu-lab/alpaca": [{"instruction": "Add.", "input": "1, 2"}, {"instruction": "Sing.", "input": ""}],
        "openai/openai_humaneval": [{"prompt": "def f():"}],
        "HuggingFaceH4/MATH-500": [{"solution": "renamed"}],
        "json": [{"question_content": "Sum?", "starter_code": ""}],
    }
    fake = types.SimpleNamespace(load_dataset=lambda path, split, name=None, data_files=None: tables[path])
    monkeypatch.setitem(sys.modules, "datasets", fake)
    assert hub.hub_rows("gsm8k")[0].turns[0].startswith("1 + 1?\nPlease reason step by step")
    assert [prompt.turns for prompt in hub.hub_rows("alpaca")] == [("Add.\n\n1, 2",), ("Sing.",)]
    assert "```python\ndef f():\n```" in hub.hub_rows("humaneval")[0].turns[0]
    assert "Sum?" in hub.hub_rows("livecodebench")[0].turns[0]
    for name in ("math500", "aime25"):  # a renamed column; a dataset that is not there
        with pytest.raises(ReanchorError, match="the hub does not give"):
            hub.hub_rows(name)
