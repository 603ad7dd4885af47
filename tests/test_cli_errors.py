"""Bad input: one line on stderr, exit code 2, nothing on stdout and nothing on disk."""

import dataclasses
import json
import os

import pytest

from reanchor_jax.cli.arguments import parse
from reanchor_jax.cli.process import run
from reanchor_jax.config import DecodeConfig
from tests.cli_pair import MAX_POSITIONS, VOCAB_SIZE, call, folders_and_cache


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    with folders_and_cache(tmp_path_factory.getbasetemp() / "cli_pair") as folders:
        yield folders


def refused(capsys, *argv) -> str:
    """The message with which a command line is refused."""
    result = call(capsys, *argv)
    assert result.code == 2, result
    assert result.out == "" and result.err.startswith("error: ") and result.err.count("\n") == 1
    return result.err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "either a PROMPT or --prompts"),
        (["x", "--prompts", "y"], "either a PROMPT or --prompts"),
        (["x", "y"], "unrecognized arguments: y"),
        ([" \n"], "the prompt is empty"),
        (["x", "--temperature", "nan"], "temperature is nan"),
        (["x", "--temperature", "inf"], "temperature is inf"),
        (["x", "--temperature", "-1"], "temperature is -1.0"),
        (["x", "--temperature", "hot"], "got 'hot', expected a number"),
        (["x", "--temperature", "1e-40"], "temperature is 1e-40; expected 0 or a number from 1e-30 to 1e+30"),
        (["x", "--draft-temperature", "1e40"], "draft_temperature is 1e+40; expected a number from 1e-30"),
        (["x", "--top-k", "-1"], "got -1, expected an integer from 0 to 2147483647"),
        (["x", "--top-k", str(2**31)], "expected an integer from 0 to 2147483647"),
        (["x", "--top-p", "0"], "top_p is 0.0"),
        (["x", "--top-p", "nan"], "top_p is nan"),
        (["x", "--min-p", "1.5"], "min_p is 1.5"),
        (["x", "--draft-temperature", "0"], "draft_temperature is 0.0"),
        (["x", "--draft-rule", "best"], "invalid choice: 'best'"),
        (["x", "--attach", "best"], "invalid choice: 'best'"),
        (["x", "--retain", "best"], "invalid choice: 'best'"),
        (["x", "--method", "best"], "invalid choice: 'best'"),
        (["x", "--dtype", "float8"], "invalid choice: 'float8'"),
        (["x", "--max-new-tokens", "-1"], "got -1, expected an integer >= 0"),
        (["x", "--max-new-tokens", "1.5"], "got '1.5', expected an integer"),
        (["x", "--seed", "-1"], "got -1, expected an integer from 0 to 4294967295"),
        (["x", "--seed", str(2**32)], "expected an integer from 0"),
        (["x", "--logprobs", "-1"], "got -1"),
        (["x", "--offsets", "-1"], "got -1"),
        (["x", "--nodes", "0"], "got 0"),
        (["x", "--max-len", "256"], "leaves no room for a prompt"),
        (["x", "--stop", ""], "--stop is empty"),
        (["x", "--stop", "\udcff"], "--stop has '\\udcff' at character 0"),
        (["x", "--system", "\udcff"], "--system has '\\udcff' at character 0"),
        (["a\udcff"], "the prompt has '\\udcff' at character 1"),
        (["x", "--output", "a", "--trace", "./a"], "--trace a is the file of --output too"),
        (["--prompts", "a", "--trace", "a"], "--trace a is the file of --prompts too"),
        (["--prompts", "a", "--output", "a"], "--output a is the file of --prompts too"),
        (["x", "--output", os.devnull], "it is no regular file"),
        (["x", "--drafter", "~no-one/x"], "'~no-one/x' cannot be opened"),
        (["x", "--drafter", "x" * 999], "File name too long"),
        (["x", "--resume"], "name it with --output"),
        (["x", "--resume", "--output", "o", "--trace", "t"], "trace a run from its start"),
        (["x", "--no-chat-template", "--system", "s"], "--system needs the chat template"),
        (["x", "--no-chat-template", "--thinking"], "--thinking needs the chat template"),
        (["x", "--temp", "1"], "unrecognized arguments: --temp"),
        (["x", "--target", "some/model"], "needs a drafter; name one for some/model"),
        (["x", "--revision", "main"], "neither model is a hub id"),
    ],
)
def test_flags(capsys, flags, message):
    assert message in refused(capsys, *flags)


def test_defaults_are_the_librarys():
    options = parse(["x"])
    assert options.decode == DecodeConfig() and options.max_new_tokens == 256
    assert parse(["x", "--method", "ar"]).drafter is None


def test_every_setting_has_its_flag():
    wanted = DecodeConfig(
        method="dflash",
        temperature=0.5,
        top_k=3,
        top_p=0.5,
        min_p=0.25,
        draft_rule="sample",
        draft_temperature=0.75,
        attach="longest",
        retain="baseline",
        components="extension",
        offsets=2,
        nodes=9,
        logprobs=4,
        schedule="threshold",
        confidence_threshold=0.25,
    )
    flags = [
        f"--{name.replace('_', '-')}={value}"
        for name, value in dataclasses.asdict(wanted).items()
        # How the trie is padded is nothing that a user sees; costs come from --profile.
        if name not in ("bucket_nodes", "costs")
    ]
    assert parse(["x", *flags]).decode == wanted
    assert parse(["x", "--logprobs"]).decode.logprobs == 0


def test_files_are_checked_before_models(capsys, tmp_path):
    """The default pair is never asked for: it might have to be fetched."""
    (tmp_path / "file").write_text("x")
    for path, reason in [
        (tmp_path, "it is a folder"),
        (tmp_path / "none" / "out", "there is no folder"),
        (tmp_path / "file" / "out", "there is no folder"),
    ]:
        for flag in ("--output", "--trace"):
            assert reason in refused(capsys, "x", flag, path)
    assert "cannot be read" in refused(capsys, "--prompts", tmp_path / "none", "--output", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_models(folders, capsys, tmp_path):
    output = ["--output", tmp_path / "out.jsonl"]
    target, drafter = ["--target", folders.target], ["--drafter", folders.drafter]
    broken = tmp_path / "broken"
    broken.mkdir()
    config = json.loads((folders.drafter / "config.json").read_text())

    def with_drafter(**changes) -> str:
        (broken / "config.json").write_text(json.dumps({**config, **changes}))
        (broken / "model.safetensors").write_bytes((folders.drafter / "model.safetensors").read_bytes())
        return refused(capsys, "x", *target, "--drafter", broken, *output)

    assert "does not exist" in refused(capsys, "x", "--target", tmp_path / "none", *drafter, *output)
    assert "does not exist" in refused(capsys, "x", *target, "--drafter", "none", *output)
    assert "describes a drafter" in refused(capsys, "x", "--target", folders.drafter, *drafter, *output)
    assert "is no GGUF file" in refused(capsys, "x", "--target", folders.target / "config.json", *drafter, *output)
    assert "num_target_layers" in with_drafter(num_target_layers=4)
    assert "vocab_size is 269" in with_drafter(vocab_size=269)
    assert "expected 48x32" in with_drafter(intermediate_size=48)
    assert "missing tensors" in with_drafter(num_hidden_layers=3, layer_types=["full_attention"] * 3)
    weights = broken / "model.safetensors"
    (broken / "config.json").write_text(json.dumps(config))
    weights.write_bytes(weights.read_bytes()[:1000])
    assert str(weights) in refused(capsys, "x", *target, "--drafter", broken, *output)
    assert "offsets is 4; expected 0 to 3" in refused(capsys, "x", *target, *drafter, "--offsets", 4, *output)
    assert "nodes is 3; expected at least" in refused(capsys, "x", *target, *drafter, "--nodes", 3, *output)
    assert not (tmp_path / "out.jsonl").exists()


def test_prompts_that_do_not_fit(folders, capsys, tmp_path):
    path = tmp_path / "prompts.jsonl"
    flags = [*folders.flags, "--prompts", path, "--output", tmp_path / "out.jsonl"]
    path.write_text(f'{{"prompt": "fine"}}\n{{"prompt_ids": [3, {VOCAB_SIZE}]}}\n')
    assert f"{path}:2 has the token id {VOCAB_SIZE}; expected ids from 0 to" in refused(capsys, *flags)
    path.write_text('{"prompt_ids": [-1]}')
    assert "has the token id -1" in refused(capsys, *flags)
    path.write_text(json.dumps({"prompt_ids": [3] * (MAX_POSITIONS - 99)}))
    message = refused(capsys, *flags, "--max-new-tokens", 100)
    assert f"has 413 tokens, 513 with --max-new-tokens 100; expected at most {MAX_POSITIONS}, the target's" in message
    assert "--max-len is 1000; expected at most" in refused(capsys, *flags, "--max-len", 1000)
    assert "--max-new-tokens is 512; expected less" in refused(capsys, *flags, "--max-new-tokens", 512)
    assert "--logprobs is 999; expected at most" in refused(capsys, *flags, "--logprobs", 999)
    assert "thinking=True was asked" in refused(capsys, "x", *folders.flags, "--thinking")
    assert [file.name for file in tmp_path.iterdir()] == ["prompts.jsonl"]


def test_memory_that_runs_out_is_one_line(capsys: pytest.CaptureFixture):
    def allocate() -> int:
        raise MemoryError("Unable to allocate 477. GiB")

    assert run(allocate, smaller="--rows") == 2
    assert capsys.readouterr().err == "error: out of memory: Unable to allocate 477. GiB; try a smaller --rows\n"
