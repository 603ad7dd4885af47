"""What is made from the log of a training run: table, plot, event files, progress; also after a resume."""

from __future__ import annotations

import csv
import io
import json
import struct
import sys
from pathlib import Path
from unittest import mock

import matplotlib
import pytest
from rich.console import Console
from tensorboardX.proto.event_pb2 import Event

from reanchor_jax.errors import ReanchorError
from reanchor_jax.training import plot
from reanchor_jax.training.log import COLUMNS, Log, csv_text, scalars, table
from reanchor_jax.training.main import main
from reanchor_jax.training.optimizer import OptimizerConfig, learning_rate
from reanchor_jax.training.progress import plain_line, progress, status
from reanchor_jax.training.run import Run
from reanchor_jax.training.trainer import train
from tests.test_train_run import config, random_texts
from tests.tiny import make_pair

pytestmark = pytest.mark.usefixtures("quick_compiles")

HELD_OUT = {"loss": 3.0, "proxy_tau": 1.8, "accuracy": [0.5, 0.25], "tau": 1.5}
RECORDS = [
    {"step": 0, "held_out": {**HELD_OUT, "loss": 9.0}},
    {"step": 11, "rollout": {"phase": 1, "tau": 1.25}},
    {"step": 10, "loss": 4.0, "learning_rate": 0.5, "blocks_per_second": 100.0},
    {"step": 20, "loss": 3.5, "learning_rate": 0.25, "blocks_per_second": 110.0},
    {"step": 20, "held_out": HELD_OUT},
]


def events(folder: Path) -> list[tuple[str, int, float]]:
    """Tag, step and value of every scalar in a folder's event files, which are TFRecords."""
    found = []
    for path in sorted(folder.glob("events.out.tfevents.*")):
        data = path.read_bytes()
        while data:
            (size,) = struct.unpack("<Q", data[:8])  # length, its checksum, the event, its checksum
            event = Event.FromString(data[12 : 12 + size])
            found += [(value.tag, event.step, value.simple_value) for value in event.summary.value]
            data = data[16 + size :]
    return found


def rows_of(folder: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO((folder / "log.csv").read_text())))


def open_log(folder: Path, step: int, lines: list[str] | None = None, *, tensorboard: bool = True) -> Log:
    return Log(folder, step, 5, tensorboard=tensorboard, echo=[].append if lines is None else lines.append)


def test_numbers_of_a_record_have_one_name_each():
    assert scalars(RECORDS[-1]) == {
        **{"held_out_loss": 3.0, "proxy_tau": 1.8, "accuracy_1": 0.5, "accuracy_2": 0.25, "tau": 1.5}
    }
    assert scalars(RECORDS[1]) == {"rollout_phase": 1, "rollout_tau": 1.25}
    assert "step" not in scalars(RECORDS[2])


def test_table_has_a_row_for_each_step():
    lines = csv_text(table(RECORDS, 5)).splitlines()
    assert lines == [
        ",".join([*COLUMNS, "accuracy_1", "accuracy_2", "rollout_phase", "rollout_tau"]),
        "0,0,,,,9.0,1.8,1.5,0.5,0.25,,",
        "10,50,4.0,0.5,100.0,,,,,,,",
        "11,55,,,,,,,,,1,1.25",
        "20,100,3.5,0.25,110.0,3.0,1.8,1.5,0.5,0.25,,",
    ]


def test_plot_shows_the_table(tmp_path: Path):
    backend = matplotlib.get_backend()
    rows = table(RECORDS, 5)
    assert plot.points(rows, "loss") == ([50, 100], [4.0, 3.5])
    assert plot.points(rows, "held_out_loss") == ([0, 100], [9.0, 3.0])
    assert plot.last_accuracy(rows) == (100, [0.5, 0.25])
    assert plot.draw(rows, tmp_path)
    svg = (tmp_path / "curve.svg").read_text()
    for label in ("training", "held-out", "blocks trained", "proxy tau", "draft position", "after 100 blocks"):
        assert f">{label}<" in svg, label
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["curve.png", "curve.svg"]
    assert plot.draw(rows, tmp_path) and (tmp_path / "curve.svg").read_text() == svg
    assert matplotlib.get_backend() == backend


def test_plot_of_one_evaluation_and_of_a_loss_that_is_no_number(tmp_path: Path):
    assert plot.draw(table(RECORDS[:1], 5), tmp_path)
    record = {"step": 10, "held_out": {"loss": float("nan"), "proxy_tau": 1.0, "accuracy": [0.0]}}
    assert plot.draw(table([record], 5), tmp_path)


def test_without_matplotlib_one_line_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    lines: list[str] = []
    log = open_log(tmp_path, 0, lines, tensorboard=False)
    for step in (10, 20):
        log.append({"step": step, "held_out": HELD_OUT})
        log.publish()
    assert len(lines) == 1 and "pip install matplotlib" in lines[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log.csv", "log.jsonl"]


def test_a_resumed_log_holds_no_step_beyond_the_checkpoint(tmp_path: Path):
    log = open_log(tmp_path, 0)
    for record in RECORDS:
        log.append(record)
    log.publish()
    assert [row["step"] for row in rows_of(tmp_path)] == ["0", "10", "11", "20"]
    assert ("accuracy/2", 20, 0.25) in events(tmp_path / "tensorboard")
    log.close()
    with (tmp_path / "log.jsonl").open("a") as file:
        file.write('{"step": 3, "lo')  # killed in a line

    log = open_log(tmp_path, 10)
    assert log.records == [RECORDS[0], RECORDS[2]] and log.latest == {**scalars(RECORDS[0]), **scalars(RECORDS[2])}
    assert [row["step"] for row in rows_of(tmp_path)] == ["0", "10"]
    assert "rollout_tau" not in rows_of(tmp_path)[0]
    log.append({"step": 20, "loss": 7.0})
    log.publish()
    log.close()
    seen = events(tmp_path / "tensorboard")
    assert [value for value in seen if value[1] == 20] == [("loss", 20, 7.0)]
    assert len({value[:2] for value in seen}) == len(seen) == 5 + 3 + 1
    assert rows_of(tmp_path)[-1]["loss"] == "7.0"
    assert [json.loads(line)["step"] for line in (tmp_path / "log.jsonl").read_text().splitlines()] == [0, 10, 20]


NO_RECORDS = (
    *(b"garbage", b"\xff\xfe\0", b"[1]", b"[" * 99_999, b'{"loss": 1.0}', b'{"step": true}', b'{"step": 1.5}'),
    *(
        b'{"step": 1, "loss": "x"}',
        b'{"step": 1, "loss": {"a": {"b": 1}}}',
        b'{"step": 1, "loss": 1' + b"0" * 400 + b"}",
    ),
    *(
        b'{"step": 1, "held_out": 3}',
        b'{"step": 1, "held_out": {"loss": 1.0}}',
        b'{"step": 1, "rollout": {"tau": null}}',
    ),
)


def test_a_line_that_is_no_record_is_named(tmp_path: Path):
    for line in NO_RECORDS:
        whole = json.dumps(RECORDS[0]).encode() + b"\n" + line + b"\n"
        (tmp_path / "log.jsonl").write_bytes(whole)
        with pytest.raises(ReanchorError, match=r"log\.jsonl line 2 is .*; expected a record: remove that line"):
            open_log(tmp_path, 20)
        assert (tmp_path / "log.jsonl").read_bytes() == whole


def test_tensorboard_without_its_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    flags = f"--tensorboard --answers none.jsonl --mask-token-id 1 --out {tmp_path / 'out'}"
    assert main(flags.split()) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: --tensorboard needs tensorboardX") and error.count("\n") == 1
    assert not (tmp_path / "out").exists()
    with pytest.raises(ReanchorError, match="pip install tensorboardX"):
        open_log(tmp_path, 0)


def test_learning_rate_of_a_step():
    schedule = OptimizerConfig(steps=12, learning_rate=0.1, warmup=4)
    assert [learning_rate(schedule, step) for step in range(5)] == [0.0, 0.025, 0.05, 0.075, 0.1]
    accumulated = OptimizerConfig(steps=12, learning_rate=0.1, warmup=4, accumulate=2)
    assert [learning_rate(accumulated, step) for step in range(6)] == [0.0, 0.0, 0.05, 0.05, 0.1, 0.1]


def test_status_and_plain_line():
    latest = scalars(RECORDS[3])
    assert status(latest) == "loss 3.500, 110 blocks/s"
    assert status({**latest, **scalars(RECORDS[4])}) == "loss 3.500, 110 blocks/s, held-out proxy tau 1.800, tau 1.500"
    assert plain_line("training", 20, 90, 754.4, latest) == "training 20 of 90, 0:12:34 left, loss 3.500, 110 blocks/s"
    assert plain_line("answers", 3, 9, None, {}) == "answers 3 of 9"


@pytest.mark.parametrize("is_terminal", [False, True])
def test_progress(is_terminal: bool):
    """Steps of 25 seconds, from step 10 of a resumed run on."""
    seconds, file = [0.0], io.StringIO()
    console = Console(file=file, force_terminal=is_terminal, width=80, color_system=None)
    with progress("training", 20, console=console, clock=lambda: seconds[0]) as (on_step, echo):
        for step in range(11, 21):
            seconds[0] += 25
            on_step(step, scalars(RECORDS[3]))
        echo("a line beside it")
    lines = file.getvalue().splitlines()
    if is_terminal:
        assert any("a line beside it" in line for line in lines)
        assert "20/20" in lines[-3] and "left 0:00:00" in lines[-3]
        assert lines[-2].endswith("loss 3.500, 110 blocks/s")
        return
    numbers = "loss 3.500, 110 blocks/s"
    assert lines == [  # no two in the same minute; the time left without the steps of earlier runs
        f"training 13 of 20, 0:02:55 left, {numbers}",
        f"training 16 of 20, 0:01:40 left, {numbers}",
        f"training 19 of 20, 0:00:25 left, {numbers}",
        "a line beside it",
    ]


def test_the_best_drafter_is_saved_before_its_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run, saved = mock.Mock(folder=tmp_path, best=1.0), []
    run.evaluate.return_value = HELD_OUT
    run.log.append.side_effect = lambda _: saved.append("record")
    monkeypatch.setattr("reanchor_jax.training.run.save_drafter", lambda _, path: saved.append(path.name))
    monkeypatch.setattr(run.log, "publish", mock.Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        Run.report(run)
    assert saved == ["best", "record"]


def test_a_run_that_was_killed_has_every_step_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pair, texts = make_pair(4), random_texts(4)
    settings = config(5, num_anchors=4, eval_every=2, checkpoint_every=2, tensorboard=True)

    class Killed(BaseException):
        pass

    def kill(step: int, _: object) -> None:
        if step == 3:
            raise Killed

    run = lambda **given: train(
        pair.target, pair.drafter, texts[2:], texts[:2], settings, tmp_path, echo=lambda _: None, **given
    )
    with pytest.raises(Killed):
        run(on_step=kill)
    seen = []
    note = lambda step, latest: seen.append((step, latest["proxy_tau"] >= 1, "tau" in latest))
    with monkeypatch.context() as patch, pytest.raises(Killed):  # between checkpoint 4 and its evaluation
        patch.setattr(Run, "evaluate", lambda self: kill(3, self))
        run(on_step=note)
    assert not rows_of(tmp_path)[-1]["held_out_loss"]
    (tmp_path / "curve.png").unlink()
    run(on_step=note)
    assert seen == [(step, True, False) for step in (3, 4, 5)]
    rows = rows_of(tmp_path)
    assert [row["step"] for row in rows] == ["1", "2", "3", "4", "5"]
    assert [row["blocks"] for row in rows] == ["8", "16", "24", "32", "40"]
    assert [bool(row["held_out_loss"]) for row in rows] == [False, True, False, True, True]
    assert [float(row["learning_rate"]) for row in rows] == [learning_rate(settings.optimizer, n) for n in range(5)]
    assert all(float(row["loss"]) > 0 and float(row["blocks_per_second"]) > 0 for row in rows)
    assert all(rows[-1][f"accuracy_{k}"] for k in (1, 2, 3)) and "accuracy_4" not in rows[-1]
    logged = events(tmp_path / "tensorboard")
    assert len({value[:2] for value in logged}) == len(logged)
    assert [step for tag, step, _ in logged if tag == "loss"] == [1, 2, 3, 4, 5]
    assert [step for tag, step, _ in logged if tag == "accuracy/3"] == [2, 4, 5]
    assert (tmp_path / "curve.png").exists() and (tmp_path / "curve.svg").exists()
