"""An answer's events do not depend on how it was cut into deltas."""

from __future__ import annotations

import pytest
from helpers_parsing import hermes

from actorium.actors.client.requests import StreamDelta
from actorium.actors.gateway.answer_events import (
    ChoiceEvents,
    ChoiceReader,
    ChoiceStarted,
    DeltaReader,
)
from actorium.actors.gateway.parsers.custom_calls import AnswerPart, CustomToolCall
from actorium.actors.gateway.parsers.parts import ChainedParser, merge_parts
from actorium.actors.gateway.parsers.thoughts import ThinkParser
from actorium.actors.messages import Usage

CALL = '<tool_call>{"name": "%s", "arguments": {"input": "x"}}</tool_call>'
TEXT = f"<think>hm</think>Now: {CALL % 'shell'}{CALL % 'f'} done"


def answer(choices: int = 1) -> DeltaReader:
    return DeltaReader(lambda: ChoiceReader(
        ChainedParser(ThinkParser(False), hermes()), max_calls=9, mark=[9],
        customs=["shell"]), choices=choices)


def events_of(reader: DeltaReader, texts: list[str], reason: str = "stop") -> list[ChoiceEvents]:
    """The events of one choice; a token is a character."""
    events = []
    for number, text in enumerate(texts):
        last = number == len(texts) - 1
        events += list(reader.read(StreamDelta(
            text=text, token_ids=[1] * len(text), finish_reason=reason if last else None)))
    assert isinstance(events[0], ChoiceStarted) and events[0].first
    rest = [event for event in events[1:] if isinstance(event, ChoiceEvents)]
    assert len(rest) == len(events) - 1 == len(texts)
    return rest


def merged(events: list[ChoiceEvents]) -> list[AnswerPart]:
    """Their parts, but for custom calls merged."""
    parts = [part for event in events for part in event.parts]
    at = next(i for i, part in enumerate(parts) if isinstance(part, CustomToolCall))
    return [*merge_parts(parts[:at]), parts[at], *merge_parts(parts[at + 1:])]


@pytest.mark.parametrize("cut", range(len(TEXT) + 1))
def test_the_parts_are_the_same_however_the_text_is_cut(cut: int) -> None:
    whole, streamed = answer(), answer()
    [want] = events_of(whole, [TEXT])
    got = events_of(streamed, [TEXT[:cut], TEXT[cut:]])
    assert merged(got) == merged([want])
    assert [one.finish_reason for one in got] == [None, "tool_calls"]
    assert got[-1].has_answer and want.finish_reason == "tool_calls"
    assert streamed.usage() == whole.usage() == Usage(0, 0, len(TEXT))
    assert streamed.reasoning_tokens == whole.reasoning_tokens > 0


@pytest.mark.parametrize(("reason", "want"), [
    ("stop", "tool_calls"), ("length", "length"), ("deadline", "length"), ("abort", "abort")])
def test_finish_reasons(reason: str, want: str) -> None:
    assert events_of(answer(), [TEXT], reason)[-1].finish_reason == want


def test_the_start_of_a_choice_comes_before_its_tokens_are_counted() -> None:
    reader = answer(choices=2)
    reader.prompt_tokens = [7]
    events = reader.read(StreamDelta(text="a", token_ids=[1, 2], index=1))
    assert next(events) == ChoiceStarted(1, first=True) and reader.usage() == Usage(7, 0, 0)
    assert isinstance(next(events), ChoiceEvents) and reader.usage() == Usage(7, 0, 2)
    assert next(reader.read(StreamDelta(text="b", token_ids=[3]))) == ChoiceStarted(0, first=False)
