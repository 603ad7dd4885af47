"""Profiles of what verification costs: measured, estimated, saved, read, used."""

from __future__ import annotations

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from reanchor_jax.cli.main import main as generate
from reanchor_jax.cli.profile import main
from reanchor_jax.errors import ReanchorError
from reanchor_jax.profile import Profile, load_profile, profile_text, roofline
from tests.golden_heads import GOLDEN
from tests.tiny import make_pair

TARGET = str(GOLDEN / "trained_qwen3_target" / "model")
PAIR = f"--target {TARGET} --drafter {GOLDEN / 'dspark_qwen3_trained' / 'drafter'}"


def test_costs_lie_on_lines_between_the_known_sizes():
    profile = Profile((1, 2, 4), (1.0, 2.0, 3.0), "by hand")
    assert profile.costs(6) == (1.0, 2.0, 2.5, 3.0, 3.5, 4.0)
    assert profile.costs(2) == (1.0, 2.0)
    assert Profile((1,), (2.0,), "by hand").costs(3) == (2.0, 2.0, 2.0)
    assert Profile((1, 2), (1.0, 2.0), "by hand", draft_seconds=5.0).costs(3) == (6.0, 7.0, 8.0)


def test_roofline_is_flat_up_to_its_knee():
    config = make_pair(4).target.config
    costs = np.array(roofline(config, jnp.dtype("bfloat16"), "TPU v5 lite").costs(1024))
    knee = 240  # 197e12 operations / 0.82e12 bytes: two operations and two bytes for every weight
    assert np.all(costs[:knee] == costs[0])
    np.testing.assert_allclose(
        costs[2 * knee - 1 :: knee] / costs[0], [2 * knee / 240.2, 3 * knee / 240.2, 4 * knee / 240.2], rtol=1e-2
    )
    for dtype, device in (("bfloat16", "abacus"), ("float32", "TPU v4")):
        with pytest.raises(ReanchorError, match=f"no roofline profile for {dtype} on the device '{device}'"):
            roofline(config, jnp.dtype(dtype), device)


def test_command_measures_and_generate_uses_it(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = [*PAIR.split(), "--most", "9", "--context", "8", "--repeats", "2"]
    assert main([*flags, "--out", "p.json"]) == 0
    output = capsys.readouterr().out
    assert output.count("times one token") == 8 and "drafting" in output
    profile = load_profile("p.json")
    assert profile.tokens == (1, 2, 3, 4, 6, 8, 9) and min(*profile.seconds, profile.draft_seconds) > 0
    assert "float32, context 8" in profile.source and [path.name for path in Path().iterdir()] == ["p.json"]

    Path("prompts.jsonl").write_text(json.dumps({"prompt_ids": [1, 60, 61, 62]}) + "\n")
    run = f"{PAIR} --prompts prompts.jsonl --max-new-tokens 12 --json --check --no-compile-cache"
    steep = Profile((1, 2), (1.0, 1.6), "by hand")
    Path("steep.json").write_text(profile_text(steep))
    records = []
    for schedule in ("none", "threshold --confidence-threshold 0.9", "hardware --profile steep.json"):
        assert generate([*run.split(), "--schedule", *schedule.split()]) == 0
        records.append(json.loads(capsys.readouterr().out))
        assert records[-1]["check"]["equal"]
    whole, *cut = (sum(record["nodes_per_round"]) / record["rounds"] for record in records)
    assert max(cut) < whole
    # The record holds the costs themselves: a profile that is measured again is another setting.
    assert records[2]["settings"]["profile"]["seconds"] == [1.0, 1.6] and "costs" not in records[2]["settings"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "poem"}, "kind is"),
        ({"format": 2}, "format is 2"),
        ({"tokens": [2, 3]}, "rising integers from 1"),
        ({"tokens": [1, 1]}, "rising integers from 1"),
        ({"seconds": [1.0]}, "2 numbers above 0"),
        ({"seconds": [1.0, -1.0]}, "2 numbers above 0"),
        ({"seconds": [1.0, True]}, "2 numbers above 0"),
        ({"draft_seconds": -1}, "draft_seconds is -1"),
        ({"more": 1}, "more"),
    ],
)
def test_damaged_profiles_are_named(changes, message, tmp_path):
    text = profile_text(Profile((1, 2), (1.0, 2.0), "by hand"))
    path = tmp_path / "p.json"
    path.write_text(text)
    assert load_profile(path) == Profile((1, 2), (1.0, 2.0), "by hand")
    path.write_text(json.dumps({**json.loads(text), **changes}))
    with pytest.raises(ReanchorError, match=message):
        load_profile(path)


@pytest.mark.parametrize(
    ("command", "flags", "message"),
    [
        (main, "--out missing/p.json", "--out missing/p.json cannot be written"),
        (main, f"--target {TARGET} --context 999999 --out p.json", "the target's limit"),
        (main, "--target nowhere --out p.json", "nowhere"),
        (main, "--most 1 --out p.json", "expected an integer from 2"),
        (
            generate,
            f"hello {PAIR} --profile p.json",
            "--profile is of --schedule hardware",
        ),
        (
            generate,
            f"hello {PAIR} --schedule hardware --profile p.json",
            "p.json is missing",
        ),
        (generate, "hello --schedule threshold --confidence-threshold 2", "confidence_threshold is 2.0"),
        (generate, "hello --schedule threshold", "no confidence head"),
        (generate, "hello --schedule threshold --method ar", "cuts drafts"),
        (generate, "hello --confidence-threshold 0.7", "--confidence-threshold is of --schedule threshold"),
        (generate, f"hello {PAIR} --schedule hardware --dtype float32", "no roofline profile for float32"),
    ],
)
def test_bad_input_is_one_line(command, flags, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert command(flags.split()) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1
    assert not list(tmp_path.iterdir())
