"""How long the weights of a large GGUF file take to load, beside reading the file twice.

    python benchmarks/loading.py [--rounds 5] [--layers 24] [--file FILE] [--json FILE]

The file is made here: random blocks in Llama-3-8B's shape, matrices by turns in Q4_0, Q4_K and
Q8_0, with as many layers as asked for (24: 3.8 GB). Each round measures, by turns and each in a
process of its own: reading the file twice into one buffer, reading it twice into fresh memory of
its size (what every loader must at least touch once), and `load_model`. `cold` rounds have the
file's pages dropped from the system's cache before (`posix_fadvise`), `warm` ones do not.
Told: medians, and the ratios of `load` to both.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

HIDDEN, INNER, HEADS, KEY_HEADS, VOCAB = 4096, 14336, 32, 8, 32000
KINDS = ((Type.Q4_0, (0,)), (Type.Q4_K, (0, 2)), (Type.Q8_0, (0,)))
"""Types of matrices by turns, and where their blocks have f16 scales."""
TIMED = """
import sys, time
from pathlib import Path
{before}
began = time.perf_counter()
{what}
print(time.perf_counter() - began)
"""
READ = ("import mmap", """
with open(sys.argv[1], 'rb', buffering=0) as file:
    for _ in range(2):
        file.seek(0)
        {fresh}
        while got := file.readinto({where}):
            at = at + got
""")
WAYS = {
    "read twice, one buffer": (READ[0] + "\nat, whole = 0, memoryview(bytearray(1 << 20))",
                               READ[1].format(fresh="", where="whole")),
    "read twice, fresh memory": (
        READ[0] + "\nsize = Path(sys.argv[1]).stat().st_size",
        READ[1].format(fresh="at, whole = 0, memoryview(mmap.mmap(-1, size + (1 << 20)))",
                       where="whole[at:at + (1 << 20)]")),
    "load": ("""
import torch
from actorium.actors.config.tree import Config
from actorium.actors.models.gguf_folder import gguf_folder
from actorium.gpu.models.registry import load_model
from actorium.kernels.cpu.native_library import library
library()
torch.ones(64, 64).bfloat16() @ torch.ones(64, 64).bfloat16()
folder = gguf_folder(Path(sys.argv[1]))""",
             "load_model(folder, Config(), torch.device('cpu'), lambda *_: None)"),
}


def blocks(rng: np.random.Generator, rows: int, columns: int, kind: Type,
           scales: tuple[int, ...]) -> np.ndarray:
    """Random blocks of a matrix, uint8 [rows, bytes of a row], with small finite scales."""
    numbers, size = gguf.GGML_QUANT_SIZES[kind]
    raw = np.frombuffer(rng.bytes(rows * columns // numbers * size), np.uint8)
    raw = raw.reshape(rows, columns // numbers, size).copy()
    for at in scales:
        small = rng.uniform(-1e-3, 1e-3, raw.shape[:-1]).astype(np.float16)
        raw[..., at:at + 2] = small[..., None].view(np.uint8)
    return raw.reshape(rows, -1)


def write(path: Path, layers: int) -> None:
    """The file, tensor by tensor kept in memory until all are written."""
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(str(path), "llama", use_temp_file=False)
    writer.add_block_count(layers)
    writer.add_context_length(8192)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KEY_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(500000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list([f"t{number}" for number in range(VOCAB)])
    writer.add_token_types([1] * VOCAB)
    writer.add_token_merges(["t0 t1"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    shared = HIDDEN // HEADS * KEY_HEADS
    matrices = {"attn_q": (HIDDEN, HIDDEN), "attn_k": (shared, HIDDEN), "attn_v": (shared, HIDDEN),
                "attn_output": (HIDDEN, HIDDEN), "ffn_gate": (INNER, HIDDEN),
                "ffn_up": (INNER, HIDDEN), "ffn_down": (HIDDEN, INNER)}
    norm = np.ones(HIDDEN, np.float32)
    shapes = {"token_embd": (VOCAB, HIDDEN), "output": (VOCAB, HIDDEN)}
    for layer in range(layers):
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in matrices.items()}
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{name}.weight", norm)
    writer.add_tensor("output_norm.weight", norm)
    for number, (name, shape) in enumerate(shapes.items()):
        kind, scales = KINDS[number % len(KINDS)]
        writer.add_tensor(f"{name}.weight", blocks(rng, *shape, kind, scales), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def seconds(way: str, file: Path, cold: bool) -> float:
    """Of one process, imports and the making of the file's directory left out."""
    before, what = WAYS[way]
    if cold:
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    done = subprocess.run([sys.executable, "-c", TIMED.format(before=before, what=what), str(file)],
                          check=True, capture_output=True, text=True)
    return float(done.stdout)


def measured(file: Path, rounds: int) -> dict[str, dict[str, float]]:
    """Median seconds of each way by turns, and the ratios of loading to reading."""
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
    seconds("load", file, False)
    found = {}
    for cold in (False, True):
        times: dict[str, list[float]] = {way: [] for way in WAYS}
        for _ in range(rounds):
            for way in WAYS:
                times[way].append(seconds(way, file, cold))
        own = {way: round(statistics.median(each), 2) for way, each in times.items()}
        own |= {f"load / {way}": round(statistics.median(
            a / b for a, b in zip(times["load"], times[way], strict=True)), 2)
            for way in WAYS if way != "load"}
        found["cold" if cold else "warm"] = own
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--file", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        file = options.file or Path(folder) / "large.gguf"
        if not file.exists():
            write(file, options.layers)
        found = {"bytes": file.stat().st_size} | measured(file, options.rounds)
    print(json.dumps(found, indent=1))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
