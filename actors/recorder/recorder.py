"""The flight recorder: a core around the scheduler's core that writes down all it is told.

What was heard is put on the tape after the shell has sent what came of it (it asks for the next
timer then), so that no plan waits for the recorder.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Sequence
from time import monotonic
from typing import Any

import msgspec

from actorium.actors.config import tree as configs
from actorium.actors.core import Context, Core, CoreObserver, Send
from actorium.actors.ledger.records import LedgerEntry
from actorium.actors.messages import Reset, StepPlan, StepResult, Submit
from actorium.actors.recorder.tape import (
    VERSION,
    Choice,
    Event,
    Header,
    Kept,
    Past,
    Tape,
    Turn,
)
from actorium.actors.recorder.veil import Veil
from actorium.actors.structured.structured_output import StructuredOutputManager

LOG = logging.getLogger("actorium.recorder")
ROLE = "scheduler"
STUCK = "stuck"
"""The call of an event: the grammars of these sequences could not go on."""

_encode = msgspec.msgpack.Encoder().encode


def checksum(plan: StepPlan) -> int:
    """CRC-32 of a plan but for its tokens and parameters, which a recording need not have."""
    admits = [(a.slot, a.prompt_len, a.cached_len, a.pages, a.seed, a.checkpoint, len(a.tokens))
              for a in plan.admit]
    return zlib.crc32(_encode((plan.epoch, plan.step, plan.release, admits, plan.page_appends,
                               plan.extend, plan.decode, plan.checkpoints, plan.drafts)))


class Recorder(CoreObserver):
    """Around the scheduler's core."""

    def __init__(self, core: Core, ctx: Context,
                 masking: StructuredOutputManager | None = None) -> None:
        """masking: the core's. Raises `OSError` if the tape cannot be made."""
        super().__init__(core)
        config, self._structured_output = ctx.config, masking
        self._events: list[Event] = []
        self._turns: list[tuple[list[Event], float | None, Sequence[Send]]] = []
        self._veil = None if config.runtime.record_prompts else Veil(
            config.memory.page_size, config.scheduler.max_num_seqs)
        header = Header(VERSION, configs.dump(configs.keyless(config)), ctx.role, ctx.epoch,
                        ctx.entropy, self._veil is not None, 0, self._past())
        self._tape: Tape | None = Tape(ctx.run_dir, header, config.runtime.recorder_bytes)

    def _past(self) -> Past | None:
        """What the core has found in its ledger."""
        ledger = self._core.ledger
        if ledger is None or not ledger.history.entries:
            return None
        kept = [self._kept(entry) for entry in ledger.history.entries.values()]
        return Past(kept, ledger.history.next_sid, ledger.same_boot, monotonic())

    def _kept(self, entry: LedgerEntry) -> Kept:
        prompt, submit, veil = entry.submit.prompt, entry.submit, self._veil

        def said(tokens: bytes) -> bytes:
            return tokens if veil is None else veil.tokens(prompt + tokens)[len(prompt):]

        choices = [Choice(c.sid, said(bytes(c.tokens)), c.cached_tokens, c.finish)
                   for c in entry.choices]
        return Kept(submit if veil is None else veil.submit(submit), choices)

    # --- what is recorded ---

    def on_message(self, message: Any, now: float) -> None:
        self._events.append(Event(now, message))
        try:
            self._core.on_message(message, now)
        except BaseException:
            self._end()
            raise

    def on_wake(self, now: float) -> Sequence[Send]:
        try:
            sends = self._core.on_wake(now)
        except BaseException:
            self._end()
            raise
        masking = self._structured_output
        if masking is not None and masking.told:  # by a grammar, which a replay does not know
            self._events.append(Event(now, None, STUCK, [str(sid) for sid in masking.told]))
        self._turns.append((self._events, now, sends))
        self._events = []
        return sends

    def drain(self, now: float) -> None:
        self._call("drain", now)

    def on_ledger_full(self, why: str, now: float) -> None:
        self._call("on_ledger_full", now, why)

    def on_ledger_lost(self, why: str, now: float) -> None:
        self._call("on_ledger_lost", now, why)

    def on_ledger_ok(self, now: float) -> None:
        self._call("on_ledger_ok", now)

    def _call(self, name: str, now: float, *args: str) -> None:
        self._events.append(Event(now, None, name, list(args)))
        getattr(self._core, name)(*args, now)

    def next_timer(self) -> float | None:
        if self._turns:
            self._write()
        return self._core.next_timer()

    # --- writing ---

    def _end(self) -> None:
        """The core has raised: this turn is its last."""
        self._turns.append((self._events, None, ()))
        self._events = []
        self._write()

    def _write(self) -> None:
        turns, self._turns = self._turns, []
        if self._tape is None:
            return
        try:
            for events, now, sends in turns:
                self._tape.add(self._turn(events, now, sends))
        except Exception as error:  # whatever it is, nobody's request is to suffer for it
            LOG.warning("the flight recorder stops: %s", type(error).__name__)
            self._tape.close()
            self._tape = None

    def _turn(self, events: list[Event], now: float | None, sends: Sequence[Send]) -> Turn:
        if self._veil is not None:
            events = [self._veiled(event, self._veil) for event in events]
        plans = []
        for send in sends:
            if isinstance(send.message, StepPlan):
                plans.append(checksum(send.message))
                if self._veil is not None:
                    self._veil.plan(send.message)
            elif isinstance(send.message, Reset) and self._veil is not None:
                self._veil.forget()
        return Turn(events, now, plans)

    @staticmethod
    def _veiled(event: Event, veil: Veil) -> Event:
        message = event.message
        if isinstance(message, StepResult):
            return Event(event.now, veil.result(message))
        if isinstance(message, Submit):
            return Event(event.now, veil.submit(message))
        return event
