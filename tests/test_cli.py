"""The command line with a tiny pair: text, ids, statistics, checks, traces."""

import dataclasses
import functools
import gc
import json
import os
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import reanchor_jax
from reanchor_jax.cli import main as main_module
from reanchor_jax.cli import process
from reanchor_jax.cli.answer import Answer
from reanchor_jax.cli.check import compare
from reanchor_jax.cli.decoder import padded_size
from reanchor_jax.config import DecodeConfig
from reanchor_jax.loop import generate
from reanchor_jax.prefill import prefill
from reanchor_jax.tokenizer import load_tokenizer
from tests.cli_pair import BLOCK_SIZE, VOCAB_SIZE, call, folders_and_cache, untimed
from tests.tiny import oracle, plain_table, scripted

PROMPT = "Say hi."
NEW = 24


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    with folders_and_cache(tmp_path_factory.getbasetemp() / "cli_pair") as folders:
        yield folders


@pytest.fixture(scope="module")
def plain(folders):
    """Ids of the prompt, and plain greedy decoding's answer by the library."""
    ids = load_tokenizer(folders.target).encode_chat([{"role": "user", "content": PROMPT}])
    run = functools.partial(generate, config=DecodeConfig(method="ar"), max_new_tokens=NEW)
    tokens = jax.jit(run)(folders.pair, jnp.array(ids), jnp.int32(len(ids)), key=jax.random.key(0)).tokens
    return ids, [int(token) for token in tokens]


@pytest.fixture
def all_accepted(plain):
    """Drafters draft what plain decoding gives."""
    ids, tokens = plain
    with scripted(oracle(plain_table(jnp.array(ids), jnp.int32(len(ids)), jnp.array(tokens))), VOCAB_SIZE):
        yield


def test_streams_text_then_the_report(folders, plain, capsys, all_accepted):
    result = call(capsys, PROMPT, *folders.flags, "--max-new-tokens", NEW, "--check")
    text, report = result.out.split("\n\ntau ")
    assert result.code == 0 and result.err == ""
    assert text == load_tokenizer(folders.target).decode(plain[1])
    assert f" 4.00 tokens per round (6 rounds, {NEW} tokens, 1 beyond the end)" in report
    assert "rounds      █ (4:6, tokens:rounds)" in report and "nodes    4.0 nodes per round" in report
    assert f"lossless yes ({NEW} of {NEW} tokens equal plain decoding)" in report and "times its speed" in report
    for word in ("tokens/s", "load", "compile", "prefill", "decode", "device   cpu, float32"):
        assert word in report


def test_a_record_is_what_the_library_gives(folders, plain, capsys):
    """At temperature 0.9, with filters and log-probabilities; in one program and round by round."""
    config = DecodeConfig(temperature=0.9, top_k=50, min_p=0.01, draft_rule="coupled", logprobs=2)
    flags = ["--temperature", 0.9, "--top-k", 50, "--min-p", 0.01, "--draft-rule", "coupled", "--logprobs", 2]
    flags += ["--max-new-tokens", NEW, "--seed", 7, "--json", *folders.flags]
    (record,) = call(capsys, PROMPT, *flags).records
    run = functools.partial(generate, config=config, max_new_tokens=NEW)
    key = jax.random.fold_in(jax.random.key(7), 0)
    expected = jax.device_get(jax.jit(run)(folders.pair, jnp.array(plain[0]), jnp.int32(len(plain[0])), key=key))
    rounds = int(expected.rounds)
    assert record["token_ids"] == expected.tokens.tolist() and record["token_ids"] != plain[1]
    assert record["text"] == load_tokenizer(folders.target).decode(expected.tokens)
    assert record["rounds"] == rounds and record["prompt_tokens"] == len(plain[0])
    assert record["committed_per_round"] == expected.counts.committed[:rounds].tolist()
    assert record["accepted_drafts_per_round"] == expected.counts.accepted[:rounds].tolist()
    assert record["nodes_per_round"] == expected.counts.nodes[:rounds].tolist()
    assert record["clipped_tokens"] == expected.clipped and record["tau"] == pytest.approx(float(expected.tau))
    assert 1 + sum(record["committed_per_round"]) - record["clipped_tokens"] == NEW
    assert record["finish_reason"] == "length" and "turns" not in record
    assert [row["token_id"] for row in record["logprobs"]] == record["token_ids"]
    np.testing.assert_allclose([row["logprob"] for row in record["logprobs"]], expected.logprobs.chosen, rtol=1e-5)
    assert [[i for i, _ in row["top"]] for row in record["logprobs"]] == expected.logprobs.top_ids.tolist()
    assert set(record["seconds"]) == {"load", "compile", "prefill", "decode"}
    assert record["settings"]["temperature"] == 0.9 and record["settings"]["dtype"] == "float32"

    (by_rounds,) = call(capsys, PROMPT, *flags, "--stop", "this never comes").records
    assert untimed(by_rounds) | {"settings": None} == untimed(record) | {"settings": None}


def test_logprobs_are_the_targets_own(folders, plain, capsys, all_accepted):
    """Against plain decoding, which computes each row alone."""
    flags = ["--json", "--max-new-tokens", NEW, "--logprobs", 3, *folders.flags]
    (record,) = call(capsys, PROMPT, *flags, "--method", "dflash").records
    (alone,) = call(capsys, PROMPT, *flags, "--method", "ar").records
    assert record["tau"] == BLOCK_SIZE and alone["tau"] == 1
    for row, other in zip(record["logprobs"], alone["logprobs"], strict=True):
        assert row["logprob"] == row["top"][0][1] and row["token_id"] == row["top"][0][0]
        np.testing.assert_allclose(row["top"], other["top"], atol=2e-5)


def test_stop_strings_cut_text_ids_and_counts(folders, plain, capsys, all_accepted):
    tokens = plain[1]
    tokenizer = load_tokenizer(folders.target)
    text = tokenizer.decode(tokens)
    # Characters 5 to 7 lie in different tokens and, at four tokens a round, in different rounds.
    stop = text[5:8]
    assert text.find(stop) == 5
    flags = [*folders.flags, "--method", "dflash", "--max-new-tokens", NEW]
    result = call(capsys, PROMPT, *flags, "--stop", "never", "--stop", stop)
    assert result.out.split("\n\ntau ")[0] == text[:5]
    (record,) = call(capsys, PROMPT, *flags, "--stop", stop, "--json").records
    count = len(record["token_ids"])
    assert record["text"] == text[:5] and record["finish_reason"] == "stop_string"
    assert record["token_ids"] == tokens[:count]
    assert stop in tokenizer.decode(tokens[:count]) and stop not in tokenizer.decode(tokens[: count - 1])
    assert 1 + sum(record["committed_per_round"]) - record["clipped_tokens"] == count


def test_eos_ends_the_text_unless_ignored(folders, plain, capsys, tmp_path):
    """Both ids of generation_config.json, which the target's config does not name."""
    tokens = plain[1]
    position = next(i for i in range(5, NEW) if tokens[i] not in tokens[:i])
    target = tmp_path / "target"
    target.mkdir()
    for file in folders.target.iterdir():
        os.link(file, target / file.name)
    (target / "generation_config.json").write_text(json.dumps({"eos_token_id": [VOCAB_SIZE - 1, tokens[position]]}))
    flags = ["--target", target, "--drafter", folders.drafter, "--method", "dflash"]
    flags += ["--json", "--max-new-tokens", NEW]
    (record,) = call(capsys, PROMPT, *flags).records
    assert record["token_ids"] == tokens[: position + 1] and record["finish_reason"] == "stop"
    (record,) = call(capsys, PROMPT, *flags, "--ignore-eos").records
    assert record["token_ids"] == tokens and record["finish_reason"] == "length"


@pytest.mark.parametrize("count", [0, 1])
def test_few_tokens(folders, plain, capsys, count):
    for flags in (["--json"], ["--json", "--stop", "never"]):
        (record,) = call(
            capsys, PROMPT, *folders.flags, *flags, "--method", "dflash", "--max-new-tokens", count
        ).records
        assert record["token_ids"] == plain[1][:count] and record["finish_reason"] == "length"
        assert record["rounds"] == record["tau"] == 0
        assert record["text"] == load_tokenizer(folders.target).decode(plain[1][:count])


def test_trace_replays_to_the_answer(folders, plain, capsys, tmp_path):
    path = tmp_path / "trace.jsonl"
    flags = ["--draft-rule", "coupled", "--temperature", 1, "--max-new-tokens", NEW, "--attach", "fallback"]
    flags += ["--json", "--ignore-eos"]
    (record,) = call(capsys, PROMPT, *folders.flags, *flags, "--trace", path).records
    run, prompt, *rounds, end, pieces = map(json.loads, path.read_text().splitlines())
    assert run == {"kind": "run", "format": 1, "settings": record["settings"]}
    assert prompt == {"kind": "prompt", "index": 0, "turn": 0, "prompt_ids": plain[0]}
    assert end == {"kind": "end", "token_ids": record["token_ids"], "finish_reason": "length"}
    assert {str(token) for token in record["token_ids"]} <= set(pieces["pieces"])
    tokens = record["token_ids"][:1]
    for entry, nodes in zip(rounds, record["nodes_per_round"], strict=True):
        trie = entry["trie"]
        assert entry["start"] == len(tokens) and entry["anchor"] == len(plain[0]) + len(tokens) - 1
        assert trie["tokens"][0] == entry["blocks"][0]["tokens"][0] == tokens[-1]
        assert len(trie["tokens"]) == len(trie["parents"]) == nodes
        path_tokens = [trie["tokens"][node] for node in entry["path"]]
        tokens += [trie["target_tokens"][node] for node in entry["path"]]
        assert path_tokens[1:] == tokens[entry["start"] : -1]
        for block in entry["blocks"]:
            assert len(block["tokens"]) == BLOCK_SIZE and (block["site"] is None or 0 <= block["site"] < BLOCK_SIZE)
    assert tokens[:NEW] == record["token_ids"] and len(tokens) == NEW + record["clipped_tokens"]
    assert any(block["offset"] > 0 and block["site"] is not None for entry in rounds for block in entry["blocks"])
    assert list(tmp_path.iterdir()) == [path]


def test_check_shows_where_and_how_far_the_texts_part(folders, plain):
    ids, tokens = plain
    wrong = (tokens[5] + 1) % VOCAB_SIZE
    answer = Answer(ids, token_ids=[*tokens[:5], wrong, *tokens[6:]])
    check = compare(folders.pair, DecodeConfig(), answer, Answer(ids, token_ids=tokens), seed=0, index=0)
    row = np.array(ids + tokens[:5], np.int32)
    config = DecodeConfig(method="ar", logprobs=VOCAB_SIZE)
    state = prefill(folders.pair, jnp.array(row), jnp.int32(len(row)), key=jax.random.key(0), config=config,
                    max_new_tokens=1)  # fmt: skip
    by_id = dict(zip(state.first_logprobs.top_ids[0].tolist(), state.first_logprobs.top[0].tolist(), strict=True))
    assert not check.equal and check.first_difference == 5
    assert check.gap == pytest.approx(by_id[tokens[5]] - by_id[wrong], abs=1e-4) and check.gap > 0
    shorter = compare(folders.pair, DecodeConfig(), Answer(ids, token_ids=tokens[:3]), Answer(ids, token_ids=tokens),
                      seed=0, index=0)  # fmt: skip
    assert (shorter.first_difference, shorter.gap) == (3, None)


def test_a_check_that_fails_says_so(folders, plain, capsys, monkeypatch):
    """A decoder that forgets the seed: its ids are not plain decoding's."""
    decode = main_module.Session._check

    def forgetful(self, answer, index, by_rounds):
        self._plain._seed = 1
        return decode(self, answer, index, by_rounds)

    monkeypatch.setattr(main_module.Session, "_check", forgetful)
    flags = [*folders.flags, "--temperature", 1.5, "--max-new-tokens", 8, "--check", "--method", "dflash"]
    result = call(capsys, PROMPT, *flags)
    assert result.code == 1
    assert "lossless no (" in result.out and "first difference at token" in result.out and "gap" in result.out


def test_interrupted_run_reports_what_it_has(folders, capsys, monkeypatch):
    written = []

    def write(text):
        written.append(text)
        if len(written) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(main_module, "_write", write)
    result = call(capsys, PROMPT, *folders.flags, "--method", "dflash")
    assert result.code == 130 and result.out.startswith("\n\ntau") and "tokens/s" in result.out


def test_a_reader_that_leaves_ends_the_run_quietly(folders):
    command = [sys.executable, "-m", "reanchor_jax.generate", PROMPT, *folders.flags, "--method", "ar"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141


def test_closed_streams_and_a_missing_device(folders):
    command = [sys.executable, "-m", "reanchor_jax.generate", PROMPT, *folders.flags, "--method", "ar"]
    closed = ["bash", "-c", 'exec "$@" >&-', "-", *command, "--max-new-tokens", "2", "--json"]
    result = subprocess.run(closed, capture_output=True)
    assert (result.returncode, result.stderr) == (0, b"")
    environment = {**os.environ, "JAX_PLATFORMS": "nowhere"}
    result = subprocess.run([*command, "--dtype", "float32"], capture_output=True, env=environment)
    assert result.returncode == 2 and result.stderr.startswith(b"error: JAX finds no device: ")
    assert result.stderr.count(b"\n") == 1


def test_an_interrupt_is_not_lost_in_the_garbage_collector(capsys):
    """Python ignores what a callback of the collector raises."""

    def interrupt(*_):
        signal.raise_signal(signal.SIGINT)
        gc.callbacks.remove(interrupt)

    def program():
        gc.callbacks.append(interrupt)
        gc.collect()
        time.sleep(30)
        return 0

    start = time.monotonic()
    assert process.run(program) == 130
    assert time.monotonic() - start < 20, "the sleep was not woken"
    assert capsys.readouterr().err == "interrupted\n"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_sizes():
    assert [padded_size(n, 512) for n in (1, 128, 129, 256, 300, 512)] == [128, 128, 256, 256, 512, 512]
    assert padded_size(90, 100) == 100


def test_the_library_function_keeps_its_name():
    import reanchor_jax.generate as imported

    assert imported is reanchor_jax.generate is generate
    assert dataclasses.is_dataclass(reanchor_jax.DecodeConfig)
