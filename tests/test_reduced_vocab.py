"""DFlash drafters with weights of their own: embedding, LM head over few tokens, mask embedding."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from reanchor_jax.checkpoint import load_drafter, save_drafter
from reanchor_jax.checkpoint.drafter_config import is_drafter, read_drafter_config
from reanchor_jax.checkpoint.fill import named_parameters
from reanchor_jax.checkpoint.hf_config import read_target_config
from reanchor_jax.config import DecodeConfig, DraftRule, LMHeadConfig
from reanchor_jax.heads import DraftNoise
from reanchor_jax.pair import Pair
from tests.checkpoint_folders import drafter_config, drafter_tensors, refuses, write_folder
from tests.tiny import make_pair, make_prompts, run

NEW = 40
IDS = np.array([0, 2, 3, 7, 50, 51, 90, 158])
"""Draft token j is target token IDS[j], of 160."""


def marks(ids: np.ndarray = IDS, size: int = 160) -> np.ndarray:
    return np.isin(np.arange(size), ids)


def own_tensors(num_ids: int = len(IDS)) -> dict[str, np.ndarray]:
    """Embedding, LM head and map as the speculators library writes them."""
    rng = np.random.default_rng(3)
    return {
        "embed_tokens.weight": rng.normal(size=(160, 64)).astype(np.float32),
        "lm_head.weight": rng.normal(size=(num_ids, 64)).astype(np.float32),
        "d2t": IDS - np.arange(len(IDS)),
        "t2d": marks(),
    }


def reduced_folder(folder: Path, changes: dict[str, Any] | None = None, **config_changes: Any) -> Path:
    """A drafter over IDS in z-lab's layout; a tensor changed to `...` is left out."""
    config = drafter_config(**{"draft_vocab_size": len(IDS)} | config_changes)
    tensors = drafter_tensors(config) | own_tensors() | (changes or {})
    return write_folder(folder, config, {name: t for name, t in tensors.items() if t is not ...})


def speculators_config(**changes: Any) -> dict[str, Any]:
    """The same drafter's config as the speculators library writes it."""
    flat = drafter_config()
    own = flat.pop("dflash_config")
    config = {
        "architectures": ["DFlashDraftModel"],
        "auf": False,
        "aux_hidden_state_layer_ids": [layer_id + 1 for layer_id in own["target_layer_ids"]],
        "block_size": flat.pop("block_size"),
        "draft_vocab_size": len(IDS),
        "dtype": "bfloat16",
        "mask_token_id": own["mask_token_id"],
        "max_anchors": 3072,
        "projector_type": "dflash",
        "sample_from_anchor": False,
        "shift_label": False,
        "sliding_window_non_causal": False,
        "speculators_config": {"algorithm": "dflash", "verifier": {"name_or_path": "some/target"}},
        "speculators_model_type": "dflash",
        "speculators_version": "0.5.0",
        "target_hidden_size": None,
        "transformer_layer_config": {n: v for n, v in flat.items() if n not in ("architectures", "num_target_layers")},
        "transformers_version": "5.8.1",
    }
    return {name: value for name, value in (config | changes).items() if value is not ...}


def same(a: Any, b: Any) -> None:
    assert a.config == b.config
    for name, leaf in named_parameters(a).items():
        np.testing.assert_array_equal(leaf, named_parameters(b)[name], err_msg=name)


# ---------------------------------------------------------------- drafting


def test_drafts_equal_plain_numpy(tmp_path):
    """Greedy and with noise: the noise of a draft token is that of its target token."""
    head = load_drafter(reduced_folder(tmp_path)).head
    target = make_pair(6, vocab_size=160, width=64).target
    rng = np.random.default_rng(0)
    hidden, noise = rng.normal(size=(3, 6, 64)).astype(np.float32), rng.gumbel(size=(3, 5, 160)).astype(np.float32)
    logits = hidden[:, 1:].astype(np.float64) @ own_tensors()["lm_head.weight"].T.astype(np.float64)
    for given, temperature in ((None, 1.0), (noise, 0.5), (noise, 5.0)):
        drafts = head(target, jnp.asarray(hidden), jnp.zeros(3, jnp.int32), DraftNoise(gumbel=given), temperature)
        np.testing.assert_allclose(drafts.logits, logits, rtol=1e-4, atol=1e-4)
        want = np.zeros((3, 5), int)
        for block, slot in np.ndindex(3, 5):
            scores = logits[block, slot] / (temperature if given is not None else 1)
            best = max(range(8), key=lambda j: scores[j] + (0 if given is None else given[block, slot, IDS[j]]))
            want[block, slot] = IDS[best]
        np.testing.assert_array_equal(drafts.tokens, want)
    assert len(np.unique(want)) > 4


def test_equal_logits_draft_the_lowest_id(tmp_path):
    head = load_drafter(reduced_folder(tmp_path, {"lm_head.weight": np.ones((8, 64), np.float32)})).head
    target = make_pair(6, vocab_size=160, width=64).target
    drafts = head(target, jnp.ones((1, 6, 64)), jnp.zeros(1, jnp.int32), DraftNoise(), 1.0)
    np.testing.assert_array_equal(drafts.tokens, np.full((1, 5), IDS[0]))


def test_block_is_read_by_own_embedding_and_mask_embedding(tmp_path):
    vector = np.full(64, 7.0, np.float32)
    target = make_pair(6, vocab_size=160, width=64).target
    tokens = jnp.array([3, 150, 150, 9], jnp.int32)
    rows = own_tensors()["embed_tokens.weight"][np.asarray(tokens)]
    head = load_drafter(reduced_folder(tmp_path / "a")).head
    np.testing.assert_array_equal(head.embed(target, tokens), rows)
    head = load_drafter(reduced_folder(tmp_path / "b", {"mask_embedding": vector})).head
    np.testing.assert_array_equal(head.embed(target, tokens), [rows[0], vector, vector, rows[3]])
    # On top of the target's embedding, and with the target's head.
    config = drafter_config()
    folder = write_folder(tmp_path / "c", config, drafter_tensors(config) | {"mask_embedding": vector})
    embedded = load_drafter(folder).head.embed(target, tokens)
    np.testing.assert_array_equal(embedded[1:3], [vector, vector])
    np.testing.assert_array_equal(embedded[::3], target.embed(tokens)[::3])


HEADS = {
    "reduced": LMHeadConfig(own_embedding=True, draft_vocab_size=9, mask_embedding=True),
    "full": LMHeadConfig(draft_vocab_size=16),
}


def pair_of(name: str) -> Pair:
    return make_pair(5, head=HEADS[name], seed=5)


@pytest.mark.parametrize(
    ("name", "temperature", "rule"),
    [("reduced", 0.0, "greedy"), *(("reduced", 1.0, rule) for rule in get_args(DraftRule)), ("full", 1.0, "coupled")],
)
def test_pairs_equal_plain_decoding(name, temperature, rule):
    def tokens(**how: Any) -> np.ndarray:
        config = DecodeConfig(temperature=temperature, draft_rule=rule, bucket_nodes=False, **how)
        return np.asarray(run(pair_of(name), make_prompts(), config, NEW).tokens)

    plain = tokens(method="ar")
    np.testing.assert_array_equal(tokens(attach="fallback"), plain)
    if rule == "coupled":
        np.testing.assert_array_equal(tokens(method="dflash"), plain)


# ---------------------------------------------------------------- files


@pytest.mark.parametrize("names", [("d2t", "t2d"), ("d2t",), ("draft_id_to_target_id",)])
def test_spellings_of_the_map(tmp_path, names):
    tensors = {"d2t": ..., "t2d": ...} | {name: marks() if name == "t2d" else own_tensors()["d2t"] for name in names}
    drafter = load_drafter(reduced_folder(tmp_path, tensors))
    assert drafter.config.head == LMHeadConfig(own_embedding=True, draft_vocab_size=8)
    np.testing.assert_array_equal(named_parameters(drafter)["head.target_ids"], IDS)


def test_both_layouts_of_a_config_agree(tmp_path):
    flat = load_drafter(reduced_folder(tmp_path / "a", num_target_layers=...))
    tensors = drafter_tensors(drafter_config()) | own_tensors()
    copies = {"verifier_norm.weight": np.ones(64, np.float32), "verifier_lm_head.weight": np.ones((8, 64), np.float32)}
    nested = write_folder(tmp_path / "b", speculators_config(), tensors | copies)
    assert is_drafter(nested)
    same(load_drafter(nested), flat)
    refuses(lambda: read_target_config(nested), "load_drafter")
    vllm = {"eagle_aux_hidden_state_layer_ids": [1, 3], "target_hidden_size": 64, "num_target_layers": ...}
    same(load_drafter(reduced_folder(tmp_path / "c", **vllm)), flat)


def test_windows_of_the_speculators_layout(tmp_path):
    sliding = {"layer_types": ["sliding_attention"] * 2, "use_sliding_window": True, "sliding_window": 9}
    layer = speculators_config()["transformer_layer_config"] | sliding
    for non_causal, want in ((False, "causal"), (True, "symmetric")):
        config = speculators_config(transformer_layer_config=layer, sliding_window_non_causal=non_causal)
        read = read_drafter_config(write_folder(tmp_path, config, {}))
        assert (read.sliding_layers, read.sliding_window, read.sliding_attention) == ((True, True), 9, want)


def test_a_full_vocabulary_needs_no_map(tmp_path):
    """The head is the file's where it holds one, else the target's."""
    head = {"lm_head.weight": np.ones((160, 64), np.float32), "d2t": ..., "t2d": ...}
    for changes in ({"draft_vocab_size": 160}, {"draft_vocab_size": ...}):
        drafter = load_drafter(reduced_folder(tmp_path / "own", head, **changes))
        assert drafter.config.head == LMHeadConfig(own_embedding=True, draft_vocab_size=160)
    none = head | {"lm_head.weight": ..., "embed_tokens.weight": ...}
    assert load_drafter(reduced_folder(tmp_path / "not", none, draft_vocab_size=160)).config.head == LMHeadConfig()


@pytest.mark.parametrize("mask", [{}, {"mask_embedding": np.linspace(0, 1, 64, dtype=np.float32)}])
def test_what_is_loaded_is_written_as_it_was(tmp_path, mask):
    folder = reduced_folder(tmp_path / "a", mask)
    save_drafter(load_drafter(folder), tmp_path / "b", dtype=jnp.float32)
    same(load_drafter(tmp_path / "b"), load_drafter(folder))
    old, new = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "b"))
    assert old.keys() == new.keys()
    for name, tensor in old.items():
        assert tensor.dtype == new[name].dtype, name
        np.testing.assert_array_equal(tensor, new[name])
    save_drafter(load_drafter(folder), tmp_path / "c")  # the map is no number to be rounded
    np.testing.assert_array_equal(named_parameters(load_drafter(tmp_path / "c"))["head.target_ids"], IDS)


def test_bad_files_are_refused(tmp_path):
    def load(changes=None, **config):
        return lambda: load_drafter(reduced_folder(tmp_path, changes, **config))

    offsets = own_tensors()["d2t"]
    refuses(load({"d2t": ...}), "missing tensors: d2t")
    refuses(load({"lm_head.weight": ..., "t2d": ...}), "missing tensors: lm_head.weight")
    refuses(load({"d2t": offsets + 2}), "d2t gives target ids", "0 to 159")
    refuses(load({"d2t": offsets - 1}), "d2t gives target ids")
    refuses(load({"d2t": np.where(np.arange(8) == 3, 0, offsets)}), "d2t gives target ids")
    refuses(load({"d2t": offsets.astype(np.float32)}), "d2t is F32")
    refuses(load({"t2d": marks(IDS[1:])}), "t2d marks 7 of 160")
    refuses(load({"t2d": marks(size=161)}), "t2d marks 8 of 161")
    refuses(load(draft_vocab_size=9), "lm_head.weight is 8x64, expected 9x64")
    refuses(load(draft_vocab_size=161), "draft_vocab_size is 161")
    refuses(load(draft_vocab_size=...), "lm_head.weight is 8x64, expected 160x64")
    refuses(load({"mask_embedding": np.zeros(32, np.float32)}), "mask_embedding is 32, expected 64")
    refuses(load(eagle_aux_hidden_state_layer_ids=[0, 2]), "eagle_aux_hidden_state_layer_ids", "plus one")
    refuses(load(target_hidden_size=32), "target_hidden_size", "equally wide")
    (tmp_path / "mask_embedding.pt").write_bytes(b"")
    refuses(load(), "mask_embedding.pt", "never opened", "tensor mask_embedding of 64")
    load({"mask_embedding": np.zeros(64, np.float32)})()


def test_bad_speculators_configs_are_refused(tmp_path):
    def read(**changes):
        return lambda: read_drafter_config(write_folder(tmp_path, speculators_config(**changes), {}))

    read()()
    refuses(read(speculators_model_type="eagle3"), "speculators_model_type", "dflash")
    refuses(read(speculators_model_type=...), "speculators_model_type is missing")
    refuses(read(projector_type="domino"), "projector_type", "Domino")
    refuses(read(sample_from_anchor=True), "sample_from_anchor")
    refuses(read(target_hidden_size=32), "target_hidden_size")
    refuses(read(aux_hidden_state_layer_ids=[0, 2]), "aux_hidden_state_layer_ids", "1 to")
    refuses(read(transformer_layer_config=[]), "transformer_layer_config")
    refuses(read(sliding_window_non_causal=1), "sliding_window_non_causal")
    refuses(read(hc_mult=4), "unknown field hc_mult")
    layer = speculators_config()["transformer_layer_config"]
    refuses(read(transformer_layer_config=layer | {"hc_mult": 4}), "unknown field hc_mult")
    refuses(read(transformer_layer_config=layer | {"model_type": "llama"}), "model_type")
