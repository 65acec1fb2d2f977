"""A scheduler, a worker, a detokenizer and clients that may die at any moment, in virtual time.

Everything that moves is decided by one seeded `random.Random`, so a failing seed replays. A death
loses the actor's state and what was on its way to it, and perhaps the end of what it had sent. What
was committed to the ledger stays. The worker's tokens are hashes of (seed, position), in some
schedules of its life as well, and each token's logprob is its own id: whatever a client is told can
be checked.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from helpers_lives_actors import Key, Reader, Told, Worker
from helpers_scheduler import CLIENT, column, config

from actorium.actors.config.tree import RecoveryConfig
from actorium.actors.core import LEDGER, Context, Send
from actorium.actors.ledger.records import META, LedgerHistory, LedgerMeta, make_record
from actorium.actors.ledger.segments import LedgerRecord
from actorium.actors.messages import (
    AbortRequest,
    ResumeRequest,
    StepPlan,
    Submit,
    ToDetokenizer,
    ToScheduler,
    ToWorker,
)
from actorium.actors.params import ResolvedParams, ResolvedPooling, TextParams
from actorium.actors.scheduler.core import SchedulerCore
from actorium.actors.scheduler.recovery.recovery_log import PriorRun
from actorium.actors.scheduler.request_state import choice_seed
from actorium.actors.structured.structured_output import Load, no_vocabulary
from actorium.tools.null import null_worker


class Lives:
    """See the module. `play` makes random moves; `finish` lets everything come to rest."""

    load: Load = staticmethod(no_vocabulary)

    def __init__(self, seed: int, pools: float = 0.0, **settled: Any) -> None:
        """pools: share of the requests that are for vectors; settled: fields of the scheduler's
        settings that are not drawn."""
        self.pools, self.pool_chance = pools, random.Random(-1 - seed)
        self.chance = chance = random.Random(seed)
        drafts = chance.choice([0, 0, 2])
        self.poisonous, self.fickle = chance.random() < 0.2, chance.random() < 0.4
        settings = config(
            page_size=chance.choice([1, 2, 16]), pool_tokens=chance.choice([100, 300, 4000]),
            seqs=chance.choice([1, 3, 8]), chunk=chance.choice([3, 9, 512]),
            overlap=chance.random() < 0.7,
            policy=chance.choice(["fcfs", "lpm", "priority", "fair"]),
            queued=chance.choice([3, 100]), max_model_len=90,
            speculative=f"mtp:{drafts},fixed" if drafts else "off")
        settings = msgspec.structs.replace(settings, scheduler=msgspec.structs.replace(
            settings.scheduler, **settled))
        self.settings = msgspec.structs.replace(settings, recovery=RecoveryConfig(
            # Who asks anew for what is forgotten gets it computed anew.
            restart=True, retain=1e6 if self.fickle else chance.choice([0.0, 3.0, 1000.0])))
        self.now = 100.0
        self.submits: dict[str, Submit] = {}
        self.stops: dict[Key, int] = {}
        self.given_up: set[str] = set()
        self.to_scheduler: deque[Any] = deque()
        self.reader = Reader(self.stops, self.to_scheduler)
        self.deaf = False
        """The detokenizer has not read for so long that what it is told is dropped."""
        self.ledger: list[LedgerRecord] = [make_record(META, LedgerMeta("boot", ""))]
        self.fills = 0
        """Commits that will fail yet."""
        self.held: list[Send] | None = None
        self.held_records: list[LedgerRecord] = []
        self.to_detokenizer: deque[Any] = deque()
        self.to_worker: deque[Any] = deque()
        self.epochs = {"scheduler": 0, "worker": 0}
        self.deaths = {"scheduler": 0, "detokenizer": 0, "worker": 0}
        self.poison: set[int] = set()
        self.new_scheduler()
        self.new_worker()

    @property
    def received(self) -> dict[Key, Told]:
        """Returns what the clients have received."""
        return self.reader.received

    # --- lives -----------------------------------------------------------------------------------

    def new_scheduler(self) -> None:
        """From the ledger, and nothing else."""
        self.epochs["scheduler"] += 1
        self.to_scheduler.clear()
        self.held, self.held_records, self.deaf = None, [], False
        self.compacting: Iterator[list[LedgerRecord]] | None = None
        context = Context(self.settings, Path("/nowhere"), "scheduler",
                          self.epochs["scheduler"], 0)
        past = PriorRun(LedgerHistory().read(self.ledger), True, self.now)
        self.scheduler = SchedulerCore(context, past, self.load)

    def new_worker(self) -> None:
        self.epochs["worker"] += 1
        self.to_worker.clear()
        self.worker = Worker(Context(self.settings, Path("/nowhere"), "worker-0",
                                     self.epochs["worker"], 0))
        self.worker.poison, self.worker.fickle = frozenset(self.poison), self.fickle
        self._answers()

    def _cut(self, *queues: deque[Any]) -> None:
        """The end of what a dead actor has sent may be lost."""
        for queue in queues:
            for _ in range(self.chance.choice([0, 0, 1, len(queue)])):
                if queue:
                    queue.pop()

    def kill_scheduler(self) -> None:
        """Between two wakes, or in one: before it commits, or before it sends."""
        self.deaths["scheduler"] += 1
        when = self.chance.choice(["between", "uncommitted", "unsent"])
        if when == "unsent" and self.held is None:
            self._commit(self.cut_short([
                send.message for send in self.scheduler.on_wake(self.now) if send.to == LEDGER]))
        self._cut(self.to_worker, self.to_detokenizer)
        self.new_scheduler()

    def kill_worker(self) -> None:
        self.deaths["worker"] += 1
        results = [m for m in self.to_scheduler if type(m).__name__ == "StepResult"]
        for message in results[len(results) - self.chance.randint(0, len(results)):]:
            self.to_scheduler.remove(message)
        self.new_worker()

    def kill_detokenizer(self) -> None:
        self.deaths["detokenizer"] += 1
        self.to_detokenizer.clear()
        self.reader.begin_anew()

    # --- the ring --------------------------------------------------------------------------------

    def hear(self) -> None:
        """The scheduler takes what came, some of it or all, and wakes."""
        for _ in range(self.chance.choice([1, 1, 2, 99])):
            if self.to_scheduler:
                frame = msgspec.msgpack.encode(self.to_scheduler.popleft())
                self.scheduler.on_message(msgspec.msgpack.decode(frame, type=ToScheduler),
                                          self.now)
        self.wake()

    def wake(self) -> None:
        """As `actors/ledger/committer.py` does it."""
        if self.held is not None:
            self._retry()
        sends = list(self.scheduler.on_wake(self.now))
        first = next((i for i, s in enumerate(sends) if s.to == LEDGER), len(sends))
        records = [s.message for s in sends if s.to == LEDGER]
        after = [s for s in sends[first:] if s.to != LEDGER]
        self._send(sends[:first])
        if records and self.fills:
            assert self.held is None
            self.held, self.held_records = after, records
            self.scheduler.on_ledger_full("the ledger takes no more", self.now)
            return
        self._commit(records)
        self._send(after)

    def cut_short(self, records: list[LedgerRecord]) -> list[LedgerRecord]:
        """Returns what a death in the middle of the write leaves of it."""
        return records

    def _commit(self, records: list[LedgerRecord]) -> None:
        self.ledger += records

    def _retry(self) -> None:
        self.fills -= self.fills > 0
        if not self.fills:
            held, self.held = self.held, None
            self._commit(self.held_records)
            self._send(held or [])
            self.scheduler.on_ledger_ok(self.now)

    def _send(self, sends: list[Send]) -> None:
        for send in sends:
            frame = msgspec.msgpack.encode(send.message)
            if send.to == "detokenizer":
                if self.deaf:
                    continue
                self.to_detokenizer.append(msgspec.msgpack.decode(frame, type=ToDetokenizer))
            else:
                self.to_worker.append(msgspec.msgpack.decode(frame, type=ToWorker))

    def work(self) -> None:
        """The worker takes a message, and may die of it."""
        if self.to_worker:
            message = self.to_worker.popleft()
            plan = message if isinstance(message, StepPlan) else None
            if plan is not None and self.worker._acknowledged and plan.epoch == self.worker._epoch \
                    and self.worker.poisoned(plan):
                self.deaths["worker"] += 1
                self.new_worker()
                return
            self.worker.on_message(message, self.now)
            self._answers()

    def _answers(self) -> None:
        self.to_scheduler.extend(send.message for send in self.worker.on_wake(self.now))

    def detokenize(self) -> None:
        """The detokenizer takes a message; if it had not read for long, it reads again."""
        if self.to_detokenizer:
            self.reader.take(self.to_detokenizer.popleft())
        if self.deaf and len(self.to_detokenizer) < 3 and self.held is None:
            self.deaf = False
            self.scheduler.on_peer_back("detokenizer", self.now)

    def deafen(self) -> None:
        """What waits for the detokenizer is too much: the end of it is dropped, and all that comes
        until it reads again."""
        if self.to_detokenizer:
            self.deaf = self.scheduler.on_peer_stuck("detokenizer", self.now)
            assert self.deaf
            for _ in range(self.chance.randint(1, len(self.to_detokenizer))):
                self.to_detokenizer.pop()

    def compact(self) -> None:
        """Some requests at a time; perhaps killed before the old segments are gone."""
        if self.held is not None:
            return
        if self.compacting is None:
            self.compacting, self.old = iter(self.scheduler.live_records()), len(self.ledger)
            self.ledger.append(make_record(META, LedgerMeta("boot", "", self.scheduler.next_sid)))
        for _ in range(self.chance.randint(0, 6)):
            records = next(self.compacting, None)
            if records is None:
                self.ledger, self.compacting = self.ledger[self.old:], None
                return
            self.ledger += records

    # --- the clients -----------------------------------------------------------------------------

    def submit(self) -> None:
        chance, number = self.chance, len(self.submits)
        prompt = [chance.choice([7, 100 * number]) + i for i in range(chance.randint(1, 20))]
        deadline = self.now + chance.randint(1, 200) if chance.random() < 0.2 else None
        n = chance.choice([1, 1, 1, 3])
        submit = Submit(
            rid=f"r{number}", client=CLIENT, prompt=column(prompt), n=n, text=TextParams(),
            params=ResolvedParams(max_tokens=chance.randint(1, 40),
                                  logprobs=chance.choice([-1, -1, 1])),
            seed=1000 + number, deadline=deadline, tenant=chance.choice(["", "a"]),
            priority=chance.randint(0, 2), arrival=self.now)
        if self.pool_chance.random() < self.pools:
            own = ResolvedPooling("embed", every_row=self.pool_chance.random() < 0.5)
            submit = msgspec.structs.replace(submit, n=1, pooling=own,
                                             params=ResolvedParams(max_tokens=1))
        self.submits[submit.rid] = submit
        for index in range(submit.n):
            if submit.pooling is None and chance.random() < 0.2:
                self.stops[submit.rid, index] = chance.randint(1, 30)
        if self.poisonous and chance.random() < 0.2:
            self.poison.add(submit.seed)
            self.worker.poison = frozenset(self.poison)
        self.to_scheduler.append(submit)

    def ask_again(self) -> None:
        """A resent request, or a recall."""
        if self.submits:
            rid = self.chance.choice(list(self.submits))
            asks = [ResumeRequest(rid, CLIENT)]
            if not self.over(rid):  # a client does not ask anew for what it has whole
                asks.append(self.submits[rid])
            self.to_scheduler.append(self.chance.choice(asks))

    def cancel(self) -> None:
        if self.submits:
            rid = self.chance.choice(list(self.submits))
            self.given_up.add(rid)
            self.to_scheduler.append(AbortRequest(rid, CLIENT))

    def over(self, rid: str) -> bool:
        """Whether the client knows all about a request; one that is refused has one end."""
        return rid in self.reader.failed or all(self.received.get((rid, i), Told()).reason
                              for i in range(self.submits[rid].n))

    # --- a schedule ------------------------------------------------------------------------------

    def play(self, moves: int) -> None:
        """Plays so many random moves."""
        usual = [self.work, self.hear, self.detokenize]
        rare = [self.submit, self.submit, self.submit, self.ask_again, self.cancel, self.compact,
                self.compact, self.compact, self.fill, self.deafen, self.kill_scheduler,
                self.kill_detokenizer]
        if not self.poisonous:
            rare.append(self.kill_worker)
        for _ in range(moves):
            self.now += self.chance.random()
            self.chance.choice(usual if self.chance.random() < 0.85 else rare)()

    def fill(self) -> None:
        """The disk is full for a while."""
        if self.held is None:
            self.fills = self.chance.randint(1, 5)

    def finish(self) -> None:
        """No more deaths but of poison: clients ask until they know all."""
        self.fills = 0
        for _ in range(60):
            self._settle()
            open_ones = [rid for rid in self.submits if not self.over(rid)]
            if not open_ones:
                break
            for rid in open_ones:
                again = rid in self.reader.unknown or self.chance.random() < 0.5
                self.to_scheduler.append(self.submits[rid] if again else ResumeRequest(rid, CLIENT))
        else:
            raise AssertionError(f"never told: {open_ones}")
        assert not self.scheduler.state.requests
        gauges = self.scheduler.health().gauges
        assert gauges["running"] == gauges["waiting"] == gauges["held_pages"] == 0

    def _settle(self) -> None:
        for _ in range(20_000):
            self.now += 0.001
            self.hear()
            self.work()
            self.detokenize()
            if not (self.deaf or self.to_scheduler or self.to_worker or self.to_detokenizer
                    or self.scheduler._unresolved or self.scheduler.next_timer() == 0.0):
                return
        raise AssertionError("it never comes to rest")

    def violations(self) -> Iterator[str]:
        """Whatever a client was told that its request does not say."""
        for (rid, index), told in self.received.items():
            submit = self.submits[rid]
            seed, prompt = choice_seed(submit.seed, index), len(submit.prompt) // 4
            want = [null_worker.next_token(seed, prompt + i, null_worker.VOCAB)
                    for i in range(min(submit.params.max_tokens, 90 - prompt))]
            name = f"{rid}.{index}"
            if told.tokens != want[:len(told.tokens)] and not self.fickle:
                yield f"{name}: wrong tokens"
            if submit.params.logprobs >= 0 and told.logprobs != [float(t) for t in told.tokens]:
                yield f"{name}: wrong logprobs"
            stop = self.stops.get((rid, index), 10**9)
            if submit.pooling is not None:
                want, stop = [], 0 if told.pooled == null_worker.pooled_tokens(
                    np.frombuffer(submit.prompt, np.int32), submit.pooling) else -1
            whole = {"length": len(told.tokens) == len(want) > 0, "stop": len(told.tokens) == stop,
                     "abort": rid in self.given_up, "deadline": submit.deadline is not None,
                     "error": told.error in ("quarantined", "queue_full", "deadline",
                                             "context_overflow")}
            if told.reason is None and rid in self.reader.failed:
                continue
            if not whole.get(told.reason or "", False):
                yield f"{name}: {told.reason} ({told.error}) after {len(told.tokens)} tokens"
            if told.error == "quarantined" and self.poisonous and submit.seed not in self.poison:
                yield f"{name}: an innocent is quarantined"
