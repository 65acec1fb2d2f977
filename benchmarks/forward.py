"""Model-level speed: prefill and decode steps without the ring, as tokens/s on W1, W2 and W3.

    python benchmarks/forward.py --shape S06 --shape TINY --peer transformers --json out.json

W1: 1 request, 128 in / 128 out. W2: 32 requests, 128 in / 64 out (output tokens/s). W3: one prompt
of 2,048 tokens (prompt tokens/s). Random bf16 weights, greedy, end of sequence ignored. A figure is
the time of the prefill steps plus the number of decode steps times their median; the peer runs the
same work in the same process, its decode steps are the time between generations of two lengths.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "200")  # as in the worker; read when torch is loaded

import torch

from actorium.actors.config.tree import Config, ModelConfig
from actorium.gpu.models.registry import Model, load_model
from actorium.gpu.step.batch import ExtendRow, ForwardBatch
from actorium.gpu.step.pools import KVPagePool
from actorium.gpu.worker.device import keep_freed_memory

CPU = torch.device("cpu")
SHAPES: dict[str, dict[str, Any]] = {
    "S06": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
            "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
            "vocab_size": 151936, "rope_theta": 1e6},
    "TINY": {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 8,
             "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
             "vocab_size": 4096, "rope_theta": 1e6},
}
WORK = {"W1": (1, 128, 128), "W2": (32, 128, 64), "W3": (1, 2048, 1)}
"""requests, prompt tokens, new tokens"""
PAGE, BUDGET = 16, 2048


def hf_config(shape: str) -> dict[str, Any]:
    """config.json of a shape."""
    return {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_act": "silu",
            "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
            "dtype": "bfloat16", "eos_token_id": None, **SHAPES[shape]}


class Ours:
    """Our model with a pool whose pages are dealt out as decode allocates them: interleaved."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.pool = KVPagePool(model.shape, 400, PAGE, torch.bfloat16, CPU)

    def prefill(self, tables: list[list[int]], prompt: int) -> float:
        """Seconds to extend every prompt, in steps of at most BUDGET tokens."""
        start = time.perf_counter()
        per_step = max(1, BUDGET // prompt)
        for i in range(0, len(tables), per_step):
            self._run(self._extend(tables[i:i + per_step], prompt))
        return time.perf_counter() - start

    def decode(self, tables: list[list[int]], length: int) -> float:
        """Seconds of one decode step in which every sequence gets to `length` tokens."""
        start = time.perf_counter()
        self._run(self._decode(tables, length))
        return time.perf_counter() - start

    def _run(self, batch: ForwardBatch) -> None:
        self.model.logits(self.model.forward([batch], [self.pool])).argmax(-1)

    def _extend(self, tables: list[list[int]], count: int) -> ForwardBatch:
        place = torch.arange(count)
        index = [torch.tensor(t)[place // PAGE] * PAGE + place % PAGE for t in tables]
        total = count * len(tables)
        return ForwardBatch(
            tokens=torch.randint(0, self.model.shape.vocab_size, (total,)),
            positions=place.repeat(len(tables)), kv_index=torch.cat(index),
            extends=[ExtendRow(i, 0, count, torch.tensor(t, dtype=torch.int32))
                     for i, t in enumerate(tables)],
            extend_tokens=total, decode_rows=0, decode_pages=None, decode_kv_lens=None,
            max_kv_len=0, logit_rows=torch.arange(count - 1, total, count))

    def _decode(self, tables: list[list[int]], length: int) -> ForwardBatch:
        rows, at = len(tables), length - 1
        pages = torch.tensor(tables, dtype=torch.int32)
        return ForwardBatch(
            tokens=torch.randint(0, self.model.shape.vocab_size, (rows,)),
            positions=torch.full((rows,), at),
            kv_index=pages[:, at // PAGE].long() * PAGE + at % PAGE,
            extends=[], extend_tokens=0, decode_rows=rows, decode_pages=pages,
            decode_kv_lens=torch.full((rows,), length, dtype=torch.int32), max_kv_len=length,
            logit_rows=torch.arange(rows))


def page_tables(requests: int, length: int) -> list[list[int]]:
    """Page tables whose pages interleave between requests, page 0 left out."""
    width = -(-length // PAGE)
    return [[1 + p * requests + r for p in range(width)] for r in range(requests)]


def measure_ours(ours: Ours, work: str, steps: int, repeats: int) -> dict[str, float]:
    """Seconds of the prefill and of one decode step (medians), and tokens/s."""
    requests, prompt, new = WORK[work]
    tables = page_tables(requests, prompt + new)
    ours.prefill(tables, prompt)
    prefill = [ours.prefill(tables, prompt) for _ in range(repeats)]
    lengths = [prompt + 1 + i * (new - 1) // steps for i in range(steps)] if new > 1 else []
    decode = [ours.decode(tables, length) for length in lengths]
    return summary(work, statistics.median(prefill), statistics.median(decode) if decode else 0.0)


def summary(work: str, prefill: float, step: float) -> dict[str, float]:
    """Tokens/s as the workload counts them, with the parts in milliseconds."""
    requests, prompt, new = WORK[work]
    total = prefill + (new - 1) * step
    tokens = requests * (prompt if work == "W3" else new)
    return {"tok_s": tokens / total, "prefill_ms": prefill * 1e3, "step_ms": step * 1e3}


def measure_transformers(peer: Any, work: str, steps: int, repeats: int) -> dict[str, float]:
    """The same work through `generate` (sdpa, static batch)."""
    requests, prompt, new = WORK[work]
    ids = torch.randint(0, peer.config.vocab_size, (requests, prompt))

    def run(count: int) -> float:
        start = time.perf_counter()
        peer.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count,
                      min_new_tokens=count, do_sample=False)
        return time.perf_counter() - start

    run(2)
    prefill = statistics.median(run(1) for _ in range(repeats))
    step = max(0.0, statistics.median(run(1 + steps) for _ in range(repeats)) - prefill) / steps
    return summary(work, prefill, step if new > 1 else 0.0)


def load_peer(shape: str) -> Any:
    """The same shape in transformers, random bf16 weights."""
    import transformers

    raw = {k: v for k, v in hf_config(shape).items() if k not in ("architectures", "model_type")}
    config = transformers.Qwen3Config(**raw)
    return transformers.Qwen3ForCausalLM(config).to(torch.bfloat16).eval()


def bench(shape: str, args: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """All asked workloads of one shape; prints a line each."""
    (scratch / "config.json").write_text(json.dumps(hf_config(shape)))
    config = Config(model=ModelConfig(load_format="dummy"))
    ours = Ours(load_model(scratch, config, CPU, lambda *_: None))
    peer = load_peer(shape) if args.peer else None
    out: dict[str, Any] = {}
    for work in args.work or WORK:
        row: dict[str, Any] = {"ours": measure_ours(ours, work, args.steps, args.repeats)}
        if peer is not None:
            peer_steps = max(4, args.steps // 4)
            row["transformers"] = measure_transformers(peer, work, peer_steps, args.repeats)
            row["ratio"] = row["ours"]["tok_s"] / row["transformers"]["tok_s"]
        out[work] = row
        print(shape, work, " | ".join(map(_show, row.items())), flush=True)
    return out


def _show(item: tuple[str, Any]) -> str:
    name, value = item
    if isinstance(value, float):
        return f"{name} {value:.2f}x"
    return (f"{name} {value['tok_s']:,.1f} tok/s (prefill {value['prefill_ms']:.1f} ms, "
            f"step {value['step_ms']:.2f} ms)")


def main() -> None:
    """Parse flags, run, print, and write JSON."""
    import tempfile

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--shape", action="append", choices=SHAPES)
    parser.add_argument("--work", action="append", choices=WORK)
    parser.add_argument("--peer", choices=["transformers"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=40, help="decode steps timed per workload")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if not args.peer:
        keep_freed_memory()  # of the process: it would help the peer as well
    quiet: Callable[[], None] = lambda: None  # noqa: E731
    if args.peer:
        import transformers

        quiet = transformers.logging.set_verbosity_error
    quiet()
    with tempfile.TemporaryDirectory() as scratch:
        result = {shape: bench(shape, args, Path(scratch)) for shape in args.shape or SHAPES}
    if args.json:
        args.json.write_text(json.dumps({"threads": args.threads, "results": result}, indent=1))


if __name__ == "__main__":
    main()
