"""Other weights of the same model, while it serves: the version, and the way to the next one.

The worker reads the new weights beside the old ones, while steps go on. Then what runs ends first,
stops where it is, or is aborted; and with no plan under way the worker is told to take them, and
computes with them from the next step on. So each token is of one version. Cached prefixes are named
by their weights: none is used for sequences of others. What ran meanwhile keeps the pages that the
older weights have filled.

The worker is who knows: one that has been started again says with what (`Ready.weights`), and the
version counts on where that is not what the ledger has.

In a cluster the orders are the router's (`plan`): what is read is held until the router says
whether to take it, and as which version (`settle`), or says hello anew, and has forgotten it.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import Any

import msgspec
from msgspec import Struct

from actorium.actors.errors import (
    ActoriumError,
    BadModel,
    EngineUnavailable,
    InvalidRequest,
)
from actorium.actors.ledger.records import WeightsRecord
from actorium.actors.messages import (
    PrepareWeights,
    ReadTensor,
    Reply,
    RunningMode,
    TensorAnswer,
    TensorCall,
    UpdateWeights,
    WeightsAnswer,
    WeightsCall,
    WeightsOrder,
    WeightsSource,
)
from actorium.actors.scheduler.request_lifecycle import RequestLifecycle
from actorium.actors.scheduler.scheduler_state import BEGUN, NONE
from actorium.actors.scheduler.sleep import SleepControl

LOG = logging.getLogger("actorium.scheduler")
REMEMBERED = 16
"""Orders that were carried out, for clients that have lost the answer and repeat theirs."""
MOST_WAITING = 64
IDLE, PREPARING, PREPARED, TAKING = "idle", "preparing", "prepared", "taking"
"""Stages of the first order: the worker reads the weights; has done so; takes them."""
Key = tuple[bytes, str]
ROUTER = b"router"
"""Who gives a cluster's router's orders, by their numbers."""


class PendingUpdate(Struct):
    """An order to change the weights, which is being carried out or waits for that."""

    key: Key
    call: WeightsCall
    source: WeightsSource | None = None
    """All files, as a router says them, or as they were read; None = those of the call, over what
    is served."""
    take: bool | None = True
    """Whether it is taken once it is read; None = the router will say."""


class WeightsControl:
    """The version of the weights, and the orders that change it."""

    def __init__(self, requests: RequestLifecycle, sleep: SleepControl, ranks: int, epoch: int,
                 prior: WeightsRecord) -> None:
        """prior: what an earlier life of the scheduler has left."""
        self._requests, self._state, self._sleep = requests, requests.state, sleep
        self._ranks, self._epoch = ranks, epoch
        self.record = prior
        """As the ledger has it."""
        self._state.weights = prior.version
        self._state.weights_name = name_of(prior.source)
        self._waiting: deque[PendingUpdate] = deque()
        """The first one is being carried out."""
        self._stage, self._number, self._numbers = IDLE, 0, 0
        """Of the first order, its number, and the last number that was given."""
        self._read_seconds = 0.0
        self._answers: dict[int, WeightsAnswer] = {}
        """To the last message, by rank."""
        self._reads: dict[int, Key] = {}
        """Who asked for tensors, by the message's number."""

    # --- what comes in ---------------------------------------------------------------------------

    def on_order(self, order: WeightsOrder, asleep: bool) -> None:
        """Takes an order. asleep: there is no worker, and will be none."""
        call, key = order.call, (order.client, order.call.rid)
        if isinstance(call, WeightsCall) and (call.order == "state" or key in self.record.orders):
            self._reply(key, self._shown())
        elif any(other.key == key for other in self._waiting):
            return
        elif asleep or (isinstance(call, TensorCall) and self._requests.worker is None):
            self._refuse(key, EngineUnavailable("the engine sleeps: wake it up first" if asleep
                                                else "the worker sleeps or is being started"))
        elif len(self._waiting) + len(self._reads) >= MOST_WAITING:
            self._refuse(key, EngineUnavailable(f"{MOST_WAITING} orders are waiting already"))
        elif isinstance(call, TensorCall):
            if key not in self._reads.values():
                self._numbers += 1
                self._reads[self._numbers] = key
                self._requests.outgoing.to_worker(
                    ReadTensor(self._epoch, self._numbers, call.name, call.most))
        elif 0 < call.version <= (last := max(self.record.version, *(
                other.call.version for other in self._waiting), 0)):
            self._refuse(key, InvalidRequest(
                f"weight_version: must be above {last}, got {call.version}", "weight_version"))
        else:
            self._waiting.append(PendingUpdate(key, call))

    def plan(self, number: int, source: WeightsSource, mode: RunningMode, clear_cache: bool
             ) -> None:
        """Takes a router's order: reads these files, says so, and waits for `settle`."""
        call = WeightsCall(str(number), "update", mode=mode, clear_cache=clear_cache)
        self._waiting.append(PendingUpdate((ROUTER, call.rid), call, source, None))

    def settle(self, number: int, version: int) -> None:
        """The router says what becomes of its order: it is taken as this version; 0: it is not."""
        for update in self._waiting:
            if update.key == (ROUTER, str(number)) and update.take is None:
                update.call = msgspec.structs.replace(update.call, version=version)
                update.take = version > 0
                if update.take:
                    self._abort_if_asked(update.call)

    def forget_plans(self) -> None:
        """Gives up the router's orders that it has not settled: it does not know of them."""
        for update in self._waiting:
            update.take = update.take or False

    def on_tensor(self, answer: TensorAnswer) -> None:
        """Passes on what a tensor holds."""
        key = self._reads.pop(answer.number, None) if answer.epoch == self._epoch else None
        if key is None:
            return
        if answer.error:
            self._refuse(key, BadModel(answer.error))
        else:
            self._requests.outgoing.to_detokenizer([Reply(key[1], key[0], answer.json)])

    def on_answer(self, answer: WeightsAnswer) -> None:
        """Takes note that a rank has done, or refused, what was asked."""
        awaited = self._epoch, self._number, PREPARING if answer.prepared else TAKING
        if awaited != (answer.epoch, answer.number, self._stage):
            return
        self._answers[answer.rank] = answer
        if len(self._answers) < self._ranks:
            return
        answers, self._answers = [*self._answers.values()], {}
        # Ranks of which another one has failed say only that; the one that knows why is heard.
        errors = sorted((own.error for own in answers if own.error), key=len, reverse=True)
        if errors:
            if len(errors) < len(answers):
                self._give_up()
            self._refuse(self._next()[0], BadModel(errors[0]))
            return
        seconds = max(own.seconds for own in answers)
        if answer.prepared:
            self._stage, self._read_seconds = PREPARED, seconds
            self._waiting[0].source = answers[0].source
            if self._waiting[0].take:
                self._abort_if_asked(self._first)
            elif self._waiting[0].take is None:
                self._reply(self._waiting[0].key, {
                    "prepared": msgspec.to_builtins(answers[0].source), "read_seconds": seconds})
            return
        key, call = self._next()
        self._serve(answers[0].source, key, call.version)
        if call.clear_cache:
            self._state.flush_cache()
        self._reply(key, self._shown(seconds, self._read_seconds))

    def _abort_if_asked(self, call: WeightsCall) -> None:
        if call.mode == "abort":
            for request in list(self._state.requests):
                self._requests.abort(request)

    def on_worker(self, source: WeightsSource) -> None:
        """A worker is ready, with these weights; what the one before was doing has ended with it.
        """
        served = source == self.record.source
        if not served:
            self._serve(source)
            LOG.warning("the worker has weights that no order had answered for: version %d, %s",
                        self.record.version, source.path or "the configured ones")
        if self._stage != IDLE:
            taken = self._stage == TAKING and not served
            key, _ = self._next()
            if taken:
                self._reply(key, self._shown())
            else:
                self._refuse(key, EngineUnavailable(
                    "the worker ended while it read the weights; those of before are served"))
        reads, self._reads = self._reads, {}
        for key in reads.values():
            self._refuse(key, EngineUnavailable("the worker ended"))

    # --- a wake ----------------------------------------------------------------------------------

    def step(self, in_flight: bool) -> None:
        """Goes as far as it can with the first order. in_flight: a plan is. Behind
        `SleepControl.step`, which says what else may be admitted."""
        state = self._state
        if self._stage == TAKING:
            state.admits = NONE
            return
        while self._waiting and self._stage != PREPARING and (
                self._waiting[0].take is False or self._has_first):
            if self._stage == PREPARED:
                self._give_up()
            taken, (key, _) = self._waiting[0].take, self._next()
            if taken:
                self._reply(key, self._shown())
        if not self._waiting or self._requests.worker is None or self._sleep.unloads:
            return
        if self._stage == IDLE:
            self._prepare(self._first)
        if self._stage != PREPARED or self._waiting[0].take is None:
            return
        call = self._first
        stops = call.mode in ("keep", "retract") or state.admits == NONE  # paused where they are
        state.admits = NONE if stops else BEGUN
        if in_flight:
            return
        order = state.table.order
        for sequence in sorted((own for own in state.table.sequences if own is not None and stops),
                               key=lambda own: -order[own.slot]):
            # What is pooled is of one version: its rows so far are computed again.
            if call.mode == "retract" or sequence.pooled:
                state.preempt(sequence, "weights")
        if stops or not any(request.begun for request in state.requests.values()):
            self._stage, state.admits = TAKING, NONE
            self._requests.outgoing.to_worker(UpdateWeights(self._epoch, self._number))

    def _prepare(self, call: WeightsCall) -> None:
        """Tensors lie over what is served; a directory takes the place of all."""
        self._numbers += 1
        self._stage, self._number = PREPARING, self._numbers
        source = self.record.source
        over = [*source.over, call.tensors] if call.tensors else []
        self._requests.outgoing.to_worker(PrepareWeights(
            self._epoch, self._number,
            self._waiting[0].source or WeightsSource(call.path or source.path, over)))

    def _give_up(self) -> None:
        """Has the ranks forget what they have read."""
        self._requests.outgoing.to_worker(UpdateWeights(self._epoch, self._number, take=False))

    def _next(self) -> tuple[Key, WeightsCall]:
        """Takes out the first order."""
        first = self._waiting.popleft()
        self._stage = IDLE
        self._answers.clear()
        return first.key, first.call

    @property
    def _has_first(self) -> bool:
        """Whether a router orders what it, or the one before, has had taken already."""
        first = self._waiting[0]
        return (0 < first.call.version <= self.record.version and first.take is True
                and first.key[0] == ROUTER and first.source == self.record.source)

    @property
    def _first(self) -> WeightsCall:
        return self._waiting[0].call

    def _serve(self, source: WeightsSource, key: Key | None = None, version: int = 0) -> None:
        """The worker computes with these from the next step on. version: 0 = the next."""
        orders = [*self.record.orders, *([key] if key else [])][-REMEMBERED:]
        version = max(version, self.record.version + 1)
        self.record = WeightsRecord(version, source, orders)
        self._requests.history.weights(self.record)
        self._state.change_weights(self.record.version, name_of(source))

    # --- reports ---------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether orders wait, or are being carried out."""
        return bool(self._waiting)

    def _shown(self, seconds: float = 0.0, read_seconds: float = 0.0) -> dict[str, Any]:
        return {"version": self.record.version, "path": self.record.source.path,
                "seconds": seconds, "read_seconds": read_seconds}

    def _refuse(self, key: Key, error: ActoriumError) -> None:
        self._reply(key, {"error": {"code": error.code, "message": error.message}})

    def _reply(self, key: Key, content: dict[str, Any]) -> None:
        self._requests.outgoing.to_detokenizer([
            Reply(key[1], key[0], msgspec.json.encode(content))])

    def gauges(self) -> dict[str, float]:
        """Returns the gauges for the heartbeat."""
        return {"weight_version": self.record.version}

    def records(self) -> list[WeightsRecord]:
        """Returns what must not be forgotten."""
        return [self.record] if self.record.version else []


def name_of(source: WeightsSource) -> str:
    """Returns what stands for these weights in names of prefixes; "" = those of the start. (A
    tenant's name has no byte below a space.)"""
    return f"\2{source.digest.hex()}" if source.digest else ""
