"""Experiments: their arithmetic by hand, records that survive interruption, tables and pages of all of them."""

from __future__ import annotations

import dataclasses
import html
import json
import types
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from experiments import ablation, agreement, alignment, components, context_length, earliest_win_rate, report
from experiments.acceptance_length import share_of
from experiments.all import EXPERIMENTS
from experiments.drafter_curve import taus, write_curve
from experiments.study import command, experiment
from experiments.study.comparison import paper_target, parse_numbers
from experiments.study.experiment import Experiment
from experiments.study.page import command_of
from experiments.study.plots import draw
from experiments.study.records import Records
from experiments.study.resample import SAMPLES, draws, interval, ratio
from experiments.study.results import MEAN, Results
from experiments.study.runs import Runner
from experiments.study.settings import Setting, Study, chain, plain, reanchor
from experiments.study.tables import Table, cell
from reanchor_jax import ReanchorError
from reanchor_jax.attach import Paths, keep_components
from reanchor_jax.checkpoint import save_drafter, save_target
from reanchor_jax.cli.process import run as run_process
from tests.tiny import make_pair

STUDY = Study(
    pair="a pair", target="0", block_size=4, head="LMHeadConfig", variants={"domino": 4}, dtype="float32",
    device="none", max_new_tokens=12, seed=0, nodes=None, chat_template=False, thinking=None,
)  # fmt: skip


# Statistics of rounds, against what the docstrings say.


def a_round(**fields: Any) -> Any:
    """A RoundRecord with only what an observer reads."""
    arrays = {name: np.array(value) if isinstance(value, list) else value for name, value in fields.items()}
    return types.SimpleNamespace(**arrays)


def test_agreement_is_counted_behind_the_first_rejected_draft():
    a, b, c, d, e, x, y, z = range(8)
    chain_round = a_round(accepted=1, num_nodes=5, trie_tokens=[a, b, c, d, e], target_tokens=[b, x, d, y, z])
    counts = agreement.agreement_after_rejection([chain_round, chain_round], ())
    assert counts == {"agree": 2, "total": 4, "by_distance": [[2, 2], [0, 2]]}
    whole = a_round(accepted=4, num_nodes=5, trie_tokens=[a, b, c, d, e], target_tokens=[b, c, d, e, z])
    last = a_round(accepted=3, num_nodes=5, trie_tokens=[a, b, c, d, e], target_tokens=[b, c, d, x, z])
    assert agreement.agreement_after_rejection([whole, last], ())["total"] == 0  # nothing behind the rejected draft


def test_alignment_counts_what_the_docstring_says():
    a, b, c, z = range(4)
    blocks = [[a, b, c, b], [b, a, a, a], [b, a, a, a], [z, a, a, a]]
    counts = alignment.alignment_of_blocks([a_round(blocks=blocks, block_valid=[True] * 4)], ())
    assert counts == {"blocks": 3, "matched": 2, "shifted_only": 1, "multiple": 2}
    some = alignment.alignment_of_blocks([a_round(blocks=blocks, block_valid=[True, True, False, False])], ())
    assert some == {"blocks": 1, "matched": 1, "shifted_only": 0, "multiple": 1}


def test_earliest_wins_counts_what_the_docstring_says():
    a, b, c, d, e, f, x = range(7)
    blocks = [[a, x, b, x, b], [b, c, d, e, f]]
    one = a_round(start=1, blocks=blocks, block_valid=[True, True], accepted=5)
    counts = earliest_win_rate.earliest_wins([one], [a, x, b, c, d, e])
    assert counts == {"groups": 1, "eligible": 1, "wins": 1, "contradicted": 0}
    # The answer repeats: only behind the second site is the block right, and the decoder, which has the
    # earliest alone, accepts the baseline's a x b x b.
    one = a_round(start=1, blocks=blocks, block_valid=[True, True], accepted=4)
    counts = earliest_win_rate.earliest_wins([one], [a, x, b, x, b, c, d])
    assert counts == {"groups": 1, "eligible": 1, "wins": 0, "contradicted": 0}
    # Nowhere as far as the baseline: not eligible. Anchors match at the baseline's own anchor, too.
    one = a_round(start=1, blocks=[[a, x, b, x, b], [a, c, d, e, f]], block_valid=[True, True], accepted=4)
    counts = earliest_win_rate.earliest_wins([one], [a, x, b, x, b, f])
    assert counts == {"groups": 1, "eligible": 0, "wins": 0, "contradicted": 0}
    one.accepted = 3  # a decoder that says otherwise
    assert earliest_win_rate.earliest_wins([one], [a, x, b, x, b, f])["contradicted"] == 1


def test_rounds_are_placed_by_their_anchor():
    record = {"prompt_tokens": 5, "committed": [3, 2, 4]}
    assert context_length.positions(record) == [5, 8, 10]
    assert context_length.bin_width([record]) == 2  # 8 bins of 2 hold positions 0 to 15
    assert context_length.inside(8, 16, committed=True)(record) == 6
    assert context_length.inside(8, 16, committed=False)(record) == 2
    assert share_of(2)({"committed": [2, 1, 2]}) == 2


def test_components_of_paths():
    a, b, c, d, x, y, z = range(7)
    paths = Paths(
        tokens=jnp.array([[a, b, c, d, 0, 0, 0], [a, b, x, y, z, 0, 0], [a, x, y, 0, 0, 0, 0]]),
        lengths=jnp.array([4, 5, 3]),
        sites=jnp.array([0, 2, 1]),
    )
    inside = keep_components(paths, "in_block")
    assert inside.lengths.tolist() == [4, 4, 3] and inside.tokens.tolist() == paths.tokens.tolist()
    beyond = keep_components(paths, "extension")
    assert beyond.lengths.tolist() == [4, 5, 0] and beyond.sites.tolist() == [0, 2, -1]
    assert beyond.tokens[1].tolist() == [a, b, c, d, z, 0, 0]
    assert keep_components(paths, "both") is paths


# Resampling.


def test_draws_count_every_prompt_once_and_then_resample():
    weights = draws(3, seed=0)
    assert weights.shape == (1 + SAMPLES, 3) and weights[0].tolist() == [1, 1, 1]
    assert set(weights.sum(axis=1)) == {3} and np.array_equal(weights, draws(3, seed=0))
    assert not np.array_equal(weights, draws(3, seed=1))


def test_intervals():
    values = draws(4, seed=0) @ np.array([1.0, 1.0, 1.0, 5.0]) / 4
    point = interval(values)
    assert point.value == 2.0 and point.low == 1.0 and 3.0 <= point.high <= 4.0
    assert cell(values).startswith("2.00 [1.00, ") and cell(np.full(5, np.nan)) == "-"
    assert cell(np.full(5, 0.125), 1, unit="%", percent=True, sign=True) == "+12.5% [+12.5, +12.5]"
    assert np.isnan(ratio(np.array([1.0]), np.array([0.0])))[0]


def made(setting: Setting, dataset: str, row: int, **fields: Any) -> dict[str, Any]:
    return {"study": dataclasses.asdict(STUDY), "setting": setting.name, "dataset": dataset, "row": row, **fields}


def test_statistics_are_ratios_of_sums_over_complete_prompts():
    base, new = chain(), reanchor(STUDY)
    records = [
        made(plain(), "a", 0, token_ids=[1, 2], committed=[1], nodes=[1], decode_seconds=4.0),
        made(plain(), "a", 1, token_ids=[3], committed=[1], nodes=[1], decode_seconds=2.0),
        made(plain(), "b", 7, token_ids=[4], committed=[1], nodes=[1], decode_seconds=1.0),
        made(base, "a", 0, token_ids=[1, 2], committed=[1, 2], nodes=[4, 4], decode_seconds=2.0),
        made(base, "a", 1, token_ids=[9], committed=[3], nodes=[4], decode_seconds=1.0),
        made(base, "b", 7, token_ids=[4], committed=[4], nodes=[4], decode_seconds=2.0),
        made(new, "a", 0, token_ids=[1, 2], committed=[3], nodes=[8], decode_seconds=2.0),
        made(new, "a", 1, token_ids=[3], committed=[3, 2], nodes=[8, 6], decode_seconds=1.0),
        made(new, "b", 7, token_ids=[4], committed=[6], nodes=[8], decode_seconds=4.0),
        made(base, "b", 8, token_ids=[4], committed=[100], nodes=[4], decode_seconds=2.0),  # of one setting alone
    ]
    results = Results(records, STUDY, [plain(), base, new])
    assert results.rows == {"a": [0, 1], "b": [7]} and results.columns == ["a", "b", MEAN]
    assert results.tau(base, "a")[0] == 2 and results.tau(new, "a")[0] == pytest.approx(8 / 3)
    assert results.tau(base, MEAN)[0] == 3
    assert results.speedup(base, "a")[0] == 2 and results.speedup(base, MEAN)[0] == 1.25
    assert results.relative(results.tau, new, base, "b")[0] == 0.5
    assert results.relative(results.tau, new, base, MEAN)[0] == pytest.approx((1 / 3 + 1 / 2) / 2)
    assert results.nodes(new, "a")[0] == pytest.approx(22 / 3)
    assert results.milliseconds(base, "a")[0] == 3000
    assert results.equal(base) == (2, 3) and results.equal(new) == (3, 3)
    # Paired: where both settings have the same committed tokens, no resample has a difference.
    assert set(results.tau(base, "a") - results.tau(base, "a")) == {0.0}


def test_what_decodes_alike_has_one_name():
    assert reanchor(STUDY).name == reanchor(STUDY, attach="earliest", components="both").name
    assert chain().name == "method=dflash" and plain(1.0).name == "method=ar temperature=1.0"
    assert chain(1.0).config.draft_rule == "sample" and chain(1.0, draft_rule="greedy").config.draft_rule == "greedy"
    limited = dataclasses.replace(STUDY, nodes=9)
    assert reanchor(limited).config.nodes == 9 and reanchor(limited, nodes=5).config.nodes == 5
    for each in EXPERIMENTS:
        settings = each.all_settings(STUDY)
        assert len({setting.name for setting in settings}) == len(settings)
        assert settings[0].config.method == "ar"


def test_the_papers_numbers_are_its_own_averages():
    from experiments.drafter_variants import PAPER as VARIANTS
    from experiments.main_results import PAPER

    for numbers, temperature, gains, grew, comparisons in (
        (PAPER, 0.0, (15.2, 13.4), (32, 32), 32),
        (PAPER, 1.0, (11.8, 6.9), (31, 27), 32),
        (VARIANTS, 0.0, (11.8, 9.8), (48, 48), 48),
        (VARIANTS, 1.0, (11.5, 8.1), (48, 45), 48),
    ):
        both = [
            (
                np.array(list(new.values())),
                np.array(list(numbers[t, target, method.removesuffix("+ReAnchor")].values())),
            )
            for (t, target, method), new in numbers.items()
            if t == temperature and method.endswith("+ReAnchor")
        ]
        growth = np.concatenate([new / old - 1 for new, old in both])
        assert len(growth) == comparisons
        np.testing.assert_allclose(100 * growth.mean(axis=0), gains, atol=0.05)  # the text's, to its last digit
        assert tuple((growth > 0).sum(axis=0)) == grew
    assert paper_target("Qwen/Qwen3-8B,z-lab/Qwen3-8B-DFlash") == "Qwen3-8B" and paper_target("other") == "Qwen3-4B"
    with pytest.raises(ValueError):
        parse_numbers("0 Qwen3-4B DFlash 6.24/4.19")


# Whole runs. Decoding is real where a test says so; elsewhere a script stands in for it.


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A random pair, saved, with a variant and two datasets."""
    root = tmp_path_factory.mktemp("pair")
    pair = make_pair(4, vocab_size=16)
    save_target(pair.target, root / "target", dtype=np.dtype("float32"))
    for name in ("drafter", "variant"):
        save_drafter(pair.drafter, root / name, dtype=np.dtype("float32"))
    rng = np.random.default_rng(0)
    for name in ("gsm8k", "own"):
        lines = [json.dumps({"prompt_ids": rng.integers(0, 15, 5 + i).tolist()}) for i in range(3)]
        (root / f"{name}.jsonl").write_text("\n".join(lines))
    return root


def call(experiments: list[Experiment], folder: Path, out: Path, *more: str) -> int:
    flags = ["--pair", str(folder), "--prompts", str(folder), "--samples", "3", "--max-new-tokens", "12"]
    return command.main(experiments, "all", "", [*flags, "--out", str(out), *more])


def scripted(self: Runner, setting: Setting, prompt: Any, plain_ids: Any) -> dict[str, Any]:
    """Counts and times that are a function of setting and prompt."""
    seed = sum(map(ord, setting.name)) + 7 * prompt.row + len(prompt.dataset)
    committed = [1 + (seed + i) % 4 for i in range(4)]
    counts = {"token_ids": [prompt.row, 1, 2], "committed": committed, "nodes": [4, 6, 8, 8]}
    if setting.observe is None:
        return {**counts, "prefill_seconds": 0.5, "decode_seconds": 1 + seed % 5, "compile_seconds": 0.0}
    blocks = np.array([[0, 1, 2, 1], [1, 2, 3, 3], [1, 3, 2, 1], [5, 5, 5, 5]])
    one = a_round(
        start=1, blocks=blocks, block_valid=[True] * 4, accepted=2, num_nodes=4,
        trie_tokens=[0, 1, 2, 1], target_tokens=[1, 3, 1, 0],
    )  # fmt: skip
    return {**counts, "observed": setting.observe([one], [0, 1, 2])}


@pytest.mark.usefixtures("quick_compiles")
def test_real_rounds_lossless_and_the_same_whoever_drives_them(folder, tmp_path, capsys):
    experiments = [agreement.EXPERIMENT, components.EXPERIMENT, earliest_win_rate.EXPERIMENT]
    assert call(experiments, folder, tmp_path) == 0
    records = Records(tmp_path)
    by_setting: dict[str, dict[Any, Any]] = {}
    for record in records:
        assert record["equal"] and record["made"]["versions"]["jax"]
        by_setting.setdefault(record["setting"], {})[record["dataset"], record["row"]] = record
    assert len(by_setting) == 7 and all(len(found) == 6 for found in by_setting.values())
    study = records.study
    in_block = by_setting[reanchor(study, components="in_block").name]
    assert all(max(record["committed"]) <= study.block_size for record in in_block.values())
    for timed, observed in (
        (chain(), chain(observe=agreement.agreement_after_rejection)),
        (reanchor(study), reanchor(study, observe=earliest_win_rate.earliest_wins)),
    ):
        for prompt, record in by_setting[timed.name].items():
            other = by_setting[observed.name][prompt]
            assert [record[name] for name in ("token_ids", "committed", "nodes")] == [
                other[name] for name in ("token_ids", "committed", "nodes")
            ]
            # The verdict by plain decoding's answer is the decoder's own.
            assert other["observed"].get("contradicted", 0) == 0
    won = [record["observed"] for record in by_setting[observed.name].values()]
    assert sum(counts["groups"] for counts in won) > 0
    assert all(counts["wins"] <= counts["eligible"] <= counts["groups"] for counts in won)
    assert "All 30 answers of all 3 settings equal plain decoding" not in capsys.readouterr().err


def test_curve_of_a_drafter(tmp_path):
    rows = [("a", [2, 4]), ("a", [1, 1]), ("b", [3])]
    early = taus([{"task": task, "committed_per_round": rounds} for task, rounds in rows], ["a", "b"])
    assert [early[name][0] for name in ("a", "b", "mean")] == [2.0, 3.0, 2.5]
    assert interval(early["a"])[1:] == (1.0, 3.0)  # of its two prompts, the same one may be drawn twice
    late = taus([{"task": task, "committed_per_round": [4, 4]} for task in "ab"], ["a", "b"])
    text = write_curve({0: early, 75_000: late}, tmp_path)
    assert text.splitlines() == [
        "blocks,a,b,mean,mean_low,mean_high",
        "0,2.000,3.000,2.500,2.000,3.000",
        "75000,4.000,4.000,4.000,4.000,4.000",
    ]
    assert (tmp_path / "curve.csv").read_text() == text
    assert (tmp_path / "curve.png").stat().st_size > 1000 and (tmp_path / "curve.svg").stat().st_size > 1000


def test_an_interrupted_run_gives_the_same_tables(folder, tmp_path, monkeypatch, capsys):
    variants = ("--variants", f"domino={folder / 'variant'}")
    monkeypatch.setattr(Runner, "run", scripted)
    monkeypatch.setattr(experiment, "draw", lambda figure, folder: True)  # the page below draws them all
    assert call(EXPERIMENTS, folder, tmp_path / "whole", *variants) == 0
    calls = 0

    def stops(*arguments: Any) -> dict[str, Any]:
        nonlocal calls
        calls += 1
        if calls in (40, 41, 90):
            raise KeyboardInterrupt
        return scripted(*arguments)

    monkeypatch.setattr(Runner, "run", stops)
    codes = [run_process(lambda: call(EXPERIMENTS, folder, tmp_path / "parts", *variants)) for _ in range(4)]
    assert codes == [130, 130, 130, 0]
    settings = {record["setting"] for record in Records(tmp_path / "whole")}
    assert calls == len(settings) * 6 + 3  # nothing was decoded twice
    for each in EXPERIMENTS:
        texts = [(tmp_path / name / f"{each.name}.md").read_text() for name in ("whole", "parts")]
        assert texts[0] == texts[1] and "gsm8k" in texts[0]
    # A page of everything, from the records alone, with a sentence on what was found.
    out = tmp_path / "whole"
    monkeypatch.setattr(experiment, "draw", draw)
    (out / "findings.toml").write_text('ablation = "Matching <helps>."\n')
    assert report.main([str(out)]) == 0
    page, text = (out / "report.html").read_text(), (out / "report.md").read_text()
    for each in EXPERIMENTS:
        assert f"<h2>{each.title}</h2>" in page and f"## {each.title}\n" in text
    assert "Matching &lt;helps&gt;." in page and "**Matching <helps>.**" in text
    assert page.count("<figure>") == sum(1 for _ in out.glob("*.svg")) > 10
    assert all((out / f"{svg.stem}.png").stat().st_size for svg in out.glob("*.svg"))
    # The command on it asks for the very same prompts and settings: none is missing.
    printed = command_of(Records(out))
    assert f"```\n{printed}\n```" in text and html.escape(printed) in page
    for name, place in {"\\": "", "PROMPTS": folder, "DRAFTER": folder / "variant", "OUT": out}.items():
        printed = printed.replace(name, str(place))
    _, given = printed.split(f"--pair {folder.name} ")
    before = calls
    assert command.main(EXPERIMENTS, "all", "", ["--pair", str(folder), *given.split()]) == 0
    assert calls == before and "--samples 3" in given and "--max-prompt 7" in given
    capsys.readouterr()


def test_one_experiment_takes_records_of_another(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Runner, "run", scripted)
    assert call([ablation.EXPERIMENT], folder, tmp_path, "--datasets", "own") == 0
    before = len(list(Records(tmp_path)))
    assert call([components.EXPERIMENT], folder, tmp_path, "--datasets", "own") == 0
    assert len(list(Records(tmp_path))) == before + 2 * 3  # in-block and extension alone
    table = (tmp_path / "components.md").read_text()
    assert "Δ +0.54" in table and "12 of 12" in table and "3 of 3" in table
    with pytest.raises(ReanchorError, match="of another study: max_new_tokens is 12"):
        call([components.EXPERIMENT], folder, tmp_path, "--max-new-tokens", "11")
    capsys.readouterr()


def test_an_answer_that_differs_is_counted_and_fails(folder, tmp_path, monkeypatch, capsys):
    def wrong(self: Runner, setting: Setting, prompt: Any, plain_ids: Any) -> dict[str, Any]:
        counts = scripted(self, setting, prompt, plain_ids)
        return {**counts, "token_ids": [9]} if setting == chain() and prompt.row == 1 else counts

    monkeypatch.setattr(Runner, "run", wrong)
    assert call([components.EXPERIMENT], folder, tmp_path, "--datasets", "own") == 1
    out = capsys.readouterr().out
    assert "| DFlash |" in out and "2 of 3" in out and "differs from plain decoding: method=dflash, own row 1" in out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--pair", "somewhere"), "expected TARGET,DRAFTER"),
        (("--variants", "domino"), "--variants has domino; expected NAME=DRAFTER"),
        (("--samples", "0"), "expected an integer >= 1"),
        (("--max-prompt", "2"), "gsm8k has no prompt of at most 2 tokens"),
        (("--thinking", "--no-thinking"), "not allowed with"),
    ],
)
def test_bad_input_is_one_line(folder, tmp_path, flags, message):
    with pytest.raises(ReanchorError, match=message):
        call([ablation.EXPERIMENT], folder, tmp_path, *flags)


def test_tables_as_text():
    table = Table(["a", "b"], [["1", "<2>"]], "A note.")
    assert table.markdown() == "| a | b |\n|---|---|\n| 1 | <2> |\n\nA note.\n"
    assert "<td>&lt;2&gt;</td>" in table.html() and "A note." in table.html()
