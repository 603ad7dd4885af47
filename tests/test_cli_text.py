"""Stop strings and streamed text, without a model."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reanchor_jax.cli.answer import Answer
from reanchor_jax.cli.report import make_report
from reanchor_jax.cli.text import AnswerText, StopScanner
from reanchor_jax.tokenizer import load_tokenizer
from tests.test_tokenizer import END, spell, write_gguf

SETTINGS = {"dtype": "float32", "method": "dflash", "draft_rule": "greedy", "temperature": 0.0, "schedule": "none"}


def first_stop(text: str, stops: list[str]) -> str | None:
    """The text before the stop string that is complete first, by trying every end."""
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end - max(map(len, ending))]
    return None


pieces_of_ab = st.lists(st.text("ab", max_size=4), max_size=8)
stops_of_ab = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3)


@given(pieces_of_ab, stops_of_ab)
def test_the_cut_does_not_depend_on_the_pieces(pieces, stops):
    scanner, printed, text = StopScanner(stops), "", "".join(pieces)
    expected = first_stop(text, stops)
    for piece in pieces:
        printed += scanner.push(piece)
        # Nothing is ever printed that a stop string takes back.
        assert (text if expected is None else expected).startswith(printed)
    assert scanner.stopped == (expected is not None)
    assert printed + scanner.flush() == (text if expected is None else expected)


def test_the_docstring_example():
    scanner = StopScanner(["END"])
    assert [scanner.push(piece) for piece in ("the E", "N", "D", "more")] == ["the ", "", "", ""]
    assert scanner.stopped
    scanner = StopScanner(["END"])
    assert [scanner.push(piece) for piece in ("the E", "Nd")] == ["the ", "ENd"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(write_gguf(tmp_path_factory.mktemp("cli") / "tiny.gguf"))


@given(st.lists(st.integers(1, 5), min_size=1, max_size=30))
def test_a_stop_string_over_tokens_and_rounds(tokenizer, widths):
    ids = [*spell("a 😀 b ST"), END, *spell("OP behind")]
    answer, shown, used = Answer([1]), [], 0
    text = AnswerText(answer, tokenizer, ["STOP", "never"], shown.append)
    for width in [*widths, len(ids)]:
        used += text.push(ids[:width])
        ids = ids[width:]
    text.end()
    assert answer.text == "".join(shown) == "a 😀 b "
    assert answer.finish_reason == "stop_string"
    assert used == len([*spell("a 😀 b STOP"), END])


def test_held_back_text_comes_at_the_end(tokenizer):
    answer = Answer([1])
    text = AnswerText(answer, tokenizer, ["STOP"], None)
    assert text.push([*spell("x ST"), 0xF0]) == 5
    assert answer.text == "x "
    text.end()
    assert answer.text == "x ST\N{REPLACEMENT CHARACTER}" and answer.finish_reason is None


def test_a_stop_string_that_ends_in_half_a_character(tokenizer):
    answer = Answer([1])
    text = AnswerText(answer, tokenizer, ["\N{REPLACEMENT CHARACTER}"], None)
    text.push([*spell("x"), 0xF0])
    text.end()
    assert answer.text == "x" and answer.finish_reason == "stop_string"


def test_report_lines_add_up():
    answer = Answer([1, 2], token_ids=list(range(8)), committed=[4, 1, 3], nodes=[4, 4, 7])
    answer.clipped, answer.decode_seconds = 1, 0.5
    lines = make_report([answer], [], SETTINGS, 1.0, "cpu").splitlines()
    assert lines[0] == "tau      2.67 tokens per round (3 rounds, 8 tokens, 1 beyond the end)"
    assert lines[1] == "rounds   █ ██ (1:1 3:1 4:1, tokens:rounds)"
    assert lines[2:4] == ["nodes    5.0 nodes per round", "speed    14.0 tokens/s"]
    assert "no rounds" in make_report([Answer([1], token_ids=[3])], [], SETTINGS, 1.0, "cpu")
