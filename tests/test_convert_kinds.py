"""Conversion of every kind of checkpoint: targets, drafters, GGUF files, and what decodes with them."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import pytest
from gguf import GGMLQuantizationType as Kind

from convert.__main__ import main as convert
from convert.convert import write_gguf_files
from reanchor_jax.checkpoint import load_drafter, load_target, save_drafter, save_target
from reanchor_jax.checkpoint.load import plan_target
from reanchor_jax.checkpoint.manifest import read_manifest
from reanchor_jax.config import DominoConfig, DSparkConfig, LMHeadConfig
from reanchor_jax.default_pair import find_default_target
from reanchor_jax.tokenizer import load_tokenizer
from tests.checkpoint_folders import (
    LLAMA3,
    drafter_config,
    drafter_tensors,
    target_config,
    target_tensors,
    write_folder,
)
from tests.cli_pair import call, folders_and_cache
from tests.test_checkpoint_gguf import metadata, quantized, write_gguf
from tests.test_convert import mesh, same
from tests.test_gemma import GEMMA_DSPARK
from tests.test_reduced_vocab import own_tensors, speculators_config
from tests.tiny import gemma_pattern, make_pair

DSPARK = DSparkConfig(
    markov_rank=6, markov_head_type="gated", enable_confidence_head=True, confidence_head_with_markov=True
)
HEADS = {
    "dflash": LMHeadConfig(),
    "own-parts": LMHeadConfig(own_embedding=True, draft_vocab_size=9, mask_embedding=True),
    "full-head": LMHeadConfig(draft_vocab_size=16),
    "domino": DominoConfig(emb_dim=6, gru_hidden_dim=10, shift_label=True, pure_draft_prefix_len=1),
    "dspark": DSPARK,
}


@pytest.mark.parametrize("kind", HEADS)
def test_a_drafter_comes_back(tmp_path, kind, capsys):
    """Of each kind; integers as they are, parts that only the tensors tell of included."""
    drafter = make_pair(4, head=HEADS[kind]).drafter
    save_drafter(drafter, tmp_path / "source", dtype=jnp.float32)
    assert convert(["convert", str(tmp_path / "source"), "--out", str(tmp_path / "out")]) == 0
    same(load_drafter(tmp_path / "out"), drafter)
    assert convert(["verify", str(tmp_path / "out"), str(tmp_path / "source")]) == 0
    assert convert(["inspect", str(tmp_path / "out")]) == 0
    out = capsys.readouterr().out
    assert "a converted drafter, float32" in out and "fc.weight  ->  fc  sha256" in out and out.endswith("fits\n")


def test_other_layouts_of_a_drafter_come_back(tmp_path):
    """The speculators library's config with its copies of the target's tensors; a map by vLLM's name."""
    config = speculators_config()
    base = drafter_tensors(drafter_config())
    write_folder(tmp_path / "nested", config, base | own_tensors() | {"verifier_norm.weight": base["norm.weight"]})
    tensors = base | own_tensors()
    tensors["draft_id_to_target_id"] = tensors.pop("d2t")
    write_folder(tmp_path / "vllm", config, tensors)
    for name in ("nested", "vllm"):
        assert convert([str(tmp_path / name), "--out", str(tmp_path / f"{name}2")]) == 0
        same(load_drafter(tmp_path / f"{name}2"), load_drafter(tmp_path / name))
        assert convert(["verify", str(tmp_path / f"{name}2"), str(tmp_path / "nested")]) == 0


@pytest.mark.parametrize("kind", [Kind.F32, Kind.Q8_0])
def test_a_gguf_file_comes_back_as_a_folder(tmp_path, kind, capsys):
    config = target_config(tie_word_embeddings=False, eos_token_id=[2, 5], rms_norm_eps=1e-5)
    path = write_gguf(tmp_path / "m.gguf", metadata(config), quantized(config, target_tensors(config), kind))
    assert convert([str(path), "--out", str(tmp_path / "out")]) == 0
    assert "no tokenizer is converted: " in capsys.readouterr().err
    same(load_target(tmp_path / "out"), load_target(path))
    assert convert(["verify", str(tmp_path / "out"), str(path)]) == 0
    assert read_manifest(tmp_path / "out").source_files.keys() == {"m.gguf"}


def test_the_default_pair_comes_back(tmp_path):
    """Its drafter, which lies in the package; --drafter tells it from the target of that name."""
    out = tmp_path / "out"
    assert convert(["smollm2-135m", "--drafter", "--out", str(out), "--mesh", "3"]) == 0
    assert (read_manifest(out).kind, read_manifest(out).dtype) == ("drafter", "bfloat16")
    assert convert(["verify", str(out), "smollm2-135m", "--drafter"]) == 0


def test_a_gguf_tokenizer_comes_along(tmp_path):
    path = find_default_target()
    if path is None:
        pytest.skip("the default target is not on this machine")
    plan = plan_target(path, jnp.dtype("float32"))
    write_gguf_files(path, tmp_path, plan, jnp.dtype("float32"))
    ours, theirs = load_tokenizer(tmp_path), load_tokenizer(path)
    assert ours is not None and theirs is not None
    for text in ("x  1\n\n ab", "Ünïcode 😀", "<|im_end|>"):
        assert ours.encode_plain(text) == theirs.encode_plain(text)
    turns = [{"role": "user", "content": "Hi"}]
    assert ours.encode_chat(turns) == theirs.encode_chat(turns)


@pytest.mark.parametrize(("given", "found"), [("bfloat16", "bfloat16"), (None, "float16")])
def test_dtypes(tmp_path, given, found):
    """The source's dtype if none is asked for; casts are those of loading."""
    target = make_pair(4, tied=False).target
    save_target(target, tmp_path / "source", dtype=jnp.float16)
    flags = [] if given is None else ["--dtype", given]
    assert convert([str(tmp_path / "source"), "--out", str(tmp_path / "out"), *flags]) == 0
    assert read_manifest(tmp_path / "out").dtype == found
    same(load_target(tmp_path / "out", dtype=found), load_target(tmp_path / "source", dtype=found))


def test_gemma_comes_back(tmp_path):
    """Layers of two kinds in a repeating pattern, stored scalars, shared keys and values; a drafter of such layers."""
    pair = make_pair(4, family="gemma4_text", head=GEMMA_DSPARK, drafter={"layer": gemma_pattern(32)[-1]})
    assert pair.drafter is not None
    save_target(pair.target, tmp_path / "t", dtype=jnp.float32)
    save_drafter(pair.drafter, tmp_path / "d", dtype=jnp.float32)
    for kind in "td":
        assert convert([str(tmp_path / kind), "--out", str(tmp_path / f"{kind}2"), "--mesh", "2"]) == 0
        assert convert(["verify", str(tmp_path / f"{kind}2"), str(tmp_path / kind)]) == 0
    same(load_target(tmp_path / "t2", mesh=mesh(model=2)), load_target(tmp_path / "t"))
    same(load_drafter(tmp_path / "d2"), load_drafter(tmp_path / "d"))
    assert read_manifest(tmp_path / "t2").tensors["model.layers.5.layer_scalar"].parameter == "layers.2.layer_scalar"


def test_generate_takes_converted_checkpoints(tmp_path, tmp_path_factory, capsys):
    """The same text and ids as from the sources, tokenizer and chat template included."""
    with folders_and_cache(tmp_path_factory.getbasetemp() / "cli_pair") as folders:
        flags = ["--max-new-tokens", 12, "--json"]
        want = call(capsys, "Say hi.", *folders.flags, *flags)
        for kind in ("target", "drafter"):
            assert convert([str(getattr(folders, kind)), "--out", str(tmp_path / kind)]) == 0
        capsys.readouterr()
        got = call(capsys, "Say hi.", "--target", tmp_path / "target", "--drafter", tmp_path / "drafter", *flags)
        assert (got.code, got.err) == (want.code, want.err) == (0, "")
        (left,), (right,) = want.records, got.records
        assert (
            left["text"] == right["text"] and left["token_ids"] == right["token_ids"] and len(left["token_ids"]) == 12
        )
        (tmp_path / "target" / "tokenizer.json").unlink()
        broken = call(capsys, "Say hi.", "--target", tmp_path / "target", "--drafter", tmp_path / "drafter", *flags)
        assert broken.code == 2 and "lacks 1 of" in broken.err and broken.err.count("\n") == 1


def test_configs_keep_all_their_fields(tmp_path):
    """The reader of the copied config is that of the source."""
    config = target_config(rope_scaling=LLAMA3, attention_bias=False)
    folder = write_folder(tmp_path / "s", config, target_tensors(config))
    assert convert([str(folder), "--out", str(tmp_path / "out")]) == 0
    target = load_target(tmp_path / "out")
    assert target.config == load_target(folder).config
    assert dataclasses.asdict(target.config)["pattern"][0]["rope"]["scaling"]["factor"] == 8.0
