"""Ranks of a group as threads of the test's process, and the requests that they serve."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from helpers_worker import Output, Ring
from torch import Tensor

from actorium.actors.config.tree import (
    Config,
    DeviceConfig,
    MemoryConfig,
    ModelConfig,
    SchedulerConfig,
    SpeculationConfig,
)
from actorium.actors.params import ResolvedParams
from actorium.gpu.parallel.rank_group import RankGroup, RankPlace
from actorium.gpu.parallel.torch_group import TorchGroup, open_group
from actorium.gpu.worker.device import open_device

Body = Callable[[RankGroup], Any]


def gloo(place: RankPlace, path: Path, timeout_s: float) -> RankGroup:
    """A group of processes of torch, as ranks on GPUs are one, on the CPU."""
    path.mkdir(exist_ok=True)
    return TorchGroup(place, path, timeout_s, 20.0, torch.device("cpu"))


def run_ranks(path: Path, size: int, body: Body, timeout_s: float = 20.0,
              form: Callable[..., RankGroup] = open_group) -> list[Any]:
    """What each rank's `body` returned, or the exception it raised."""
    found: list[Any] = [None] * size

    def run(rank: int) -> None:
        try:
            group = form(RankPlace(rank, size), path, timeout_s)
            try:
                found[rank] = body(group)
            finally:
                group.close()
        except Exception as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def whole(found: list[Any]) -> list[Any]:
    """The same, where no rank raised."""
    for own in found:
        if isinstance(own, BaseException):
            raise own
    return found


# --- requests ------------------------------------------------------------------------------------

GREEDY = ResolvedParams(max_tokens=6, temperature=0.0, logprobs=3)


class Served(NamedTuple):
    """What one rank gave."""

    outputs: list[Output]
    logits: list[Tensor]
    """Of every step, and of those that draft."""
    preemptions: float


def opened_config(path: Path, **model: Any) -> Config:
    return Config(model=ModelConfig(model=str(path), **model),
                  memory=MemoryConfig(page_size=16, max_total_tokens=1600, checkpoints=2),
                  scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=48),
                  device=DeviceConfig(device="cpu", threads=1),
                  speculation=SpeculationConfig(speculative="auto"))


def asked() -> list[list[int]]:
    """The greedy prompts, of which the last is part of another one."""
    draw = torch.Generator().manual_seed(3)
    prompts = [torch.randint(2, 190, (n,), generator=draw).tolist() for n in (1, 40, 23)]
    return [*prompts, prompts[1][:35]]


def serve(config: Config, group: RankGroup, **ring: Any) -> Served:
    """Requests of several kinds, some of them twice, so that a prefix is found."""
    runner = open_device(config, 1, lambda *_: None, {}, group).runner
    seen: list[Tensor] = []

    def kept(logits: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def call(rows: Tensor) -> Tensor:
            seen.append(logits(rows).clone())
            return seen[-1]
        return call

    eagle = runner.model.eagle
    for name in ("logits", "head_logits"):  # with and without the final norm
        setattr(runner.model, name, kept(getattr(runner.model, name)))
    if eagle is not None:
        eagle.product.logits = kept(eagle.product.logits)  # type: ignore[method-assign]
    run = Ring(runner, budget=48, **ring)
    *prompts, part = asked()
    for prompt in prompts:
        run.submit(prompt, GREEDY)
    first = run.run()
    run.submit(part, GREEDY)
    run.submit(prompts[1], ResolvedParams(max_tokens=6, temperature=0.8, top_p=0.9), seed=11, n=2)
    run.submit(prompts[2], ResolvedParams(max_tokens=6, temperature=1.0, top_k=7,
                                          presence_penalty=0.4,
                                          repetition_penalty=1.1), seed=12)
    return Served(first + run.run()[len(first):], seen, run.preemptions)


def near(got: list[Tensor], want: list[Tensor]) -> bool:
    """Every step's logits to 1e-5 of their largest."""
    return len(got) == len(want) > 9 and all(
        one.shape == other.shape
        and float((one - other).abs().max()) <= 1e-5 * float(other.abs().max())
        for one, other in zip(got, want, strict=True))
