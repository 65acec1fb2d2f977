"""The flight recorder: records all input of the scheduler's core.

A turn is written after the shell has sent its messages (it asks for the next timer then), so that
no plan waits for the recorder.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from time import monotonic
from typing import Any

import msgspec

from actorium.actors.config import tree as configs
from actorium.actors.core import Context, Send
from actorium.actors.ledger.ledger import Ledger
from actorium.actors.ledger.records import ActivityRecord, LedgerEntry, OutputRecord, RequestRecord
from actorium.actors.messages import Reset, StepPlan, StepResult, Submit
from actorium.actors.recorder.recording import (
    VERSION,
    InitialState,
    RecordedEvent,
    RecordedTurn,
    RecordingHeader,
    RecordingWriter,
)
from actorium.actors.recorder.redaction import Redactor
from actorium.actors.scheduler.core import SchedulerCore

LOG = logging.getLogger("actorium.recorder")
ROLE = "scheduler"
STUCK, FORCED = "stuck", "forced"
"""Call of an event: the grammars of these sequences failed."""

_encode = msgspec.msgpack.Encoder().encode


def plan_checksum(plan: StepPlan) -> int:
    """CRC-32 of a plan without its tokens and parameters, which a recording need not have."""
    admits = [(a.slot, a.prompt_len, a.cached_len, a.pages, a.seed, a.checkpoint, len(a.tokens))
              for a in plan.admit]
    return zlib.crc32(_encode((plan.epoch, plan.step, plan.release, admits, plan.page_appends,
                               plan.extend, plan.decode, plan.checkpoints, plan.drafts)))


def parse_forced(args: Iterable[str]) -> dict[int, dict[int, Sequence[int]]]:
    """Returns what grammars forced in a turn's steps, by step and sid; which tokens is not known.
    """
    forced: dict[int, dict[int, Sequence[int]]] = {}
    for step, sid, count in (map(int, arg.split()) for arg in args):
        forced.setdefault(step, {})[sid] = [0] * count
    return forced


def open_recorder(core: SchedulerCore, context: Context) -> Recorder | None:
    """The flight recorder of a core; None where none is configured, or its files cannot be made."""
    if not context.config.runtime.recorder_bytes:
        return None
    try:
        return Recorder(core, context)
    except OSError as error:
        LOG.warning("no flight recorder: %s", error)
        return None


class Recorder:
    """Writes down a core's messages, wakes and calls."""

    def __init__(self, core: SchedulerCore, ctx: Context) -> None:
        """Raises `OSError` if the files cannot be made."""
        config, self._masks = ctx.config, core.masks
        self._events: list[RecordedEvent] = []
        self._turns: list[tuple[list[RecordedEvent], float | None, Sequence[Send]]] = []
        self._redactor = None if config.runtime.record_prompts else Redactor(
            config.memory.page_size, config.scheduler.max_num_seqs)
        header = RecordingHeader(
            VERSION, configs.dump(configs.without_secrets(config)), ctx.role, ctx.epoch,
            ctx.entropy, self._redactor is not None, 0, self._initial_state(core.ledger))
        self._writer: RecordingWriter | None = RecordingWriter(
            ctx.run_dir, header, config.runtime.recorder_bytes)

    def _initial_state(self, ledger: Ledger | None) -> InitialState | None:
        """Records what the core found in its ledger."""
        if ledger is None or not (ledger.history.entries or ledger.history.next_sid > 1
                                  or ledger.history.activity != ActivityRecord()
                                  or ledger.history.adapters is not None):
            return None
        requests = [self._recorded(entry) for entry in ledger.history.entries.values()]
        return InitialState(requests, ledger.history.next_sid, ledger.same_boot, monotonic(),
                            ledger.history.activity, ledger.history.adapters)

    def _recorded(self, entry: LedgerEntry) -> RequestRecord:
        prompt, submit, redactor = entry.submit.prompt, entry.submit, self._redactor

        def shown(tokens: bytes) -> bytes:
            if redactor is None:
                return tokens
            return redactor.redact_tokens(prompt + tokens)[len(prompt):]

        outputs = [OutputRecord(c.sid, shown(bytes(c.tokens)), c.cached_tokens, finish=c.finish)
                   for c in entry.choices]
        return RequestRecord(submit if redactor is None else redactor.redact_submit(submit),
                             entry.choices[0].sid, outputs)

    # --- recording ---

    def on_message(self, message: Any, now: float) -> None:
        """The core is about to get this message."""
        self._events.append(RecordedEvent(now, message))

    def on_wake(self, now: float, sends: Sequence[Send]) -> None:
        """The core was woken, and sends this."""
        if self._masks.last_stuck:  # by a grammar, which a replay does not know
            stuck = [str(sid) for sid in self._masks.last_stuck]
            self._events.append(RecordedEvent(now, None, STUCK, stuck))
        if self._masks.last_forced:
            self._events.append(RecordedEvent(now, None, FORCED, [
                f"{step} {sid} {len(tokens)}" for step, by_sid in self._masks.last_forced.items()
                for sid, tokens in by_sid.items()]))
        self._turns.append((self._events, now, sends))
        self._events = []

    def on_call(self, name: str, now: float, *args: str) -> None:
        """Another hook of the core is about to be called."""
        self._events.append(RecordedEvent(now, None, name, list(args)))

    @contextmanager
    def until_failure(self) -> Iterator[None]:
        """Around work of the core: if it raises, this turn is its last."""
        try:
            yield
        except BaseException:
            self._turns.append((self._events, None, ()))
            self._events = []
            self.write()
            raise

    # --- writing ---

    def write(self) -> None:
        """Writes the turns since the last call."""
        turns, self._turns = self._turns, []
        if self._writer is None:
            return
        try:
            for events, now, sends in turns:
                self._writer.add(self._turn(events, now, sends))
        except Exception as error:  # whatever it is, no request is to suffer for it
            LOG.warning("the flight recorder stops: %s", type(error).__name__)
            self._writer.close()
            self._writer = None

    def _turn(self, events: list[RecordedEvent], now: float | None, sends: Sequence[Send]
              ) -> RecordedTurn:
        if self._redactor is not None:
            events = [self._redacted(event, self._redactor) for event in events]
        plans = []
        for send in sends:
            if isinstance(send.message, StepPlan):
                plans.append(plan_checksum(send.message))
                if self._redactor is not None:
                    self._redactor.on_plan(send.message)
            elif isinstance(send.message, Reset) and self._redactor is not None:
                self._redactor.on_reset()
        return RecordedTurn(events, now, plans)

    @staticmethod
    def _redacted(event: RecordedEvent, redactor: Redactor) -> RecordedEvent:
        message = event.message
        if isinstance(message, StepResult):
            return RecordedEvent(event.now, redactor.redact_result(message))
        if isinstance(message, Submit):
            return RecordedEvent(event.now, redactor.redact_submit(message))
        return event
