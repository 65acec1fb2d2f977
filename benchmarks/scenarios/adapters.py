"""What LoRA adapters cost: decode steps with them, of the model beside them, and without any.

`decodes`: random weights of a shape and random adapters on all its modules, in bfloat16 on one
thread. Engines take turns step by step; counted is processor time, of which other processes take
none. `servers`: streams over HTTP, beside vLLM.
"""

from __future__ import annotations

import json
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np
import torch
from harness import Rows, scenario, take_turns
from safetensors import safe_open
from safetensors.torch import save_file
from scenarios.peers import (
    ACTORIUM,
    CONTEXT,
    VLLM,
    VLLM_BIN,
    Programs,
    Server,
    check_programs,
    command,
    serving,
    version,
)

from actorium.actors.config.adapter_settings import AdapterConfig
from actorium.actors.config.tree import (
    Config,
    DeviceConfig,
    MemoryConfig,
    ModelConfig,
    SchedulerConfig,
)
from actorium.actors.messages import Admit, StepPlan
from actorium.actors.params import ResolvedParams
from actorium.gpu.adapters.adapter_reader import AdapterPart, HostAdapter
from actorium.gpu.step.runner import ModelRunner
from actorium.gpu.worker.device import open_device
from actorium.tools.bench.workloads import shape_dir

PROMPT, ROOM = 64, 192
"""Tokens of each prompt, and what a sequence has room for."""


class Batch(NamedTuple):
    """Sequences of a runner that decode together."""

    runner: ModelRunner
    slots: np.ndarray

    def decode(self, steps: Iterator[int]) -> float:
        """Milliseconds of processor time of a step."""
        plan, start = StepPlan(1, next(steps), decode=self.slots.tobytes()), time.process_time_ns()
        self.runner.run(plan)
        return (time.process_time_ns() - start) / 1e6


def opened(folder: Path, slots: int, adapters: int, rank: int) -> ModelRunner:
    """adapters: random ones, with numbers from 1; 0 = none are served."""
    lora = AdapterConfig(enable_lora=True, max_loras=adapters, max_lora_rank=rank)
    config = Config(
        model=ModelConfig(model=str(folder), load_format="dummy", dtype="bfloat16"),
        device=DeviceConfig(device="cpu", threads=1), memory=MemoryConfig(
            kv_cache_bytes=1 << 32, max_total_tokens=slots * (ROOM + 16)),
        scheduler=SchedulerConfig(max_num_seqs=slots),
        adapters=lora if adapters else AdapterConfig())
    runner = open_device(config, 1, lambda *_: None, {}).runner
    if runner.adapters is not None:
        for number in range(1, adapters + 1):
            runner.adapters.known[1, number] = random_adapter(runner, rank, number)
    return runner


def batch(runner: ModelRunner, first: int, sequences: int, used: int) -> Batch:
    """Sequences in slots from the first on, their prompts computed. used: adapters that they have,
    in turn with the model by itself."""
    each = ROOM // runner.tables.page_size
    admits, appends, extends = [], [], []
    slots = np.arange(first, first + sequences, dtype=np.int32)
    for slot in slots.tolist():
        tokens = np.arange(slot, slot + PROMPT, dtype=np.int32).tobytes()
        admits.append(Admit(slot, tokens, PROMPT, 0, b"",
                            ResolvedParams(max_tokens=ROOM - PROMPT, temperature=0.0), 1,
                            adapter=slot % (used + 1)))
        appends += [[slot, i, (slot - 1) * each + i + 1] for i in range(each)]
        extends.append([slot, PROMPT])
    runner.run(StepPlan(1, 1, admit=admits, page_appends=np.array(appends, np.int32).tobytes(),
                        extend=np.array(extends, np.int32).tobytes()))
    return Batch(runner, slots)


def random_adapter(runner: ModelRunner, rank: int, number: int) -> HostAdapter:
    """One on all modules that can have one."""
    assert runner.adapters is not None
    stacks, parts = runner.adapters.layers.stacks, []
    generator = torch.Generator().manual_seed(number)
    for product, stack in enumerate(stacks):
        for module, width in enumerate(stack.widths):
            a, b = (torch.randn(size, generator=generator).mul_(0.01).bfloat16()
                    for size in ((rank, stack.ins), (rank, width)))
            parts.append(AdapterPart(product, module, a, b, 1.0))
    return HostAdapter(bytes([number] * 32), parts)


@scenario
def decodes(shape: str = "S06", sequences: int = 32, adapters: int = 8, rank: int = 16,
            turns: int = 40) -> Rows:
    """Steps of decodes: none served; served and none named; all of them beside the model; one."""
    with tempfile.TemporaryDirectory() as folder:
        path = shape_dir(shape, Path(folder))
        without = opened(path, 3 * sequences, 0, rank)
        served = opened(path, 3 * sequences, adapters, rank)
    kinds = {"none named": 0, "1 beside the model": 1, f"{adapters} beside the model": adapters}
    batches = {"none served": batch(without, 1, sequences, 0)} | {
        name: batch(served, 1 + at * sequences, sequences, used)
        for at, (name, used) in enumerate(kinds.items())}
    steps = count(2)
    spent = take_turns({name: partial(own.decode, steps) for name, own in batches.items()}, turns)
    least = {name: min(own) for name, own in spent.items()}
    for name, own in least.items():
        yield {"sequences have": name, "ms": own, "of none served": least["none served"] / own}


# --- servers -------------------------------------------------------------------------------------

ENGINES = [ACTORIUM, VLLM]


def write_adapters(model: Path, folder: Path, number: int, rank: int) -> dict[str, Path]:
    """Writes random adapters as PEFT does, on every matrix of the model's layers. Returns their
    folders by name."""
    with safe_open(model / "model.safetensors", "pt") as file:
        shapes = {name.removesuffix(".weight"): file.get_slice(name).get_shape()
                  for name in file.keys() if name.endswith("_proj.weight")}  # noqa: SIM118
    targets = sorted({name.rpartition(".")[2] for name in shapes})
    found = {}
    for index in range(number):
        generator, tensors = torch.Generator().manual_seed(index), {}
        for name, (outs, ins) in shapes.items():
            for side, size in (("A", (rank, ins)), ("B", (outs, rank))):
                tensors[f"base_model.model.{name}.lora_{side}.weight"] = torch.randn(
                    size, generator=generator).mul_(0.01).bfloat16()
        own = folder / f"adapter{index}"
        own.mkdir()
        save_file(tensors, own / "adapter_model.safetensors")
        (own / "adapter_config.json").write_text(json.dumps({
            "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": rank,
            "lora_dropout": 0.0, "bias": "none", "target_modules": targets,
            "base_model_name_or_path": str(model)}))
        found[own.name] = own
    return found


def streamed(url: str, names: Sequence[str], output: int) -> float:
    """Tokens a second of requests that begin together. names: of each one's adapter, or model."""
    def ask(number: int) -> int:
        prompt = [5 + (number * 37 + i) % 1000 for i in range(128)]
        body = {"model": names[number], "prompt": prompt, "max_tokens": output,
                "temperature": 0, "ignore_eos": True}
        request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(),
                                         {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=600) as answer:
            return int(json.loads(answer.read())["usage"]["completion_tokens"])

    start = time.perf_counter()
    with ThreadPoolExecutor(len(names)) as pool:
        tokens = sum(pool.map(ask, range(len(names))))
    return tokens / (time.perf_counter() - start)


def served(server: Server, model: str, adapters: Sequence[str], streams: int, output: int,
           programs: Programs, turns: int) -> dict[str, float]:
    """A server's tokens a second, by what its requests have; adapters: names, none = of a server
    without any."""
    with serving(command(server, model, CONTEXT, streams, programs)) as url:
        with urllib.request.urlopen(f"{url}/v1/models") as answer:
            base = json.loads(answer.read())["data"][0]["id"]
        kinds = {"none served": [base]} if not adapters else {
            "none named": [base], "1 beside the model": [base, adapters[0]],
            f"{len(adapters)} beside the model": [base, *adapters]}
        batches = {kind: [names[i % len(names)] for i in range(streams)]
                   for kind, names in kinds.items()}
        for batch in batches.values():  # what is compiled or captured at the first step of a size
            streamed(url, batch, output)
        found = take_turns({kind: partial(streamed, url, batch, output)
                            for kind, batch in batches.items()}, turns)
    return {kind: median(own) for kind, own in found.items()}


@scenario
def servers(model: str, engines: list[str] = ENGINES, adapters: int = 8, rank: int = 16,
            streams: int = 32, output: int = 64, vllm: str = VLLM_BIN, turns: int = 3) -> Rows:
    """Tokens a second of streams over HTTP, with adapters and without, beside vLLM.

    MODEL: a folder in HF format with model.safetensors and a tokenizer. Each server is started
    without adapters, and then with random ones of this rank on all modules. Sums of tokens over the
    seconds from the first request to the last answer, prompts of 128 tokens included.
    """
    programs = Programs(vllm)
    check_programs(set(engines), programs)
    with tempfile.TemporaryDirectory() as folder:
        paths = write_adapters(Path(model), Path(folder), adapters, rank)
        flags = ("--enable-lora", "--max-loras", str(adapters), "--max-lora-rank", str(rank),
                 "--lora-modules", *(f"{name}={path}" for name, path in paths.items()))
        for engine in engines:
            found = served(Server(engine), model, (), streams, output, programs, turns)
            found |= served(Server(engine, flags=flags), model, list(paths), streams, output,
                            programs, turns)
            for kind, speed in found.items():
                yield {"engine": engine, "version": version(engine, programs),
                       "requests have": kind, "tok/s": speed,
                       "of none served": speed / found["none served"]}
