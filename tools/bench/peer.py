"""The same work through transformers: `python -m actorium.tools.bench.peer` with a `Job` on stdin.

sdpa attention, one static batch, greedy, the weights that the engine had: its own random ones, or
the checkpoint's. Prints a JSON list of `Measured`.
"""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct

from actorium.actors.config import Config
from actorium.actors.runtime.process import python, tied
from actorium.tools.bench.works import Measured, Work, prompts

if TYPE_CHECKING:
    from torch import Tensor

    from actorium.gpu.loader import Fused


class Job(Struct):
    """What to measure."""

    config: Config
    works: list[Work]
    vocab: int
    runs: int
    threads: int


def run(job: Job, say: Callable[[str], None]) -> list[Measured]:
    """Measure in a process of its own. Raises `RuntimeError` with its last line if it fails."""
    done = subprocess.Popen(tied(python("actorium.tools.bench.peer")),
                            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert done.stdin is not None and done.stderr is not None and done.stdout is not None
    with done:
        done.stdin.write(msgspec.json.encode(job))
        done.stdin.close()
        last = ""
        for line in done.stderr:
            last = line.decode(errors="replace").strip() or last
            if last.startswith("transformers "):
                say(last)
        output = done.stdout.read()
    if done.returncode != 0:
        raise RuntimeError(f"transformers: {last}")
    return msgspec.json.decode(output, type=list[Measured])


def main() -> int:
    """Entry of the process."""
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=Job)
    import torch

    torch.set_num_threads(job.threads)
    model, device = _model(job.config)
    found = [_measure(model, device, work, job) for work in job.works]
    sys.stdout.buffer.write(msgspec.json.encode(found))
    return 0


def _model(config: Config) -> tuple[Any, str]:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from actorium.actors.models import resolve
    from actorium.gpu.loader import random_tensors
    from actorium.gpu.models.registry import FAMILIES, read_shape, wanted_tensors

    path: Path = resolve(config.model.model)
    device = config.device.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    shape = read_shape(path, config)
    if config.model.load_format != "dummy":
        model = AutoModelForCausalLM.from_pretrained(path, dtype=shape.dtype,
                                                     attn_implementation="sdpa")
        return model.eval().to(device), device
    shape = replace(shape, mtp_layers=0)  # which transformers does not have
    weights = random_tensors(wanted_tensors(shape), shape.dtype, torch.device("cpu"),
                             config.model.seed, lambda *_: None)
    made = AutoConfig.from_pretrained(path)
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(made)
    names = set(empty.state_dict())
    fuse(weights, [own for own in FAMILIES[shape.architecture].model.fused(shape)
                   if own.name in names])
    model, told = type(empty).from_pretrained(
        None, config=made, state_dict=weights, dtype=shape.dtype, attn_implementation="sdpa",
        output_loading_info=True)
    wrong = {what: sorted(map(str, names))[:3] for what, names in told.items() if names}
    if wrong:
        raise RuntimeError(f"weights differ: {wrong}")
    return model.eval().to(device), device


def fuse(weights: dict[str, Tensor], fused: Sequence[Fused]) -> None:
    """Put the tensors that checkpoints have in one together again, in place: what `Fused.cut` does
    to numbered elements tells where each one goes."""
    import torch

    for own in fused:
        count = math.prod(own.shape)
        parts = list(own.cut(torch.arange(count).view(own.shape)))
        if not all(name in weights for name, _ in parts):
            continue
        whole = torch.empty(count, dtype=weights[parts[0][0]].dtype)
        for name, places in parts:
            whole[places.reshape(-1)] = weights.pop(name).reshape(-1)
        weights[own.name] = whole.view(own.shape)


def _measure(model: Any, device: str, work: Work, job: Job) -> Measured:
    import torch

    def complete(number: int, output: int) -> list[list[int]]:
        ids = torch.tensor(prompts(work, job.vocab, number), device=device)
        with torch.inference_mode():
            out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False,
                                 max_new_tokens=output, min_new_tokens=output, eos_token_id=None,
                                 pad_token_id=0, use_cache=True)
        result: list[list[int]] = out[:, ids.shape[1]:].tolist()
        return result

    complete(-1, min(4, work.output))
    seconds: list[float] = []
    tokens: list[list[int]] = []
    for number in range(job.runs):
        began = perf_counter()
        result = complete(number, work.output)
        seconds.append(perf_counter() - began)
        tokens = tokens or result
        print(f"transformers {work.name} run {number + 1}/{job.runs}: {seconds[-1]:.3f} s",
              file=sys.stderr, flush=True)
    return Measured(work.name, seconds, tokens)


if __name__ == "__main__":
    sys.exit(main())
