"""The events of an answer, whichever API it is written in.

    deltas of the engine -> DeltaReader -> ChoiceStarted, ChoiceEvents -> the API's encoder -> JSON

Parsers, calls of custom tools, usage and finish reasons are dealt with here alone. The events of a
stream are encoded as they come; a whole answer is read as one delta of each choice, and so has the
same events and the same encoder. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import TypeAlias

from msgspec import Struct

from actorium.actors.client.requests import Completion, StreamDelta
from actorium.actors.gateway.parsers.custom_calls import (
    AnswerPart,
    CustomCallReader,
    CustomToolCall,
)
from actorium.actors.gateway.parsers.parts import (
    SPACE,
    MessagePart,
    OutputParser,
    PlainParser,
    ReasoningPart,
    TextPart,
    ToolCallArguments,
    ToolCallBegin,
    merge_parts,
)
from actorium.actors.gateway.parsers.thoughts import ReasoningTokenCounter
from actorium.actors.messages import Pooled, RoutedExperts, TokenLogprob, Usage

STOP, LENGTH, TOOL_CALLS, ABORT = "stop", "length", "tool_calls", "abort"
"""Finish reasons of events, which are OpenAI's and "abort"."""


class ChoiceStarted(Struct, frozen=True):
    """A choice begins: comes before its first delta is counted."""

    index: int
    first: bool
    """No other choice of the answer has begun."""


class ChoiceEvents(Struct, frozen=True):
    """What one delta of a choice comes to: parts of its message, its tokens, and its end."""

    index: int
    """Of several prompts, choices are numbered through."""
    parts: list[AnswerPart]
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None
    prompt_logprobs: list[TokenLogprob | None] | None
    has_answer: bool
    """Text or a call has come by now, not reasoning alone."""
    finish_reason: str | None
    """Set with the last ones of the choice."""
    stop_reason: str | int | None
    routed_experts: RoutedExperts | None = None
    """Set with finish_reason, if asked for."""
    pooled: Pooled | None = None
    """Set with finish_reason: hidden states, if asked for."""

    @property
    def text(self) -> str:
        """Returns the text of its parts."""
        return "".join([part.text for part in self.parts if isinstance(part, TextPart)])


AnswerEvent: TypeAlias = ChoiceStarted | ChoiceEvents


def item_parts(parts: Iterable[AnswerPart], open_kind: type | None, begun: bool
               ) -> Iterator[tuple[AnswerPart, type | None]]:
    """Yields parts for APIs that show a message as items: (part, the kind of the item that it
    begins, or None where it continues the open one). open_kind: of the open item, if any: its
    parts' type; begun: there is an item already."""
    for part in parts:
        kind = ToolCallArguments if isinstance(part, ToolCallBegin) else type(part)
        begins = kind is not open_kind or isinstance(part, ToolCallBegin | CustomToolCall)
        if begins and begun and isinstance(part, TextPart):  # without what separates the two
            part = TextPart(part.text.lstrip(SPACE))
        open_kind, begun = kind, True
        yield part, kind if begins else None


class DeltaReader:
    """Reads the deltas of one answer's choices, and counts their tokens."""

    def __init__(self, new_choice: Callable[[], ChoiceReader] | None = None, prompts: int = 1,
                 choices: int = 1) -> None:
        """new_choice: makes the reader of a choice; None = all its text is the answer. prompts,
        choices: how many prompts there are, and how many choices each has."""
        self._new_choice = new_choice or (lambda: ChoiceReader(PlainParser()))
        self._choices = choices
        self._readers: dict[int, ChoiceReader] = {}
        self._counts: list[dict[int, Usage]] = [{} for _ in range(prompts)]
        self.prompt_tokens: Sequence[int] = ()
        """Of each prompt, once they are known: a choice's usage is exact when it has ended."""

    def read(self, delta: StreamDelta | Completion) -> Iterator[AnswerEvent]:
        """Yields the events of a delta. `usage` has counted it after the choice's start."""
        reader = self._readers.get(delta.index)
        if reader is None:
            first = not self._readers
            reader = self._readers[delta.index] = self._new_choice()
            yield ChoiceStarted(delta.index, first)
        before = self.usage_of(delta.index)
        self._counts[delta.index // self._choices][delta.index] = delta.usage or Usage(
            before.prompt_tokens, 0, before.completion_tokens + len(delta.token_ids))
        yield reader.read(delta)

    def usage_of(self, index: int) -> Usage:
        """Returns the usage of a choice so far."""
        prompt = index // self._choices
        return self._counts[prompt].get(index) or Usage(self._prompt(prompt), 0, 0)

    def usage(self) -> Usage:
        """Returns the usage of all choices so far."""
        return usage_of_prompts([
            usage_of_choices(counts.values() or [Usage(self._prompt(prompt), 0, 0)])
            for prompt, counts in enumerate(self._counts)])

    def _prompt(self, prompt: int) -> int:
        return self.prompt_tokens[prompt] if prompt < len(self.prompt_tokens) else 0

    @property
    def reasoning_tokens(self) -> int:
        """Returns the reasoning tokens of all choices so far."""
        return sum(reader.reasoning_tokens for reader in self._readers.values())


def usage_of_choices(counts: Iterable[Usage]) -> Usage:
    """Returns the usage of one prompt's choices together."""
    each = list(counts)
    return Usage(max(one.prompt_tokens for one in each), max(one.cached_tokens for one in each),
                 *_sums(each))


def usage_of_prompts(counts: Sequence[Usage]) -> Usage:
    """Returns the usage of several prompts together."""
    return Usage(sum(one.prompt_tokens for one in counts), sum(one.cached_tokens for one in counts),
                 *_sums(counts))


def _sums(counts: Sequence[Usage]) -> tuple[int, int, int, int]:
    """Of the tokens; and the newest weights."""
    return (sum(one.completion_tokens for one in counts), sum(one.draft_tokens for one in counts),
            sum(one.accepted_tokens for one in counts), max(one.weight_version for one in counts))


class ChoiceReader:
    """Reads one choice."""

    def __init__(self, parser: OutputParser, keeps_reasoning: bool = True, max_calls: int = 1,
                 mark: Sequence[int] = (), customs: Collection[str] = ()) -> None:
        """keeps_reasoning: False = it is left out; max_calls: later calls are dropped; mark: see
        `ReasoningTokenCounter`; customs: names of the custom tools."""
        self._parser, self._keeps_reasoning, self._max_calls = parser, keeps_reasoning, max_calls
        self._reasoning = ReasoningTokenCounter(mark)
        self._custom_calls = CustomCallReader(customs) if customs else None
        self._has_calls = self._has_answer = False

    def read(self, delta: StreamDelta | Completion) -> ChoiceEvents:
        """Returns what is certain now; adjacent parts of a kind are merged."""
        reason = delta.finish_reason
        parts = self._parser.feed(delta.text)
        if reason is not None:
            parts += self._parser.end(cut=reason != STOP)
        self._reasoning.add(parts, delta.text, delta.token_ids)
        kept = [part for part in merge_parts(parts) if self._keeps(part)]
        shown: list[AnswerPart] = [*kept] if self._custom_calls is None \
            else self._custom_calls.add(kept, last=reason is not None)
        return ChoiceEvents(
            delta.index, shown, delta.token_ids, delta.logprobs, delta.prompt_logprobs,
            self._has_answer, self._reason(reason), delta.stop_reason, delta.routed_experts,
            delta.pooled)

    def _keeps(self, part: MessagePart) -> bool:
        if isinstance(part, ReasoningPart):
            return self._keeps_reasoning
        self._has_answer = True
        self._has_calls |= isinstance(part, ToolCallBegin)
        return isinstance(part, TextPart) or part.call < self._max_calls

    def _reason(self, name: str | None) -> str | None:
        if name == STOP and self._has_calls:
            return TOOL_CALLS
        return LENGTH if name == "deadline" else name

    @property
    def reasoning_tokens(self) -> int:
        """Returns the reasoning tokens so far."""
        return self._reasoning.count
