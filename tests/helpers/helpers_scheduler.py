"""A scheduler and a null worker joined by hand: the test decides when anything moves."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from actorium.actors.config.tree import (
    Config,
    MemoryConfig,
    ModelConfig,
    RecoveryConfig,
    SchedulerConfig,
    SpeculationConfig,
)
from actorium.actors.core import LEDGER, Context, CoreObserver
from actorium.actors.messages import (
    AbortRequest,
    AdapterAnswer,
    AdapterCall,
    AdapterOrder,
    DropAdapter,
    Flush,
    LoadAdapter,
    NamedAdapter,
    Open,
    PageAnswer,
    PageOrder,
    Pooled,
    PrepareWeights,
    Reply,
    Reset,
    SequenceEvent,
    StepPlan,
    StepResult,
    Stop,
    Submit,
    ToDetokenizer,
    TokenBatch,
    ToScheduler,
    ToWorker,
    WeightsAnswer,
)
from actorium.actors.params import ResolvedParams, ResolvedPooling, TextParams
from actorium.actors.scheduler.core import SchedulerCore
from actorium.actors.scheduler.request_state import choice_seed
from actorium.actors.scheduler.scheduler_actor import build_core
from actorium.actors.scheduler.scheduler_state import SchedulerState
from actorium.tools.null import null_worker

CLIENT = b"client"


def ints(column: bytes) -> list[int]:
    return np.frombuffer(column, np.int32).tolist()


def column(values: list[int]) -> bytes:
    return np.array(values, np.int32).tobytes()


def config(page_size: int = 16, pool_tokens: int = 4096, seqs: int = 8, chunk: int = 2048,
           queued: int = 4096, overlap: bool = True, force_preempt: int = 0,
           max_model_len: int | None = None, policy: str = "fcfs", cache: bool = True,
           eviction: str = "lru", weights: dict[str, float] | None = None,
           save: str = "auto", speculative: str = "off", host_pages: int = 0,
           disk: bool = False) -> Config:
    return Config(
        recovery=RecoveryConfig(restart=False),
        speculation=SpeculationConfig(speculative=speculative),
        model=ModelConfig(max_model_len=max_model_len),
        memory=MemoryConfig(page_size=page_size, max_total_tokens=pool_tokens, debug_memory=True,
                            audit_every=1, prefix_cache=cache, eviction_policy=eviction,
                            checkpoint_policy=save, host_cache=8 * page_size * host_pages,
                            disk_cache="/nowhere:1GiB" if disk else ""),
        scheduler=SchedulerConfig(max_num_seqs=seqs, max_num_batched_tokens=chunk, overlap=overlap,
                                  max_num_queued_reqs=queued, force_preempt_every=force_preempt,
                                  schedule_policy=policy, tenant_weights=weights or {}))


@dataclass
class Heard:
    """What the detokenizer has received of one sequence."""

    opened: Open
    submit: Submit
    tokens: list[int] = field(default_factory=list)
    events: list[SequenceEvent] = field(default_factory=list)
    digest: bytes = b""
    """Of its adapter."""

    @property
    def reason(self) -> str | None:
        reasons = [e.finish_reason for e in self.events if e.finish_reason]
        assert len(reasons) <= 1, f"ended twice: {reasons}"
        return reasons[0] if reasons else None

    @property
    def pooled(self) -> Pooled | None:
        """The vector that came; the only one that its prompt can have."""
        found = [e.pooled for e in self.events if e.pooled is not None]
        if found:
            assert self.submit.pooling is not None
            assert [msgspec.structs.replace(one, weight_version=0) for one in found] == [
                null_worker.pooled_tokens(np.frombuffer(self.submit.prompt, np.int32),
                                          self.submit.pooling)]
            assert self.reason == "stop" and not self.tokens
        return found[0] if found else None

    @property
    def error_code(self) -> str | None:
        return next((e.error_code for e in self.events if e.error_code), None)


class Ring:
    """Every message goes through msgpack, so bounds and types are checked on the way."""

    def __init__(self, settings: Config, start: bool = True,
                 windows: tuple[int, ...] = (0,), checkpoints: int | None = None,
                 acceptance: tuple[float, ...] = (), cost: null_worker.Cost | None = None) -> None:
        self.now = 100.0
        self.depth = 2 if settings.scheduler.overlap else 1
        self.scheduler = build_core(Context(settings, Path("/nowhere"), "scheduler", 3, 0))
        self.new_worker = partial(_worker, settings, windows, checkpoints, acceptance, cost)
        self.worker = self.new_worker(3)
        self.plans: deque[StepPlan] = deque()
        self.results: deque[StepResult] = deque()
        self.orders: deque[PageOrder] = deque()
        self.answers: deque[PageAnswer] = deque()
        """Of the worker's disk."""
        self.sent: list[StepPlan] = []
        self.heard: dict[int, Heard] = {}
        self.submits: dict[str, Submit] = {}
        self.names: dict[str, bytes] = {}
        """Digests of adapters by name, as of the replies."""
        self._digests: dict[str, bytes] = {}
        """Of requests' adapters."""
        self._calls: dict[str, AdapterOrder] = {}
        self.replies: list[Reply] = []
        self.up = False
        """The worker is there."""
        self.worked = 0
        """Steps that the worker has run."""
        if start:
            self.start()

    @property
    def core(self) -> SchedulerCore:
        """The scheduler, without whoever stands around it."""
        bare = self.scheduler
        while isinstance(bare, CoreObserver):
            bare = bare._core
        return bare

    @property
    def state(self) -> SchedulerState:
        return self.core.state

    def start(self, **changes: Any) -> None:
        """Lets the worker report that it is ready. changes: fields of its Ready."""
        self.up = True
        (ready,) = self.worker.on_wake(self.now)
        self.tell(msgspec.structs.replace(ready.message, **changes))
        self.wake()

    def lose_worker(self, **changes: Any) -> None:
        """Replaces the worker by a fresh one, losing what it was doing. changes: fields of its
        Ready."""
        self.plans.clear()
        self.results.clear()
        self.orders.clear()
        before = self.worker.memory
        self.worker = self.new_worker(self.worker.ready.epoch + 1)
        if before is not None and self.worker.memory is not None:
            self.worker.memory.disk = before.disk
        (ready,) = self.worker.on_wake(self.now)
        self.tell(msgspec.structs.replace(ready.message, **changes))

    def tell(self, message: Any) -> None:
        frame = msgspec.msgpack.encode(message)
        self.scheduler.on_message(msgspec.msgpack.decode(frame, type=ToScheduler), self.now)

    def wake(self) -> None:
        """Let the scheduler speak, and sort what it says."""
        for send in self.scheduler.on_wake(self.now):
            frame = msgspec.msgpack.encode(send.message)
            if send.to == "detokenizer":
                self._hear(msgspec.msgpack.decode(frame, type=ToDetokenizer))
            elif send.to != LEDGER:
                assert send.to == "worker-0"
                message = msgspec.msgpack.decode(frame, type=ToWorker)
                if isinstance(message, Reset):
                    if not self.up:
                        continue
                    self.worker.on_message(message, self.now)
                    for answer in self.worker.on_wake(self.now):
                        self.tell(answer.message)
                elif isinstance(message, PageOrder):
                    self.orders.append(message)
                else:
                    self.plans.append(message)
                    self.sent.append(message)
        assert self.in_flight <= self.depth

    @property
    def in_flight(self) -> int:
        return sum(not isinstance(message, LoadAdapter | DropAdapter | AdapterAnswer
                                  | PrepareWeights | WeightsAnswer)
                   for message in (*self.plans, *self.results))

    def _hear(self, message: Open | TokenBatch | Reply) -> None:
        if isinstance(message, Reply):
            self.replies.append(message)
            if (order := self._calls.get(message.rid)) and b'"error"' not in message.json:
                if order.call.order == "load":
                    self.names[order.call.name] = order.digest
                else:
                    self.names.pop(order.call.name, None)
            return
        if isinstance(message, Open):
            assert message.sid not in self.heard
            self.heard[message.sid] = Heard(message, self.submits[message.rid],
                                            digest=self._digests.get(message.rid, b""))
            return
        at = 0
        tokens, counts = ints(message.tokens), list(message.counts)
        sids = np.frombuffer(message.sids, np.int64).tolist()
        for sid, start, count in zip(sids, ints(message.starts), counts, strict=True):
            heard = self.heard[sid]
            assert count > 0 and heard.reason is None and start == len(heard.tokens)
            heard.tokens += tokens[at:at + count]
            at += count
        assert at == len(tokens)
        for event in message.events:
            assert self.heard[event.sid].reason is None
            self.heard[event.sid].events.append(event)

    # --- what a test does ------------------------------------------------------------------------

    def submit(self, prompt: int | list[int], max_tokens: int = 16, n: int = 1,
               seed: int | None = None, deadline: float | None = None, rid: str | None = None,
               tenant: str = "", priority: int = 0, deterministic: bool = False,
               pooling: ResolvedPooling | None = None, adapter: str = "", **params: Any) -> str:
        """Submit a prompt (or so many tokens of one that is all its own); the scheduler hears it,
        but is not woken."""
        rid = rid or f"r{len(self.submits)}"
        seed = len(self.submits) * 7919 + 13 if seed is None else seed
        if isinstance(prompt, int):
            own = 1000 * len(self.submits)
            prompt = list(range(own, own + prompt))
        submit = Submit(rid=rid, client=CLIENT, prompt=column(prompt), n=n,
                        params=ResolvedParams(max_tokens=max_tokens, **params), text=TextParams(),
                        seed=seed, deadline=deadline, tenant=tenant, priority=priority,
                        deterministic=deterministic, pooling=pooling,
                        adapter=NamedAdapter(adapter) if adapter else None)
        self.submits[rid] = submit
        self._digests[rid] = self.names.get(adapter, b"")
        self.tell(submit)
        return rid

    def load(self, name: str, content: int, path: str = "", replace: bool = False,
             rid: str = "", error: str = "") -> str:
        """Orders an adapter, whose digest follows from its content, and whose files are read."""
        rid = rid or f"a{len(self._calls)}"
        digest = b"" if error else bytes((content + 1,)) * 32
        self._order(AdapterOrder(CLIENT, AdapterCall(
            rid, "load", name, path or f"/adapters/{content}", replace), digest, error=error))
        return rid

    def unload(self, name: str) -> str:
        rid = f"a{len(self._calls)}"
        self._order(AdapterOrder(CLIENT, AdapterCall(rid, "unload", name)))
        return rid

    def _order(self, order: AdapterOrder) -> None:
        self._calls[order.call.rid] = order
        self.tell(order)

    def reply(self, rid: str) -> dict[str, Any] | None:
        """The answer to an order; None = there is none yet."""
        found = [msgspec.json.decode(reply.json) for reply in self.replies if reply.rid == rid]
        return found[-1] if found else None

    def cancel(self, rid: str) -> None:
        self.tell(AbortRequest(rid=rid, client=CLIENT))

    def stop(self, sid: int, tokens: int) -> None:
        self.tell(Stop(sid=sid, tokens=tokens))

    def flush(self) -> None:
        self.tell(Flush(rid="f", client=CLIENT))

    def work(self) -> bool:
        """Let the worker run its oldest plan."""
        if not self.plans:
            return False
        self.worker.on_message(self.plans.popleft(), self.now)
        self.worked += 1
        self.results += [send.message for send in self.worker.on_wake(self.now)]
        return True

    def deliver(self) -> bool:
        """Hand over the oldest result and wake the scheduler."""
        if not self.results:
            return False
        self.tell(self.results.popleft())
        self.wake()
        return True

    def move_pages(self) -> bool:
        """Let the worker's disk do its oldest order."""
        if not self.orders:
            return False
        self.worker.on_message(self.orders.popleft(), self.now)
        self.answers += [send.message for send in self.worker.on_wake(self.now)]
        return True

    def answer(self) -> bool:
        """Hand over the disk's oldest answer and wake the scheduler."""
        if not self.answers:
            return False
        self.tell(self.answers.popleft())
        self.wake()
        return True

    def run(self, chance: random.Random | None = None, limit: int = 20_000) -> None:
        """Until nothing moves; with `chance`, worker and scheduler advance in random order."""
        self.wake()
        for _ in range(limit):
            if chance is not None and chance.random() < 0.5:
                self.work()
            elif not (self.deliver() or self.work() or self.answer() or self.move_pages()):
                return
        raise AssertionError(f"still busy: {self.scheduler.health()}")

    def of(self, rid: str) -> list[Heard]:
        """The choices of a request, in order."""
        mine = [h for h in self.heard.values() if h.opened.rid == rid]
        return sorted(mine, key=lambda h: h.opened.index)

    def assert_at_rest(self) -> None:
        """Everything has ended, nothing is held, nothing will be sent."""
        assert all(heard.reason for heard in self.heard.values())
        gauges = self.scheduler.health().gauges
        assert gauges["running"] == gauges["waiting"] == gauges["held_pages"] == 0
        assert not self.state.requests and not (self.in_flight or self.orders or self.answers)
        assert self.scheduler.next_timer() is None
        assert list(self.scheduler.on_wake(self.now)) == []


def _worker(settings: Config, windows: tuple[int, ...], checkpoints: int | None,
            acceptance: tuple[float, ...], cost: null_worker.Cost | None,
            epoch: int) -> null_worker.NullWorker:
    return null_worker.NullWorker(Context(settings, Path("/nowhere"), "worker-0", epoch, 0),
                                  windows, checkpoints, acceptance, cost)


def expected(heard: Heard, limit: int = 10**9) -> tuple[list[int], str]:
    """Tokens and reason of a sequence that runs to its end; `limit`: most tokens in all."""
    submit = heard.submit
    params, prompt = submit.params, len(submit.prompt) // 4
    if submit.pooling is not None:
        return [], "stop"
    seed = null_worker.adapted_seed(choice_seed(submit.seed, heard.opened.index), heard.digest)
    tokens: list[int] = []
    for position in range(prompt, min(prompt + params.max_tokens, limit)):
        early = len(tokens) < params.min_tokens
        tokens.append(null_worker.next_token(seed, position, null_worker.VOCAB,
                                             params.eos_ids if early else ()))
        if tokens[-1] in params.eos_ids:
            return tokens, "stop"
    return tokens, "length"


def assert_whole(ring: Ring, limit: int = 10**9) -> None:
    """Every sequence told exactly what its seed says, to its end."""
    for heard in ring.heard.values():
        assert (heard.tokens, heard.reason) == expected(heard, limit)
        assert (heard.pooled is None) == (heard.submit.pooling is None)
    ring.assert_at_rest()


def finish(ring: Ring, *prompts: list[int], max_tokens: int = 4, **more: Any) -> list[Heard]:
    """Submit the prompts together and run them to their ends, all of which must be whole."""
    rids = [ring.submit(list(prompt), max_tokens=max_tokens, **more) for prompt in prompts]
    ring.run()
    assert_whole(ring)
    return [ring.of(rid)[0] for rid in rids]


def cached(heard: Heard) -> int:
    """Prompt tokens found in the cache."""
    return next(e.cached_tokens for e in heard.events if e.cached_tokens is not None)


def gauges(ring: Ring) -> dict[str, float]:
    """Returns the gauges of the scheduler's heartbeat."""
    return ring.scheduler.health().gauges
