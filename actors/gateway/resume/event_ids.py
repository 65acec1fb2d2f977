"""Resumes streams where they broke off: what event ids contain, and how a stream is continued.

The engine resends a request's tokens from the first; which events they become depends on how they
are cut into deltas (roles, parts of calls, counts). So an id contains how much of each choice the
route had received before (`places`), what it received last (`cuts`), and how many events came of
that. A resumed stream is cut at the same places, the route makes the same events, and those up to
that one are dropped: what follows is what would have followed. Some counts depend on how everything
before was cut (the number of events, for example): they are in the id as well (`counts`).

An id is `RID:COUNTS:PLACES:CUTS:EVENTS`; counts are those before the cuts, places and
cuts are `choice.characters.tokens` with an "f" where the choice had ended, joined by commas;
choices are numbered through all prompts. Pure, but for the streams.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple, Protocol

import msgspec

from actorium.actors.client.requests import StreamDelta, merge_deltas
from actorium.actors.gateway.http.http_errors import bad_field
from actorium.actors.gateway.resume.delta_streams import Deltas, RelayedStream
from actorium.actors.messages import TokenLogprob

MAX_ID = 4096
MAX_CHOICES = 64
"""Of all prompts together: each event's id has an entry for each."""
KNOWN, CUTS, NEW = range(3)
"""Phases of a resumed stream: before the position's cuts, at them, behind them."""
_CUT = r"\d{1,3}\.\d{1,9}\.\d{1,9}f?"
_ID = re.compile(rf"([\x21-\x39\x3b-\x7e]{{1,64}}):((?:\d{{1,9}}(?:,\d{{1,9}})*)?)"
                 rf":((?:{_CUT}(?:,{_CUT})*)?)"
                 rf":((?:{_CUT}(?:,{_CUT})*)?):(\d{{1,9}})")


class CutCounts(Protocol):
    """What the next events of an answer depend on beside its text and tokens so far: on how it was
    cut into deltas. A resumed stream begins with the same."""

    def counts(self) -> tuple[int, ...]:
        """Returns the counts."""

    def restore(self, counts: tuple[int, ...]) -> None:
        """Sets the counts. Raises `HttpError` 400 where they cannot be this answer's."""


class Cut(NamedTuple):
    """A number of characters and tokens of a choice."""

    choice: int
    chars: int
    tokens: int
    ended: bool


class StreamPosition(NamedTuple):
    """A position between two events of a stream."""

    rid: str
    counts: tuple[int, ...]
    """As `CutCounts.counts` returned them before the cuts."""
    places: list[Cut]
    cuts: list[Cut]
    events: int

    def __str__(self) -> str:
        counts = ",".join(map(str, self.counts))
        return f"{self.rid}:{counts}:{_written(self.places)}:{_written(self.cuts)}:{self.events}"


def parse_event_id(text: str) -> StreamPosition:
    """Parses what `str` writes. Raises `HttpError` 400."""
    found = _ID.fullmatch(text) if len(text) <= MAX_ID else None
    if found is None:
        raise bad_field("Last-Event-ID", "not the id of an event of this engine")
    rid, counts, places, cuts, events = found.groups()
    return StreamPosition(rid, tuple(map(int, counts.split(","))) if counts else (),
                          _cuts(places), _cuts(cuts), int(events))


def decode_position(encoded: bytes) -> StreamPosition:
    """Decodes what `ResumableStream.encoded_position` has returned."""
    return _decode_position(encoded)


def _cuts(text: str) -> list[Cut]:
    found = []
    for one in text.split(",") if text else ():
        choice, chars, tokens = map(int, one.rstrip("f").split("."))
        found.append(Cut(choice, chars, tokens, one.endswith("f")))
    return found


_encode_position = msgspec.msgpack.Encoder().encode
_decode_position = msgspec.msgpack.Decoder(StreamPosition).decode


class ChoiceBuffer:
    """The part of a choice that has arrived and has not been passed on."""

    def __init__(self) -> None:
        self.text = ""
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprob] | None = None
        self.prompt_logprobs: list[TokenLogprob | None] | None = None
        self.end: StreamDelta | None = None

    def add(self, delta: StreamDelta) -> None:
        """Adds a delta."""
        self.text += delta.text
        self.tokens += delta.token_ids
        if delta.logprobs is not None:
            self.logprobs = (self.logprobs or []) + delta.logprobs
        self.prompt_logprobs = self.prompt_logprobs or delta.prompt_logprobs
        if delta.finish_reason is not None:
            self.end = delta

    def has(self, cut: Cut) -> bool:
        """Returns whether so much has arrived."""
        return (len(self.text) >= cut.chars and len(self.tokens) >= cut.tokens
                and (self.end is not None or not cut.ended))

    @property
    def empty(self) -> bool:
        return not (self.text or self.tokens or self.end or self.prompt_logprobs)

    def rest(self, index: int) -> Cut:
        """Returns a cut behind everything."""
        return Cut(index, len(self.text), len(self.tokens), self.end is not None)

    def cut_off(self, cut: Cut) -> StreamDelta:
        """Removes and returns the part up to a cut."""
        chars, tokens, end = cut.chars, cut.tokens, self.end if cut.ended else None
        logprobs = self.logprobs
        made = StreamDelta(
            text=self.text[:chars], token_ids=self.tokens[:tokens],
            logprobs=None if logprobs is None else logprobs[:tokens] or None,
            prompt_logprobs=self.prompt_logprobs, index=cut.choice)
        if end is not None:
            made = msgspec.structs.replace(made, finish_reason=end.finish_reason,
                                           stop_reason=end.stop_reason, usage=end.usage,
                                           routed_experts=end.routed_experts,
                                           pooled=end.pooled)
        self.text, self.tokens = self.text[chars:], self.tokens[tokens:]
        self.logprobs = None if logprobs is None else logprobs[tokens:]
        self.prompt_logprobs = None
        if cut.ended:
            self.end = None
        return made


class RecutStream(RelayedStream):
    """A stream from its start, cut as a position says: first its places, then its cuts together,
    then the rest."""

    def __init__(self, source: Deltas, position: StreamPosition,
                 cut_counts: CutCounts | None) -> None:
        super().__init__(source)
        self._position, self._cut_counts = position, cut_counts
        self._places, self._cuts = deque(position.places), list(position.cuts)
        self._held: dict[int, ChoiceBuffer] = {}
        self._rest: list[StreamDelta] = []
        self._phase = KNOWN if position.places else CUTS

    def sent_before(self, events: int) -> bool:
        """Returns whether so many events since the last deltas were sent before the position."""
        return self._phase == KNOWN or (self._phase == CUTS and events <= self._position.events)

    def more(self) -> list[StreamDelta]:
        rest, self._rest = self._rest, []
        return rest or ([] if self._held else self._source.more())

    async def __anext__(self) -> StreamDelta:
        if self._places:
            return await self._cut(self._places.popleft())
        if self._cuts:
            cuts, self._cuts = self._cuts, []
            first, *self._rest = [await self._cut(cut) for cut in cuts]
            self._phase = CUTS
            if self._cut_counts is not None:
                self._cut_counts.restore(self._position.counts)
            return first
        delta = self._left_over() or await self._source.__anext__()
        self._phase = NEW
        return delta

    def _left_over(self) -> StreamDelta | None:
        while self._held:
            index, held = self._held.popitem()
            if not held.empty:
                return held.cut_off(held.rest(index))
        return None

    async def _cut(self, cut: Cut) -> StreamDelta:
        held = self._held.setdefault(cut.choice, ChoiceBuffer())
        while not held.has(cut):
            delta = None if held.end else await anext(self._source, None)
            if delta is None:
                raise bad_field("Last-Event-ID", "this stream has no such event")
            self._held.setdefault(delta.index, ChoiceBuffer()).add(delta)
        return held.cut_off(cut)


class ResumableStream(RelayedStream):
    """A stream that tracks what the route has received, and so can name its events."""

    def __init__(self, source: Deltas, rid: str, position: StreamPosition | None,
                 cut_counts: CutCounts | None, shows_ids: bool = True,
                 event_end: bytes = b"\n\n") -> None:
        """shows_ids: events get ids; event_end: what ends each of them."""
        self._recut = None if position is None else RecutStream(source, position, cut_counts)
        super().__init__(self._recut or source)
        self._rid, self._cut_counts, self._shows_ids = rid, cut_counts, shows_ids
        self._event_end = event_end
        self._counts: tuple[int, ...] = ()
        # As `Cut`s, but plain tuples: this is done for every token.
        self._places: dict[int, tuple[int, int, int, bool]] = {}
        self._cuts: list[tuple[int, int, int, bool]] = []
        self._events = 0
        self._prefix = b""
        """The ids' prefix, until the next deltas are passed on."""

    async def __anext__(self) -> StreamDelta:
        delta = await self._source.__anext__()
        for choice, chars, tokens, ended in self._cuts:
            before = self._places.get(choice)
            if before is not None:
                chars, tokens = before[1] + chars, before[2] + tokens
                ended = ended or before[3]
            self._places[choice] = choice, chars, tokens, ended
        self._cuts.clear()
        self._events = 0
        self._counts = () if self._cut_counts is None else self._cut_counts.counts()
        self._note(delta)
        return delta

    def more(self) -> list[StreamDelta]:
        """Returns ready deltas, those of a choice joined so that ids stay short."""
        found = self._source.more()
        if found:
            found = merge_deltas(found)
            for delta in found:
                self._note(delta)
        return found

    def _note(self, delta: StreamDelta) -> None:
        self._cuts.append((delta.index, len(delta.text), len(delta.token_ids),
                           delta.finish_reason is not None))
        self._prefix = b""

    def label(self, events: bytes) -> bytes:
        """Returns the events with their ids, without those that were sent before the position."""
        end = self._event_end
        if not self._shows_ids and self._recut is None:
            self._events += events.count(end)
            return events
        prefix = self._prefix
        if not prefix and self._shows_ids:
            counts = ",".join(map(str, self._counts))
            places = _written(self._places.values())
            prefix = self._prefix = (f"id: {self._rid}:{counts}:{places}:"
                                     f"{_written(self._cuts)}:").encode()
        if self._recut is None and events.count(end) == 1:
            self._events += 1
            return b"%b%d\n%b" % (prefix, self._events, events)
        out = []
        for one in events.split(end)[:-1]:
            self._events += 1
            if self._recut is None or not self._recut.sent_before(self._events):
                out.append(b"%b%d\n%b%b" % (prefix, self._events, one, end) if prefix
                           else one + end)
        return b"".join(out)

    def encoded_position(self) -> bytes:
        """Returns the position behind the events that `label` returned last, for
        `decode_position`."""
        return _encode_position((self._rid, self._counts, list(self._places.values()), self._cuts,
                                 self._events))


def _written(cuts: Iterable[tuple[int, int, int, bool]]) -> str:
    """Formats cuts as in an id."""
    return ",".join([f"{choice}.{chars}.{tokens}{'f' if ended else ''}"
                     for choice, chars, tokens, ended in cuts])
