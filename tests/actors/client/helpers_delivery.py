"""Two clients, a tokenizer, a detokenizer and a scheduler that remembers, in virtual time.

Everything but the scheduler is the real core. Messages wait in one queue for each pair of parties,
where a test may drop, repeat or swap them; any actor may be killed, with all that was on its way to
it. What a sequence says is a function of its rid and index alone, so every run must come to the
same results.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from helpers_text import context, i4, i8, loaded

from actorium.actors.client.core import ClientCore
from actorium.actors.client.pending import DETOKENIZER, TOKENIZER, PendingRequest
from actorium.actors.client.requests import Request
from actorium.actors.core import CLIENT
from actorium.actors.detokenizer.core import DetokenizerCore
from actorium.actors.messages import (
    AbortRequest,
    Hello,
    Open,
    ResumeRequest,
    RowLogprobs,
    SequenceEvent,
    Stop,
    Submit,
    TokenBatch,
    Unknown,
)
from actorium.actors.params import SamplingParams
from actorium.actors.tokenizer.core import TokenizerCore

TICK = 0.25
TEXT = "né € STOP \U0001f600 the end. "
ACTORS = ("tokenizer", "detokenizer", "scheduler")
REQUESTS = [
    ("héllo", SamplingParams(max_tokens=40)),
    ("stop at", SamplingParams(max_tokens=60, stop=["STOP"], n=2)),
    ("keep", SamplingParams(max_tokens=60, stop=["nd. ", "zz"], include_stop_str_in_output=True)),
    ("probs", SamplingParams(max_tokens=30, logprobs=1, prompt_logprobs=0, n=2)),
    ("both", SamplingParams(max_tokens=50, stop=["OP"], logprobs=0)),
]


def script(rid: str, index: int) -> bytes:
    """Returns what this sequence emits; byte-level ids are bytes."""
    turn = (sum(rid.encode()) + 7 * index) % 11
    return (TEXT[turn:] + TEXT * 4).encode()


def rows(first: int, count: int, slot: int = 0) -> RowLogprobs:
    """Logprobs that tell their position."""
    values = struct.pack(f"<{count}f", *(-0.5 * (first + i + 1) for i in range(count)))
    places = i4(list(range(first, first + count)))
    return RowLogprobs(slot, first, values, i4([1] * count), places, values)


@dataclass
class Choice:
    """One sequence as the scheduler's ledger has it."""

    sid: int
    index: int
    submit: Submit
    said: list[int] = field(default_factory=list)
    probs: list[RowLogprobs] = field(default_factory=list)
    prompt: list[RowLogprobs] = field(default_factory=list)
    end: SequenceEvent | None = None


class Keeper:
    """A scheduler that never forgets: all it tells is in `choices` before."""

    def __init__(self) -> None:
        self.epoch = 1
        self.choices: dict[int, Choice] = {}
        self.known: dict[tuple[bytes, str], list[Choice]] = {}
        self.out: list[Any] = []

    def open(self, choice: Choice, again: bool = False) -> None:
        submit = choice.submit
        self.out.append(Open(
            choice.sid, submit.rid, choice.index, submit.client, submit.prompt, submit.text,
            submit.params.logprobs, i4(choice.said), list(choice.probs), list(choice.prompt),
            choice.end, self.epoch, again, 3 if choice.said else None))

    def on_message(self, message: Any) -> None:
        if isinstance(message, Submit):
            self._submit(message)
        elif isinstance(message, Hello):
            for choice in self.choices.values():
                self.open(choice)
        elif isinstance(message, ResumeRequest):
            mine = self.known.get((message.client, message.rid))
            if mine is None:
                self.out.append(Unknown(message.rid, message.client))
            for choice in mine or ():
                self.open(choice, again=True)
        elif isinstance(message, Stop):
            self._end(self.choices[message.sid], "stop")
        else:
            assert isinstance(message, AbortRequest)
            for choice in self.known.get((message.client, message.rid), ()):
                self._end(choice, "abort")

    def _submit(self, submit: Submit) -> None:
        key = submit.client, submit.rid
        if key in self.known:
            for choice in self.known[key]:
                if all(c.end for c in self.known[key]):
                    self.open(choice, again=True)
            return
        first = len(self.choices) + 1
        made = self.known[key] = [Choice(first + i, i, submit) for i in range(submit.n)]
        for choice in made:
            self.choices[choice.sid] = choice
            self.open(choice)

    def _end(self, choice: Choice, reason: str) -> None:
        if choice.end is None:
            choice.end = SequenceEvent(choice.sid, reason)
            self.out.append(TokenBatch(1, b"", b"", b"", b"", [choice.end], self.epoch))

    def step(self, most: int) -> None:
        """Every live sequence says 1..most tokens."""
        sids, starts, counts, tokens, events = [], [], [], [], []
        for choice in [c for c in self.choices.values() if c.end is None]:
            params, at = choice.submit.params, len(choice.said)
            count = min(1 + (choice.sid + at) % most, params.max_tokens - at)
            new = list(script(choice.submit.rid, choice.index)[at:at + count])
            over = at + count >= params.max_tokens
            event = SequenceEvent(
                choice.sid, "length" if over else None, cached_tokens=None if at else 3,
                logprobs=rows(at, count) if params.logprobs >= 0 else None,
                prompt_logprobs=self._prompt(choice, at))
            choice.said += new
            if event.logprobs is not None:
                choice.probs.append(event.logprobs)
            if event.prompt_logprobs is not None:
                choice.prompt.append(event.prompt_logprobs)
            if over:
                choice.end = SequenceEvent(choice.sid, "length")
            sids.append(choice.sid)
            starts.append(at)
            counts.append(count)
            tokens += new
            events.append(event)
        if sids:
            self.out.append(TokenBatch(1, i8(sids), i4(starts), bytes(counts), i4(tokens), events,
                                       self.epoch))

    @staticmethod
    def _prompt(choice: Choice, at: int) -> RowLogprobs | None:
        if choice.submit.params.prompt_logprobs < 0 or at:
            return None
        return rows(1, len(choice.submit.prompt) // 4 - 1)

    def restart(self) -> None:
        self.epoch += 1
        self.out = []
        for choice in self.choices.values():
            self.open(choice)


class World:
    """All parties and the queues between them. `queues` = (from, to) -> messages."""

    def __init__(self, model: Path) -> None:
        self.now = 100.0
        self.model = model
        self.clients = {b"a": ClientCore("a"), b"b": ClientCore("b")}
        self.keeper = Keeper()
        self.epochs = {"tokenizer": 1, "detokenizer": 1}
        self.queues: dict[tuple[str, str], list[Any]] = {}
        self.tokenizer, self.detokenizer = self._make("tokenizer"), self._make("detokenizer")
        self.pending: list[tuple[bytes, PendingRequest]] = []
        self.shown: dict[tuple[str, int], list[Any]] = {}
        for name in self.clients:
            self._attach(name)
        for name, core in self.clients.items():
            for prompt, params in REQUESTS:
                pending, frame = core.submit(Request(prompt=prompt, params=params), self.now,
                                             streaming=name == b"a")
                self.pending.append((name, pending))
                self._post(name.decode(), "tokenizer", (name, decode("tokenizer", frame)))

    def _make(self, role: str) -> Any:
        ctx = context(self.model)._replace(role=role, epoch=self.epochs[role])
        core = (TokenizerCore if role == "tokenizer" else DetokenizerCore)(ctx)
        self._sort(role, core.on_wake(self.now))
        return loaded(core)

    def _attach(self, name: bytes) -> None:
        for front, frame in self.clients[name].reconnected(DETOKENIZER, self.now):
            self._send_frame(name, front, frame)

    def _post(self, source: str, to: str, message: Any) -> None:
        self.queues.setdefault((source, to), []).append(message)

    def _send_frame(self, name: bytes, front: str, frame: bytes) -> None:
        to = "tokenizer" if front == TOKENIZER else "detokenizer"
        self._post(name.decode(), to, (name, decode(to, frame)))

    def _sort(self, source: str, sends: Any) -> None:
        for send in sends:
            to = send.client.decode() if send.to == CLIENT else send.to
            self._post(source, to, send.message)

    # --- what happens ---

    def deliver(self, link: tuple[str, str], count: int = 1) -> None:
        """The next messages of a queue arrive, and the receiver acts on them."""
        source, to = link
        queue = self.queues.get(link, [])
        arrived, queue[:] = queue[:count], queue[count:]
        for message in arrived:
            if to in ("a", "b"):
                self.clients[to.encode()].on_message(message, self.now)
            elif to == "scheduler":
                self.keeper.on_message(message)
            elif source == "scheduler":
                self.detokenizer.on_message(message, self.now)
            else:
                getattr(self, to).on_client(*message, self.now)
        self.settle()

    def settle(self) -> None:
        """Everybody says what there is to say."""
        for role in ("tokenizer", "detokenizer"):
            self._sort(role, getattr(self, role).on_wake(self.now))
        for message in self.keeper.out:
            self._post("scheduler", "detokenizer", message)
        self.keeper.out = []
        for name, core in self.clients.items():
            for front, frame in core.resend(self.now):
                self._send_frame(name, front, frame)

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.settle()

    def step(self, most: int) -> None:
        self.keeper.step(most)
        self.settle()

    def kill(self, role: str) -> None:
        """The actor dies with all that was on its way to it, and comes back."""
        for (_, to), queue in self.queues.items():
            if to == role:
                queue.clear()
        if role == "scheduler":
            self.keeper.restart()
        else:
            self.epochs[role] += 1
            setattr(self, role, self._make(role))
            front = TOKENIZER if role == "tokenizer" else DETOKENIZER
            for name, core in self.clients.items():
                for to, frame in core.reconnected(front, self.now):
                    self._send_frame(name, to, frame)
        self.settle()

    def finish(self, ticks: int = 600) -> int:
        """Nothing goes wrong any more, until all have ended; the ticks it took."""
        for tick in range(ticks):
            if all(pending.done for _, pending in self.pending):
                return tick
            for link in list(self.queues):
                self.deliver(link, 1 << 30)
            self.step(3)
            self.pass_time(TICK)
        raise AssertionError(f"unfinished: {[p.rid for _, p in self.pending if not p.done]}")

    def results(self) -> dict[tuple[str, int], Any]:
        """(rid, index) -> everything its client was told, put together."""
        found: dict[tuple[str, int], Any] = {}
        for _, pending in self.pending:
            assert pending.error is None, (pending.rid, pending.error)
            if not pending.streaming:
                for c in pending.completions():
                    found[pending.rid, c.index] = (
                        c.text, c.token_ids, c.finish_reason, c.stop_reason, c.logprobs,
                        c.prompt_logprobs, c.usage)
                continue
            for index in range(len(pending.choices)):
                deltas = [d for d in pending.deltas if d.index == index]
                assert [d.finish_reason for d in deltas[:-1]] == [None] * (len(deltas) - 1)
                last = deltas[-1]
                probs = [p for d in deltas for p in d.logprobs or ()]
                prompts = [d.prompt_logprobs for d in deltas if d.prompt_logprobs is not None]
                assert len(prompts) <= 1
                found[pending.rid, index] = (
                    "".join(d.text for d in deltas), [t for d in deltas for t in d.token_ids],
                    last.finish_reason, last.stop_reason, probs or None,
                    prompts[0] if prompts else None, last.usage)
        return found


def decode(role: str, frame: bytes) -> Any:
    core = TokenizerCore if role == "tokenizer" else DetokenizerCore
    return msgspec.msgpack.decode(frame, type=core.client_inbox)


__all__ = ["ACTORS", "TICK", "World", "script"]
