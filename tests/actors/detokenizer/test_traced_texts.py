"""What the detokenizer reports to the tracer: once of each traced sequence that ends while it is
here."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers_text import attached, i4, i8, write_model

from actorium.actors.detokenizer.core import DetokenizerCore
from actorium.actors.messages import Open, SequenceEvent, TokenBatch, TraceContext
from actorium.actors.params import TextParams
from actorium.actors.tracing.trace_messages import TracedText

A = b"client a"
TRACE = TraceContext(bytes(range(16)))
END = SequenceEvent(1, "length")


@pytest.fixture
def core(tmp_path: Path) -> DetokenizerCore:
    return attached(write_model(tmp_path / "m"), A)


def opened(core: DetokenizerCore, emitted: bytes = b"", end: SequenceEvent | None = None,
           again: bool = False, trace: TraceContext | None = TRACE, now: float = 0.0,
           **text: object) -> None:
    core.on_message(Open(1, "r", 2, A, i4([104]), TextParams(**text),  # type: ignore[arg-type]
                         emitted=i4(list(emitted)), end=end, again=again, trace=trace), now)


def batch(core: DetokenizerCore, start: int, tokens: bytes, *events: SequenceEvent,
          now: float) -> None:
    core.on_message(TokenBatch(1, i8([1]), i4([start]), bytes([len(tokens)]), i4(list(tokens)),
                               list(events)), now)


def traced(core: DetokenizerCore, now: float) -> list[TracedText]:
    return [send.message for send in core.on_wake(now) if send.to == "tracer"]


def test_from_the_first_token_to_the_last_text(core: DetokenizerCore) -> None:
    opened(core, now=5.0)
    batch(core, 0, b"a", SequenceEvent(1, cached_tokens=0), now=7.0)
    assert traced(core, 7.0) == []
    batch(core, 1, b"bc", END, now=9.0)
    assert traced(core, 9.5) == [TracedText(TRACE, "r", 2, 7.0, 9.5, 3)]
    assert traced(core, 10.0) == []


def test_a_stop_string_ends_it_here(core: DetokenizerCore) -> None:
    opened(core, stop=("b",))
    batch(core, 0, b"a", SequenceEvent(1, cached_tokens=0), now=7.0)
    batch(core, 1, b"bc", now=8.0)
    (one,) = traced(core, 8.0)
    assert (one.began, one.ended, one.tokens) == (7.0, 8.0, 2)


def test_what_has_ended_before_is_not_reported_again(core: DetokenizerCore) -> None:
    """To a new detokenizer, and to a client that has lost its stream."""
    opened(core, b"abc", END)
    assert traced(core, 1.0) == []
    opened(core, b"abc", END, again=True)
    assert traced(core, 1.0) == []


def test_what_runs_on_at_a_new_detokenizer_is_reported_by_it(core: DetokenizerCore) -> None:
    opened(core, b"ab", now=5.0)
    batch(core, 2, b"c", END, now=6.0)
    assert traced(core, 6.0) == [TracedText(TRACE, "r", 2, 5.0, 6.0, 3)]


def test_nothing_of_one_that_is_not_traced(core: DetokenizerCore) -> None:
    opened(core, trace=None)
    batch(core, 0, b"a", END, now=6.0)
    assert traced(core, 6.0) == []


def test_a_tracer_that_does_not_read_is_not_waited_for(core: DetokenizerCore) -> None:
    assert core.on_peer_stuck("tracer", 1.0)
    core.on_peer_back("tracer", 2.0)
    assert core.on_wake(2.0) == [], "it asks for no report"
