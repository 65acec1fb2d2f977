"""The same workloads through transformers, in a process that stays:
`python -m actorium.tools.bench.transformers_peer`.

sdpa attention, one static batch, greedy, the weights that the engine has: its own random ones, or
the checkpoint's. The first line of JSON on stdin is a `PeerModel`, answered by an empty line when
the model is there; every further one is a `PeerRun`, answered by a `WorkloadRun`. In between it
sleeps, reading.
"""

from __future__ import annotations

import contextlib
import math
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import IO, TYPE_CHECKING, Any

import msgspec
from msgspec import Struct

from actorium.actors.config.tree import Config
from actorium.actors.runtime.process import python, tied
from actorium.tools.bench.workloads import Workload, WorkloadRun, prompts

if TYPE_CHECKING:
    from torch import Tensor

    from actorium.gpu.weights.loader import Fused


class PeerModel(Struct):
    config: Config
    vocab: int
    threads: int


class PeerRun(Struct):
    work: Workload
    number: int
    """Number of the run, which selects the prompts."""
    output: int
    """Tokens to complete each prompt by."""


@contextlib.contextmanager
def opened(job: PeerModel) -> Iterator[TransformersPeer]:
    """The process with its model. Raises `RuntimeError` with its last line if it fails."""
    with tempfile.TemporaryFile() as stderr, subprocess.Popen(  # a pipe could fill up
            tied(python("actorium.tools.bench.transformers_peer")), stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=stderr) as process:
        try:
            theirs = TransformersPeer(process, stderr)
            theirs.ask(job)
            yield theirs
        finally:
            process.kill()
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()


class TransformersPeer:
    name = "transformers"

    def __init__(self, process: subprocess.Popen[bytes], stderr: IO[bytes]) -> None:
        """stderr: what it has written there."""
        self.process, self._stderr = process, stderr

    def run(self, work: Workload, number: int, output: int) -> WorkloadRun:
        """See `MeasuredEngine`. Raises `RuntimeError` as `opened` does."""
        return msgspec.json.decode(self.ask(PeerRun(work, number, output)), type=WorkloadRun)

    def ask(self, message: PeerModel | PeerRun) -> bytes:
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin is not None and stdout is not None
        with contextlib.suppress(BrokenPipeError):  # no answer then
            stdin.write(msgspec.json.encode(message) + b"\n")
            stdin.flush()
        answer = stdout.readline()
        if not answer:
            self.process.wait()
            self._stderr.seek(0)
            lines = self._stderr.read().decode(errors="replace").split("\n")
            last = next((line.strip() for line in reversed(lines) if line.strip()), "no answer")
            raise RuntimeError(f"transformers: {last}")
        return answer


def main() -> int:
    lines = iter(sys.stdin.buffer.readline, b"")
    job = msgspec.json.decode(next(lines), type=PeerModel)
    import torch

    torch.set_num_threads(job.threads)
    model, device = _model(job.config)
    _answer(b"")
    for line in lines:
        ask = msgspec.json.decode(line, type=PeerRun)
        _answer(msgspec.json.encode(_run(model, device, ask, job.vocab)))
    return 0


def _answer(line: bytes) -> None:
    sys.stdout.buffer.write(line + b"\n")
    sys.stdout.buffer.flush()


def _model(config: Config) -> tuple[Any, str]:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from actorium.actors.models.model_dir import resolve
    from actorium.gpu.families.architectures import model_tensors, read_shape
    from actorium.gpu.models.registry import decoder_of
    from actorium.gpu.weights.dtypes import TORCH_DTYPES
    from actorium.gpu.weights.lazy_tensors import materialised
    from actorium.gpu.weights.random_weights import random_tensors

    path: Path = resolve(config.model.model)
    device = config.device.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    shape = read_shape(path, config)
    if config.model.load_format != "dummy":
        model = AutoModelForCausalLM.from_pretrained(path, dtype=TORCH_DTYPES[shape.dtype],
                                                     attn_implementation="sdpa")
        return model.eval().to(device), device
    shape = replace(shape, mtp_layers=0)  # which transformers does not have
    drawn = random_tensors(model_tensors(shape), TORCH_DTYPES[shape.dtype], torch.device("cpu"),
                           config.model.seed, lambda *_: None)
    weights = {name: materialised(own) for name, own in drawn.items()}
    made = AutoConfig.from_pretrained(path)
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(made)
    names = set(empty.state_dict())
    fuse(weights, [own for own in decoder_of(shape.architecture).fused(shape)
                   if own.name in names])
    model, info = type(empty).from_pretrained(
        None, config=made, state_dict=weights, dtype=TORCH_DTYPES[shape.dtype],
        attn_implementation="sdpa", output_loading_info=True)
    wrong = {what: sorted(map(str, names))[:3] for what, names in info.items() if names}
    if wrong:
        raise RuntimeError(f"weights differ: {wrong}")
    return model.eval().to(device), device


def fuse(weights: dict[str, Tensor], fused: Sequence[Fused]) -> None:
    """Put the tensors that checkpoints have in one together again, in place: what `Fused.cut` does
    to numbered elements shows where each one goes."""
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


def _run(model: Any, device: str, ask: PeerRun, vocab: int) -> WorkloadRun:
    import torch

    batch = prompts(ask.work, vocab, ask.number)
    began = perf_counter()
    ids = torch.tensor(batch, device=device)
    with torch.inference_mode():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False,
                             max_new_tokens=ask.output, min_new_tokens=ask.output,
                             eos_token_id=None, pad_token_id=0, use_cache=True)
    tokens: list[list[int]] = out[:, ids.shape[1]:].tolist()
    return WorkloadRun(perf_counter() - began, tokens)


if __name__ == "__main__":
    sys.exit(main())
