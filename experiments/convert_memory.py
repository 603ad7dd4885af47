"""`python -m experiments.convert_memory`: what a conversion holds in memory, leaves behind, and restores.

Makes a Qwen3 checkpoint of random weights (about 3 GB in 6 shards), converts it in a process of its
own, prints that process's peak beside the largest tensor and the bound, kills a second conversion
half-way and runs it again, and restores on 1 and 8 devices what was saved for 1 and for 8.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

WIDTH, MLP, HEADS, KV_HEADS, HEAD_DIM, VOCAB, SHARDS = 2048, 6144, 16, 8, 128, 151936, 6
DTYPE_BYTES = 2  # bfloat16


def main() -> int:
    """Runs all steps; returns 0 where each did what it should."""
    parser = argparse.ArgumentParser(prog="python -m experiments.convert_memory", description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=3.0, help="of the checkpoint (default %(default)s)")
    parser.add_argument("--folder", type=Path, help="where to work; default: a temporary folder")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--child", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        return _child(options.child)
    if options.folder is not None:
        options.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="convert-memory-", dir=options.folder) as folder:
        return _run(Path(folder), options.gigabytes, options.seed)


def _run(folder: Path, gigabytes: float, seed: int) -> int:
    source, out, again, out8 = (folder / name for name in ("source", "out", "again", "out8"))
    shapes = make_checkpoint(source, gigabytes, seed)
    size = sum(math.prod(shape) for shape in shapes.values()) * DTYPE_BYTES
    largest = max(math.prod(shape) for shape in shapes.values()) * DTYPE_BYTES
    print(f"checkpoint        {size / 1e6:8.0f} MB in {SHARDS} shards, {len(shapes)} tensors")

    imports = _start("imports")
    seconds = -time.monotonic()
    peak = _start("convert", source, "--out", out)
    seconds += time.monotonic()
    bound = imports + 1.5 * largest
    print(f"largest tensor    {largest / 1e6:8.0f} MB")
    print(f"imports alone     {imports / 1e6:8.0f} MB")
    print(f"peak              {peak / 1e6:8.0f} MB in {seconds:.0f} s")
    print(f"bound             {bound / 1e6:8.0f} MB = imports + 1.5 x the largest tensor")
    assert peak < bound, "the peak is above the bound"

    _kill_half_way(source, again, size)
    left = sorted(path.name for path in folder.glob("again*"))
    assert left == ["again.partial"], left
    print(f"killed half-way   {_size(folder / 'again.partial') / 1e6:8.0f} MB in again.partial, no folder again")
    _start("convert", source, "--out", again)
    assert sorted(path.name for path in folder.glob("again*")) == ["again"]
    first, second = (json.loads((path / "reanchor_manifest.json").read_text()) for path in (out, again))
    assert first["tensors"] == second["tensors"] and first["files"].keys() == second["files"].keys()
    assert {p.relative_to(out) for p in out.rglob("*")} == {p.relative_to(again) for p in again.rglob("*")}
    print("converted again   same files, same hashes as the run that nobody killed; no partial folder is left")
    _start("verify", again, source)
    print("verified          every tensor equals the source's by hash")

    _start("convert", source, "--out", out8, "--mesh", 8, devices=8)
    for saved, path in ((1, out), (8, out8)):
        for devices in (1, 8):
            peak = _start("restore", path, devices, devices=devices)
            print(f"saved for {saved}, restored on {devices}: equal, by plain Orbax too; peak {peak / 1e6:.0f} MB")
    return 0


def make_checkpoint(folder: Path, gigabytes: float, seed: int) -> dict[str, tuple[int, ...]]:
    """Writes config.json, shards and index; returns the tensors' shapes. One tensor is in memory at a time."""
    layer = 2 * WIDTH * HEAD_DIM * (HEADS + KV_HEADS) + 3 * WIDTH * MLP
    num_layers = max(1, round((gigabytes * 1e9 / DTYPE_BYTES - VOCAB * WIDTH) / layer))
    shapes = dict(_shapes(num_layers))
    folder.mkdir()
    config = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": False, "bos_token_id": None,
        "eos_token_id": 2, "head_dim": HEAD_DIM, "hidden_act": "silu", "hidden_size": WIDTH, "intermediate_size": MLP,
        "max_position_embeddings": 4096, "num_attention_heads": HEADS, "num_hidden_layers": num_layers,
        "num_key_value_heads": KV_HEADS, "rms_norm_eps": 1e-6, "rope_scaling": None, "rope_theta": 1e6,
        "tie_word_embeddings": True, "use_sliding_window": False, "vocab_size": VOCAB,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    names = list(shapes)
    per_shard = math.ceil(len(names) / SHARDS)
    shard_of = {name: f"model-{n // per_shard + 1:05}-of-{SHARDS:05}.safetensors" for n, name in enumerate(names)}
    for shard in sorted(set(shard_of.values())):
        _write_shard(folder / shard, {name: shapes[name] for name in names if shard_of[name] == shard}, seed)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": shard_of}))
    return shapes


def _shapes(num_layers: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "model.embed_tokens.weight", (VOCAB, WIDTH)
    for layer in range(num_layers):
        at = f"model.layers.{layer}."
        yield at + "input_layernorm.weight", (WIDTH,)
        yield at + "self_attn.q_proj.weight", (HEADS * HEAD_DIM, WIDTH)
        yield at + "self_attn.k_proj.weight", (KV_HEADS * HEAD_DIM, WIDTH)
        yield at + "self_attn.v_proj.weight", (KV_HEADS * HEAD_DIM, WIDTH)
        yield at + "self_attn.o_proj.weight", (WIDTH, HEADS * HEAD_DIM)
        yield at + "self_attn.q_norm.weight", (HEAD_DIM,)
        yield at + "self_attn.k_norm.weight", (HEAD_DIM,)
        yield at + "post_attention_layernorm.weight", (WIDTH,)
        yield at + "mlp.gate_proj.weight", (MLP, WIDTH)
        yield at + "mlp.up_proj.weight", (MLP, WIDTH)
        yield at + "mlp.down_proj.weight", (WIDTH, MLP)
    yield "model.norm.weight", (WIDTH,)


def _write_shard(path: Path, shapes: dict[str, tuple[int, ...]], seed: int) -> None:
    """A safetensors file, tensor by tensor, which the library does not write: length, header, bytes."""
    import ml_dtypes
    import numpy as np

    header, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + math.prod(shape) * DTYPE_BYTES
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, shape in shapes.items():
            rng = np.random.default_rng([seed, *name.encode()])
            for start in range(0, math.prod(shape), 1 << 24):
                values = rng.standard_normal(min(1 << 24, math.prod(shape) - start), np.float32)
                file.write((values * np.float32(0.02)).astype(ml_dtypes.bfloat16).tobytes())


def _command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "experiments.convert_memory", "--child", *map(str, arguments)]


def _environment(devices: int) -> dict[str, str]:
    flags = f"--xla_force_host_platform_device_count={devices}"
    return {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "HF_HUB_OFFLINE": "1"}


def _start(*arguments: object, devices: int = 1) -> int:
    """Runs a step in a process of its own; returns the most bytes that were resident in it."""
    done = subprocess.run(_command(*arguments), env=_environment(devices), stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, arguments))} failed with code {done.returncode}: {done.stdout}")
    return int(done.stdout.splitlines()[-1])


def _kill_half_way(source: Path, out: Path, size: int) -> None:
    """Starts a conversion and kills it when half of the bytes are written."""
    partial = out.with_name(out.name + ".partial")
    process = subprocess.Popen(_command("convert", source, "--out", out), env=_environment(1))
    while _size(partial) < size / 2:
        assert process.poll() is None, "it ended before it was killed"
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()


def _size(folder: Path) -> int:
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            path = Path(root) / name
            total += path.stat().st_size if path.exists() else 0  # files are renamed as they are completed
    return total


def _child(arguments: list[str]) -> int:
    """One step, measured from inside: VmHWM is of this program alone, without what the parent held."""
    from convert.__main__ import main as convert

    step, *rest = arguments
    if step == "restore":
        return _restore(Path(rest[0]), int(rest[1]))
    code = 0 if step == "imports" else convert(arguments)
    print(_peak())
    return code


def _peak() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def _restore(folder: Path, devices: int) -> int:
    """Restores a target on a mesh, with this package and with plain Orbax; 0 if all hashes are the manifest's.

    Prints the peak of the first: on a CPU the devices' memory, which holds the model, is the host's.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np
    import orbax.checkpoint as ocp
    from jax.sharding import AxisType

    from reanchor_jax.checkpoint import load_target
    from reanchor_jax.checkpoint.fill import named_parameters
    from reanchor_jax.checkpoint.manifest import PARAMETERS, read_manifest

    assert len(jax.devices()) == devices
    mesh = jax.make_mesh((devices,), ("model",), axis_types=(AxisType.Auto,))
    parameters = named_parameters(load_target(folder, dtype=jnp.bfloat16, mesh=mesh))
    print(_peak())
    abstract = {
        name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding) for name, leaf in parameters.items()
    }
    if not _equal(parameters, read_manifest(folder).tensors.values(), np):
        return 1
    del parameters
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(folder / PARAMETERS, abstract)
    return 0 if _equal(restored, read_manifest(folder).tensors.values(), np) else 1


def _equal(parameters, records, np) -> bool:
    held, array = "", np.empty(0)
    for record in records:
        if record.parameter != held:  # whole on the host, once: rows of a sharded array come one by one
            held, array = record.parameter, np.asarray(parameters[record.parameter])
        row = np.ascontiguousarray(array if record.row is None else array[record.row])
        if hashlib.sha256(row.reshape(-1).view(np.uint8).data).hexdigest() != record.sha256:
            print(f"{record.parameter}[{record.row}] differs", file=sys.stderr)
            return False
    return True


if __name__ == "__main__":
    sys.exit(main())
