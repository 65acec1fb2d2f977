"""Requests whose text cannot be made, or kills who makes it: they alone end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers_text import attached, byte_level, context, i4, loaded, write_model
from test_detokenizer_core import A, B, batch, opened, wake

from actorium.actors.core import Send
from actorium.actors.detokenizer.core import DetokenizerCore
from actorium.actors.detokenizer.output_sequence import OutputSequence
from actorium.actors.messages import (
    AbortRequest,
    Attach,
    Open,
    RowLogprobs,
    SequenceEvent,
    TextBatch,
)
from actorium.actors.params import TextParams
from actorium.actors.runtime.inflight_journal import SIZE, InflightJournal, name_of


class Killed(KeyboardInterrupt):
    """The process ends here."""


class Panic(BaseException):
    """As Rust code raises it."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "m", byte_level())


def plant(monkeypatch: pytest.MonkeyPatch, method: str, error: BaseException,
          when: Any = lambda seq, *args: seq.rid == "p") -> None:
    usual = getattr(OutputSequence, method)

    def planted(seq: OutputSequence, *args: Any) -> Any:
        if when(seq, *args):
            raise error
        return usual(seq, *args)

    monkeypatch.setattr(OutputSequence, method, planted)


def ended(deltas: dict[bytes, list[Any]], rid: str) -> str:
    """The code of its error; empty if it has none."""
    found = [d for each in deltas.values() for d in each if d.rid == rid]
    return next((d.error.code for d in found if d.error is not None), "")


@pytest.mark.parametrize("method", ["append_tokens", "delta", "finish", "apply_event",
                                    "add_logprobs"])
@pytest.mark.parametrize("error", [ValueError("xyzzy"), Panic("xyzzy")],
                         ids=lambda e: type(e).__name__)
def test_an_exception_ends_its_request(model: Path, monkeypatch: pytest.MonkeyPatch, method: str,
                                       error: BaseException,
                                       caplog: pytest.LogCaptureFixture) -> None:
    core = attached(model, A, B)
    opened(core, 1, "a")
    opened(core, 2, "p")
    opened(core, 3, "p", index=1)
    opened(core, 4, "b", client=B)
    wake(core)
    plant(monkeypatch, method, error)
    logprobs = RowLogprobs(1, 0, i4([0]), i4([1]), b"", b"")
    batch(core, *((sid, 0, [65]) for sid in (1, 2, 3, 4)),
          events=[SequenceEvent(2, "length", logprobs=logprobs), SequenceEvent(3, "length")])
    sends: list[Send] = list(core.on_wake(0.0))
    texts = {d.rid: d for s in sends if isinstance(s.message, TextBatch)
             for d in s.message.deltas if d.error is None}
    assert (texts["a"].text, texts["b"].text) == ("A", "A") and "p" not in texts
    errors = [d for s in sends if isinstance(s.message, TextBatch) for d in s.message.deltas
              if d.error is not None]
    assert {d.rid for d in errors} == {"p"} and errors[0].error is not None
    assert errors[0].error.code == "quarantined" and "detokenizer" in errors[0].error.message
    assert AbortRequest("p", A) in [send.message for send in sends]
    assert "xyzzy" not in errors[0].error.message + caplog.text
    batch(core, (1, 1, [66]), (2, 1, [66]), (3, 1, [66]), (4, 1, [66]),
          events=[SequenceEvent(sid, "abort") for sid in (2, 3)])
    deltas, others = wake(core)
    assert others == [] and {d.rid for each in deltas.values() for d in each} == {"a", "b"}
    assert core.journal.failures >= 1


def test_a_resent_request_gets_its_answer_again(model: Path,
                                                monkeypatch: pytest.MonkeyPatch) -> None:
    """Its client was away; the text is not tried again."""
    core = attached(model, A, B)
    opened(core, 2, "p")
    wake(core)
    calls = []
    plant(monkeypatch, "append_tokens", ValueError(), lambda seq, *_: calls.append(seq.rid) or True)
    core.on_client_lost(A, 0.0)
    batch(core, (2, 0, [65]))
    deltas, others = wake_joined(core)
    assert deltas == {} and others == [AbortRequest("p", A)]
    core.on_client(A, Attach(), 0.1)
    opened(core, 2, "p", emitted=b"A", end=SequenceEvent(2, "abort"), again=True)
    deltas, _ = wake_joined(core)
    assert ended(deltas, "p") == "quarantined" and calls == ["p"]


def wake_joined(core: DetokenizerCore) -> tuple[dict[bytes, list[Any]], list[Any]]:
    """As `wake`, whatever number of batches a client gets."""
    deltas: dict[bytes, list[Any]] = {}
    others = []
    for send in core.on_wake(0.0):
        if isinstance(send.message, TextBatch):
            deltas.setdefault(send.client, []).extend(send.message.deltas)
        else:
            others.append(send.message)
    return deltas, others


class Lives:
    """Incarnations; each is told the live sequences anew, as the scheduler does."""

    def __init__(self, model: Path) -> None:
        self.model, self.buffer, self.deaths = model, bytearray(SIZE), 0
        self.emitted = {"a": b"", "p": b"", "b": b""}
        self.cancelled: list[str] = []
        self.errors: dict[str, str] = {}
        self.start()

    def start(self) -> None:
        self.core = loaded(DetokenizerCore(context(self.model), InflightJournal(self.buffer)))
        self.core.on_client(A, Attach(), 0.0)
        self.alive(self.open_all)

    def alive(self, work: Any) -> None:
        try:
            work()
            for send in self.core.on_wake(0.0):
                if isinstance(send.message, AbortRequest):
                    self.cancelled.append(send.message.rid)
                    self.emitted.pop(send.message.rid, None)
                if isinstance(send.message, TextBatch):
                    self.errors |= {d.rid: d.error.code for d in send.message.deltas if d.error}
        except Killed:
            self.deaths += 1
            self.start()

    def open_all(self) -> None:
        for sid, (rid, emitted) in enumerate(self.emitted.items(), 1):
            self.core.on_message(Open(sid, rid, 0, A, i4([65]), TextParams(), 0,
                                      i4(list(emitted))), 0.0)

    def step(self) -> None:
        rows = [(sid, len(emitted), [66]) for sid, emitted in
                enumerate(self.emitted.values(), 1)]
        for rid in self.emitted:
            self.emitted[rid] += b"B"
        self.alive(lambda: batch(self.core, *rows))


@pytest.mark.parametrize("after", [0, 1, 5])
def test_a_death_is_found_by_the_second_one(model: Path, monkeypatch: pytest.MonkeyPatch,
                                            after: int) -> None:
    lives = Lives(model)
    plant(monkeypatch, "append_tokens", Killed(),
          lambda seq, tokens, *_: seq.rid == "p" and seq.seen + len(tokens) > after)
    for _ in range(after + 1):
        lives.step()
    assert (lives.deaths, lives.cancelled, lives.errors) == (2, ["p"], {"p": "quarantined"})
    assert lives.core.journal.convicted(name_of(A, b"p"))
    lives.start()
    assert lives.deaths == 2 and len(lives.core._sequences) == 2


def test_a_request_that_ends_is_acquitted(model: Path) -> None:
    lives = Lives(model)
    lives.core.journal.put(name_of(A, b"a"))
    lives.start()
    assert lives.core.journal.suspected(name_of(A, b"a"))
    batch(lives.core, (1, 0, [66]), events=[SequenceEvent(1, "length")])
    assert lives.core.journal.quiet
