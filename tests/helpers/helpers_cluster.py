"""A router and replicas with null workers, joined by hand: a test decides when anything moves, and
what is lost."""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from helpers_lives_actors import Worker

from actorium.actors.cluster import router_actor
from actorium.actors.cluster.cluster_control import (
    AskReplicaSet,
    ClusterAnswer,
    ReplicaEvent,
    ReplicaSet,
)
from actorium.actors.cluster.cluster_messages import FromReplica, ToReplica
from actorium.actors.cluster.router_core import RouterCore
from actorium.actors.config.cluster_settings import ClusterConfig, replica_name
from actorium.actors.config.tree import Config, MemoryConfig, RecoveryConfig, SchedulerConfig
from actorium.actors.core import CLIENT, LEDGER, Context, Send
from actorium.actors.launcher.replicas import ReplicaRoster
from actorium.actors.ledger.records import LedgerHistory, cut
from actorium.actors.ledger.segments import LedgerRecord
from actorium.actors.media.media_messages import HoldMedia
from actorium.actors.messages import (
    AdapterAnswer,
    Admit,
    Hello,
    MediaItem,
    NamedAdapter,
    Open,
    Ready,
    Reply,
    SequenceEvent,
    StepResult,
    Submit,
    TensorAnswer,
    ToDetokenizer,
    TokenBatch,
    Unknown,
    Unloaded,
    WeightsAnswer,
)
from actorium.actors.params import ResolvedParams, TextParams
from actorium.actors.scheduler.core import SchedulerCore
from actorium.actors.scheduler.request_state import choice_seed
from actorium.actors.scheduler.scheduler_actor import SchedulerActor
from actorium.tools.null import null_worker

NAME = "c"
_encode = msgspec.msgpack.encode


def settings(replicas: int = 2, pool_tokens: int = 4096, **scheduler: Any) -> Config:
    """Of a cluster with small pages."""
    return Config(cluster=ClusterConfig(replicas=replicas), recovery=RecoveryConfig(ledger=False),
                  memory=MemoryConfig(page_size=4, max_total_tokens=pool_tokens,
                                      debug_memory=True, audit_every=1),
                  scheduler=SchedulerConfig(max_num_seqs=8, **scheduler))


class ReplicaBox:
    """One life of a replica: scheduler, link and worker."""

    def __init__(self, config: Config, index: int, launch: int) -> None:
        replace = msgspec.structs.replace
        own = replace(config, cluster=ClusterConfig(replica_of=f"{NAME}:{index}:{launch}"),
                      runtime=replace(config.runtime, name=replica_name(NAME, index),
                                      recorder_bytes=0))
        context = Context(own, Path("/nowhere"), "scheduler", 1, 0)
        self.launch = launch
        self.bare = SchedulerCore(context)
        self.scheduler = SchedulerActor(self.bare, context)
        self.worker = Worker(context._replace(role="worker-0"))
        if config.adapters.enable_lora:
            self.scheduler.on_start(lambda *_: None)  # a thread reads their files
        self.inbox: deque[Any] = deque()
        self.said: deque[FromReplica] = deque()
        self.admitted: list[Admit] = []
        """What the worker was told of sequences."""

    def step(self, now: float) -> bool:
        """A wake of the scheduler and one of its worker; False if nothing moved."""
        moved = bool(self.inbox)
        while self.inbox:
            self.scheduler.on_message(self.inbox.popleft(), now)
        for send in self.scheduler.on_wake(now):
            moved = True
            if send.to == "worker-0":
                self.admitted += getattr(send.message, "admit", [])
                self.worker.on_message(send.message, now)
            else:
                assert send.to == f"../{NAME}/scheduler", send
                self.said.append(send.message)
        for send in self.worker.on_wake(now):
            assert isinstance(send.message, AdapterAnswer | Ready | StepResult | TensorAnswer
                              | Unloaded | WeightsAnswer)
            self.inbox.append(send.message)
        return moved


class Heard:
    """What the detokenizer knows of one sequence: as a detokenizer it adds what is new, and asks
    again where something is missing."""

    def __init__(self, opened: Open) -> None:
        self.opened = opened
        self.tokens: list[int] = []
        self.logprobs = b""
        self.end: SequenceEvent | None = None


class ClusterBox:
    """The cluster."""

    def __init__(self, config: Config, routing: str = "prefix", ledger: bool = False) -> None:
        """ledger: routers keep one, from which the next goes on."""
        self.config, self.routing = config, routing
        self.ledger: list[LedgerRecord] | None = [] if ledger else None
        self.now = 100.0
        self.router_epoch = 0
        self.cut_off: set[int] = set()
        """Replicas whose frames are held back."""
        self.replicas = [ReplicaBox(config, i, 1) for i in range(config.cluster.replicas)]
        self.to_router: deque[Any] = deque()
        self.heard: dict[int, Heard] = {}
        self.submits: dict[str, Submit] = {}
        self.replies: list[Any] = []
        self.answers: list[Any] = []
        """What the router has said to people."""
        self.holds: list[HoldMedia] = []
        """What the routers have said to the media actor."""
        self.roster = ReplicaRoster(config.cluster)
        self.gone: set[int] = set()
        """Replicas that have left."""
        self.router = self.new_router()

    def new_router(self, told: bool = True) -> RouterCore:
        """The next router; whatever was on its way to the one before is lost. told: at once, which
        replicas there are."""
        self.to_router.clear()
        self.router_epoch += 1
        replace = msgspec.structs.replace
        config = replace(self.config, runtime=replace(self.config.runtime, name=NAME),
                         cluster=replace(self.config.cluster, routing=self.routing))
        prior = None if self.ledger is None else LedgerHistory().read(self.ledger)
        self.router = router_actor.router_core(
            Context(config, Path("/nowhere"), "scheduler", self.router_epoch, 7), prior,
            [] if config.adapters.enable_lora else None)
        for send in self.router.on_wake(self.now) if told else ():
            assert isinstance(send.message, AskReplicaSet)
            for answer in self.roster.on_ask(send.message):
                self.router.on_message(answer, self.now)
        return self.router

    def kill(self, index: int, told: bool = True) -> None:
        """A replica dies with all that is on its way to it; what it has said arrives."""
        old = self.replicas[index]
        self.to_router += old.said
        self.replicas[index] = ReplicaBox(self.config, index, old.launch + 1)
        if told:
            self.to_router.append(ReplicaEvent(index, "died", old.launch))

    def submit(self, prompt: list[int], max_tokens: int = 16, n: int = 1, rid: str = "",
               client: bytes = b"client", resume_seconds: float = 0.0,
               media: Sequence[MediaItem] = (), adapter: str = "", **params: Any) -> str:
        """A request comes from the tokenizer."""
        rid = rid or f"r{len(self.submits)}"
        self.submits[rid] = Submit(
            rid, client, b"".join(t.to_bytes(4, "little") for t in prompt), n,
            ResolvedParams(max_tokens=max_tokens, **params), TextParams(), 11 + len(self.submits),
            resume_seconds=resume_seconds, media=[*media],
            adapter=NamedAdapter(adapter) if adapter else None)
        self.to_router.append(self.submits[rid])
        return rid

    def answer(self, rid: str, turn: Callable[[], object] | None = None) -> dict[str, Any]:
        """The answer to an order, once it comes. turn: how time goes on until then."""
        for _ in range(300):
            for reply in self.replies:
                if isinstance(reply, Reply) and reply.rid == rid:
                    found: dict[str, Any] = msgspec.json.decode(reply.json)
                    return found
            (turn or self.turn)()
        raise AssertionError("no answer")

    def repeat_unheard(self) -> None:
        """Clients send requests again of which they have heard nothing."""
        heard = {heard.opened.rid for heard in self.heard.values()}
        self.to_router += [submit for rid, submit in self.submits.items() if rid not in heard]

    def turn(self, chance: random.Random | None = None) -> bool:
        """Everybody moves once, or, with `chance`, some do; False if nothing moved."""
        self.now += 0.01
        moved = False
        for index, replica in enumerate(self.replicas):
            if index in self.gone:
                continue
            if chance is None or chance.random() < 0.6:
                moved = replica.step(self.now) or moved
            while (index not in self.cut_off and replica.said
                   and (chance is None or chance.random() < 0.7)):
                self.to_router.append(replica.said.popleft())
        count = len(self.to_router) if chance is None else chance.randint(0, len(self.to_router))
        for _ in range(count):
            message = self.to_router.popleft()
            self.router.on_message(
                msgspec.msgpack.decode(_encode(message), type=self.router.inbox), self.now)
        for send in self.router.on_wake(self.now):
            moved = True
            if send.to == LEDGER:
                assert self.ledger is not None
                self.ledger.append(send.message)
            elif send.to == "launcher":
                self.launch(send.message)
            elif send.to == "media":
                self.holds.append(send.message)
            elif send.to == CLIENT:
                self.answers.append(send.message)
            elif send.to == "detokenizer":
                self._hear(msgspec.msgpack.decode(_encode(send.message), type=ToDetokenizer))
            else:
                self.carry(send)
        return moved or count > 0

    def carry(self, send: Send) -> None:
        """An order on its way to a replica."""
        index = int(send.to.split("/")[1].removeprefix(f"{NAME}."))
        if index not in self.gone:
            self.replicas[index].inbox.append(
                msgspec.msgpack.decode(_encode(send.message), type=ToReplica))

    def launch(self, order: ReplicaSet | AskReplicaSet) -> None:
        """As a launcher does."""
        if isinstance(order, AskReplicaSet):
            self.to_router += self.roster.on_ask(order)
            return
        self.to_router += self.roster.on_set(order)
        self.change_replicas({state.index for state in self.roster.local_replicas().values()})

    def change_replicas(self, indices: set[int]) -> None:
        """These are to run, and no others."""
        for index, old in enumerate(self.replicas):
            if index in self.gone and index in indices:
                self.replicas[index] = ReplicaBox(self.config, index, old.launch + 1)
        for index in range(len(self.replicas), max(indices, default=-1) + 1):
            self.replicas.append(ReplicaBox(self.config, index, 1))
        self.gone = set(range(len(self.replicas))) - indices

    def ask(self, message: Any) -> ClusterAnswer:
        """Somebody asks at the router's front."""
        self.router.on_client(b"person", msgspec.msgpack.decode(
            _encode(message), type=self.router.client_inbox), self.now)
        while not self.answers:
            self.turn()
        answer = self.answers.pop()
        assert isinstance(answer, ClusterAnswer)
        return answer

    def run(self, turns: int = 400, chance: random.Random | None = None) -> None:
        """Until all that was asked has ended."""
        for _ in range(turns):
            self.turn(chance)
            if self.over:
                return
        raise AssertionError(f"not over: {self.router.health()}")

    @property
    def over(self) -> bool:
        """Every choice of every request has been told to its end."""
        ended = defaultdict(int)
        for heard in self.heard.values():
            ended[heard.opened.rid] += heard.end is not None
        return not self.to_router and all(ended[rid] >= submit.n
                                          for rid, submit in self.submits.items())

    def _hear(self, message: Open | TokenBatch | Reply | Unknown) -> None:
        if isinstance(message, Reply | Unknown):
            self.replies.append(message)
        elif isinstance(message, Open):
            heard = self.heard.get(message.sid)
            if heard is None or message.again:
                heard = self.heard[message.sid] = Heard(message)
            emitted = memoryview(message.emitted).cast("i").tolist()
            logprobs = b"".join(row.chosen for row in message.emitted_logprobs)
            if len(emitted) > len(heard.tokens):
                self._extend(heard, 0, emitted)
                heard.logprobs = logprobs
            if message.end is not None:
                heard.end = message.end
        else:
            self._hear_batch(message)

    def _hear_batch(self, batch: TokenBatch) -> None:
        at, missed = 0, set()
        tokens = memoryview(batch.tokens).cast("i").tolist()
        events = {event.sid: event for event in batch.events}
        for sid, start, count in zip(memoryview(batch.sids).cast("q"),
                                     memoryview(batch.starts).cast("i"), batch.counts, strict=True):
            heard = self.heard.get(sid)
            mine, at = tokens[at:at + count], at + count
            if heard is None or heard.end is not None:
                continue
            if start > len(heard.tokens):
                missed.add(sid)
                self.to_router.append(Hello("detokenizer", 1))
                continue
            new = len(heard.tokens) - start
            self._extend(heard, start, mine)
            event = events.get(sid)
            if event is not None and event.logprobs is not None and new < count:
                heard.logprobs += cut(event.logprobs, new).chosen
        for event in batch.events:
            heard = self.heard.get(event.sid)
            if heard is not None and heard.end is None and event.sid not in missed \
                    and event.finish_reason is not None:
                heard.end = event

    @staticmethod
    def _extend(heard: Heard, start: int, tokens: list[int]) -> None:
        known = heard.tokens[start:start + len(tokens)]
        assert tokens[:len(known)] == known, "a token that was told has changed"
        heard.tokens += tokens[len(known):]

    def of(self, rid: str) -> list[Heard]:
        """The choices of a request."""
        mine = [heard for heard in self.heard.values() if heard.opened.rid == rid]
        return sorted(mine, key=lambda heard: heard.opened.index)

    def assert_whole(self) -> None:
        """Every choice has just the tokens that its seed says, and each token, where that was asked
        for, its logprob, which is its own id."""
        for rid, submit in self.submits.items():
            choices = self.of(rid)
            assert [heard.opened.index for heard in choices] == list(range(submit.n)), rid
            for heard in choices:
                seed = choice_seed(submit.seed, heard.opened.index)
                first = len(submit.prompt) // 4
                assert heard.tokens == [
                    null_worker.next_token(seed, position, null_worker.VOCAB)
                    for position in range(first, first + submit.params.max_tokens)]
                assert heard.end is not None and heard.end.finish_reason == "length"
                told = np.frombuffer(heard.logprobs, np.float32).tolist()
                assert told == (heard.tokens if submit.params.logprobs >= 0 else [])
