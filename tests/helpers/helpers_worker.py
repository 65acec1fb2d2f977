"""The scheduler and the worker's runner in one process: a ring without sockets."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from actorium.actors.config.parsed_values import GRAMMAR, parse_speculative
from actorium.actors.config.tree import (
    Config,
    MemoryConfig,
    RecoveryConfig,
    SchedulerConfig,
    SpeculationConfig,
)
from actorium.actors.core import Context
from actorium.actors.messages import (
    AbortRequest,
    Masks,
    Open,
    PageGroup,
    Pooled,
    Ready,
    Reset,
    RowExperts,
    RowLogprobs,
    RowMask,
    StepPlan,
    Stop,
    Submit,
    TokenBatch,
)
from actorium.actors.params import ResolvedParams, ResolvedPooling, TextParams
from actorium.actors.scheduler.core import SchedulerCore
from actorium.actors.structured.structured_output import Load, no_vocabulary
from actorium.gpu.plan.sizes import page_table_width
from actorium.gpu.step.hidden_rows import hidden_sizes
from actorium.gpu.step.pools import make_pools
from actorium.gpu.step.routed_experts import routing_of
from actorium.gpu.step.runner import ModelRunner
from actorium.gpu.step.staging import DeviceArrays, HostArrays
from actorium.gpu.step.tables import SlotTables

CPU = torch.device("cpu")


def make_runner(model: Any, pages: int | list[int] = 512, page_size: int = 16, slots: int = 33,
                device: torch.device = CPU,
                arrays: HostArrays | DeviceArrays | None = None) -> ModelRunner:
    """A runner over a loaded model with its own pages (of every group, or of each) and tables."""
    shape = model.shape
    arrays = arrays or (HostArrays(device) if device.type == "cpu" else DeviceArrays(device))
    tables = SlotTables(arrays, slots, page_table_width(shape.max_model_len, page_size), page_size,
                        shape.vocab_size, shape.max_model_len, len(shape.groups))
    each = [pages] * len(shape.groups) if isinstance(pages, int) else pages
    return ModelRunner(model, make_pools(shape, each, page_size, model.dtype, device), tables)


@dataclass
class Output:
    """The output of one choice of one request."""

    tokens: list[int] = field(default_factory=list)
    finish: str | None = None
    error: str | None = None
    cached: int = 0
    """Prompt tokens found in the prefix cache."""
    logprobs: list[RowLogprobs] = field(default_factory=list)
    prompt_logprobs: list[RowLogprobs] = field(default_factory=list)
    pooled: Pooled | None = None
    experts: list[RowExperts] = field(default_factory=list)


class Ring:
    """Submit requests, then `run` until all are finished."""

    def __init__(self, runner: ModelRunner, budget: int = 2048, overlap: bool = True,
                 force_preempt_every: int = 0, speculative: str = "auto",
                 load: Load = no_vocabulary) -> None:
        """speculative: who decides how many drafts are made, if the runner has room for any; load:
        returns the vocabulary of grammars."""
        scheduler = SchedulerConfig(
            max_num_seqs=runner.tables.slots - 1, max_num_batched_tokens=budget, overlap=overlap,
            force_preempt_every=force_preempt_every)
        earlier = getattr(runner.proposers.get("suffix"), "earlier", None)
        config = Config(scheduler=scheduler, recovery=RecoveryConfig(restart=False),
                        speculation=SpeculationConfig(
                            speculative=speculative,
                            suffix_global_bytes=0 if earlier is None else 1 << 20),
                        memory=MemoryConfig(page_size=runner.tables.page_size, debug_memory=True))
        self.runner = runner
        self.core = SchedulerCore(Context(config, Path("/nowhere"), "scheduler", 1, 1), load=load)
        shape = runner.tables
        groups = [PageGroup(pool.pages, group.window)
                  for pool, group in zip(runner.pools, runner.model.shape.groups, strict=True)]
        states = runner.states
        host, pooling = runner.host, runner.model.shape.pooling
        self._ready = Ready(1, groups, shape.page_size, shape.slots, shape.max_len,
                            shape.vocab, "test", states.checkpoints if states else 0,
                            states is not None, drafts=shape.drafts.max_drafts,
                            draft_methods=_methods(runner, speculative),
                            host_pages=host.slots if host else 0,
                            host_parts=host.parts if host else [],
                            pooling=list(pooling.tasks) if pooling else [],
                            whole_prompts=bool(pooling and not pooling.causal),
                            routing=routing_of(runner.model.shape),
                            hidden_states=hidden_sizes(runner.model.shape))
        self.core.on_message(self._ready, 0.0)
        runner.wait = self._late_masks
        self._masks: dict[int, list[RowMask]] = {}
        """Those that follow a plan, by its step."""
        self.plans: deque[StepPlan] = deque()
        self.outputs: dict[int, Output] = {}
        self.most_in_flight = 0
        self.submitted = 0
        """Requests so far."""

    def submit(self, prompt: list[int], params: ResolvedParams, seed: int = 1, n: int = 1,
               pooling: ResolvedPooling | None = None, **more: Any) -> None:
        """Queue a request. more: other fields of its `Submit`."""
        self.submitted += 1
        self.core.on_message(
            Submit(rid=f"r{self.submitted}", client=b"test", n=n, params=params,
                   prompt=np.array(prompt, np.int32).tobytes(), text=TextParams(), seed=seed,
                   pooling=pooling, **more), 0.0)

    def cancel(self, request: int) -> None:
        """The client gives up a request; they are numbered from 1 as they are submitted."""
        self.core.on_message(AbortRequest(f"r{request}", b"test"), 0.0)

    def stop(self, sid: int, tokens: int) -> None:
        """A stop string was found behind so many tokens."""
        self.core.on_message(Stop(sid, tokens), 0.0)

    def lose_worker(self) -> None:
        """Its successor starts, with nothing of what it held."""
        self.plans.clear()
        self._masks.clear()
        self.runner.tables.clear()
        self._ready = msgspec.structs.replace(self._ready, epoch=self._ready.epoch + 1)
        self.core.on_message(self._ready, 0.0)

    def _late_masks(self, plan: StepPlan) -> list[RowMask]:
        return self._masks.pop(plan.step)

    def step(self) -> bool:
        """Runs one plan and its result; False when there is nothing to do."""
        self._deliver()
        if not self.plans:
            return False
        self.most_in_flight = max(self.most_in_flight, len(self.plans))
        self.core.on_message(self.runner.run(self.plans.popleft()), 0.0)
        return True

    def run(self) -> list[Output]:
        """Everything to its end; outputs in the order of submission and choice."""
        for _ in range(100_000):
            if not self.step():
                break
        assert all(o.finish for o in self.outputs.values())
        return [self.outputs[sid] for sid in sorted(self.outputs)]

    @property
    def preemptions(self) -> float:
        """So far."""
        return self.core.health().gauges["preemptions"]

    def _deliver(self) -> None:
        for send in self.core.on_wake(0.0):
            message = send.message
            if isinstance(message, StepPlan):
                self.plans.append(message)
            elif isinstance(message, Masks):
                self._masks[message.step] = message.masks
            elif isinstance(message, Reset):
                self.runner.reset()
            elif isinstance(message, Open):
                self.outputs[message.sid] = Output()
            elif isinstance(message, TokenBatch):
                self._take(message)

    def _take(self, batch: TokenBatch) -> None:
        tokens = iter(np.frombuffer(batch.tokens, np.int32).tolist())
        for sid, count in zip(np.frombuffer(batch.sids, np.int64).tolist(), batch.counts,
                              strict=True):
            self.outputs[sid].tokens += [next(tokens) for _ in range(count)]
        for event in batch.events:
            out = self.outputs[event.sid]
            out.finish = event.finish_reason or out.finish
            out.error = event.error or out.error
            out.cached = event.cached_tokens or out.cached
            out.pooled = event.pooled or out.pooled
            if event.experts:
                out.experts.append(event.experts)
            if event.logprobs:
                out.logprobs.append(event.logprobs)
            if event.prompt_logprobs:
                out.prompt_logprobs.append(event.prompt_logprobs)


def _methods(runner: ModelRunner, speculative: str) -> dict[str, int]:
    """What makes drafts: alone as many as there is room for, else as many as are asked for."""
    most, asked = runner.tables.drafts.max_drafts, parse_speculative(speculative).methods
    methods = [*runner.proposers, *([GRAMMAR] if GRAMMAR in asked else [])]
    if len(methods) < 2:
        return dict.fromkeys(methods, most)
    return {method: min(asked[method], most) for method in methods}


def complete(runner: ModelRunner, prompts: list[list[int]],
             params: ResolvedParams | list[ResolvedParams],
             seeds: list[int] | None = None, **ring: Any) -> list[list[int]]:
    """Tokens of every prompt, batched."""
    run = Ring(runner, **ring)
    for i, prompt in enumerate(prompts):
        run.submit(prompt, params[i] if isinstance(params, list) else params,
                   seeds[i] if seeds else 1)
    return [out.tokens for out in run.run()]
