"""Deltas as routes read them: who lags behind is told several tokens at once, and all of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from actorium.actors.client.requests import StreamDelta, merge_deltas
from actorium.actors.errors import QueueFull
from actorium.actors.gateway.answer_events import DeltaReader
from actorium.actors.gateway.resume.delta_streams import (
    MergedStream,
    SharedStreams,
    collected,
    with_ready,
)
from actorium.actors.messages import TokenLogprob, Usage


class Bursts:
    """A stream whose deltas come in bursts; raises `error` at its end."""

    def __init__(self, bursts: list[list[StreamDelta]], error: Exception | None = None) -> None:
        self._bursts, self._ready, self._error = list(bursts), list[StreamDelta](), error

    def more(self) -> list[StreamDelta]:
        found, self._ready = self._ready, []
        return found

    def __aiter__(self) -> AsyncIterator[StreamDelta]:
        return self

    async def __anext__(self) -> StreamDelta:
        await asyncio.sleep(0)
        if not self._bursts:
            if self._error is not None:
                raise self._error
            raise StopAsyncIteration
        first, *self._ready = self._bursts.pop(0)
        return first


def delta(text: str, index: int = 0, end: bool = False) -> StreamDelta:
    """One token, or the end of a choice."""
    if end:
        return StreamDelta(text=text, token_ids=[], index=index, finish_reason="stop",
                           usage=Usage(3, 0, 9))
    return StreamDelta(text=text, token_ids=[ord(text)], index=index,
                       logprobs=[TokenLogprob(ord(text), -1.0, 1, [])])


async def read(stream: Any) -> list[list[StreamDelta]]:
    return [with_ready(one, stream) async for one in stream]


def test_a_burst_is_one_delta_of_each_choice() -> None:
    bursts = [[delta("a")], [delta("b"), delta("x", 1), delta("c"), delta("y", 1)],
              [delta("d"), delta("", 0, end=True)], [delta("", 1, end=True)]]
    got = asyncio.run(read(Bursts(bursts)))
    assert [[(one.index, one.text) for one in several] for several in got] == \
        [[(0, "a")], [(0, "bc"), (1, "xy")], [(0, "d")], [(1, "")]]
    burst = got[1][0]
    assert burst.token_ids == [ord("b"), ord("c")] and len(burst.logprobs or ()) == 2
    assert got[2][0].finish_reason == "stop" and got[2][0].usage == Usage(3, 0, 9)


def test_running_counts_end_with_the_engines_own() -> None:
    answer = DeltaReader(choices=2)
    answer.prompt_tokens = [3]
    assert answer.usage() == Usage(3, 0, 0)
    for one, want in ((delta("a"), 1), (delta("b", 1), 2), (delta("c"), 3),
                      (delta("", 0, end=True), 10), (delta("d", 1), 11)):
        list(answer.read(one))
        assert answer.usage() == Usage(3, 0, want)


@pytest.mark.parametrize("number", [1, 2, 5])
def test_merged_streams_return_everything(number: int) -> None:
    streams: Any = [Bursts([[delta(c) for c in text] for text in ("ab", "c", "def")])
                    for _ in range(number)]
    said = [""] * number
    for several in asyncio.run(read(MergedStream(streams, 2))):
        for one in several:
            which, choice = divmod(one.index, 2)
            said[which] += one.text
            assert choice == 0
    assert said == ["abcdef"] * number


@pytest.mark.parametrize("number", [1, 3])
def test_an_error_of_one_stream_ends_all(number: int) -> None:
    streams: Any = [Bursts([[delta("a")]] * 50) for _ in range(number - 1)]
    streams.append(Bursts([[delta("a")]], QueueFull("full")))
    with pytest.raises(QueueFull):
        asyncio.run(read(MergedStream(streams, 1)))


class Closed(Bursts):
    """One that can be closed."""

    async def aclose(self) -> None:
        """Nothing to close."""


class Fed(Closed):
    """A stream that waits for each of its deltas."""

    def __init__(self) -> None:
        super().__init__([])
        self.fed: asyncio.Queue[StreamDelta] = asyncio.Queue()

    async def __anext__(self) -> StreamDelta:
        return await self.fed.get()


def whole(deltas: list[StreamDelta]) -> list[tuple[int, str, list[int], int, str | None]]:
    """What deltas come to, by choice."""
    return [(one.index, one.text, one.token_ids, len(one.logprobs or ()), one.finish_reason)
            for one in sorted(merge_deltas(deltas), key=lambda one: one.index)]


@pytest.mark.parametrize("choices", [1, 3])
def test_a_shared_stream_is_merged_and_each_reader_gets_all_of_it(choices: int) -> None:
    """One reader keeps up, one stops in the middle and goes on, one comes late."""
    said = [delta(chr(97 + number % 26), number % choices) for number in range(20_000)]

    async def run() -> tuple[int, list[list[StreamDelta]]]:
        source, joins = Fed(), SharedStreams()

        async def feed(some: list[StreamDelta]) -> None:
            for one in some:
                source.fed.put_nowait(one)
            while not source.fed.empty():
                await asyncio.sleep(0)
            await asyncio.sleep(0)

        def join() -> Any:
            return joins.join("n", "n.x", lambda: source, 9.0)  # type: ignore[arg-type,return-value]

        quick, slow = join(), join()
        told: list[list[StreamDelta]] = [[], [], []]
        for at in range(0, len(said), 100):
            await feed(said[at:at + 100])
            told[0] += with_ready(await anext(quick), quick)
            if at in (0, 700, 9000):
                told[1] += [await anext(slow) for _ in range(7)]
        late = join()
        kept = len(quick._shared.log.deltas)
        for reader, got in ((slow, told[1]), (late, told[2])):
            got += with_ready(await anext(reader), reader)
            await reader.aclose()
        await quick.aclose()
        joins.drain()
        await asyncio.sleep(0.01)
        return kept, told

    kept, told = asyncio.run(run())
    assert kept < 1000, "of 20,000: not one for each token"
    for got in told:
        assert whole(got) == whole(said)


def test_a_completion_that_is_read_as_a_stream_is_complete() -> None:
    bursts = [[delta(chr(97 + number % 26), number % 2)] for number in range(2000)]
    ends = [[delta("", 0, end=True)], [delta("", 1, end=True)]]
    stream: Any = Closed([*bursts, *ends])

    admitted: list[Any] = []

    async def run() -> list[Any]:
        return [found async for found in collected([stream], admitted.append)]

    ((_, completions),) = asyncio.run(run())
    assert admitted == [stream]
    assert [one.token_ids for one in completions] == [
        [each[0].token_ids[0] for each in bursts if each[0].index == choice] for choice in (0, 1)]
    assert [len(one.text) for one in completions] == [1000, 1000]
    assert [len(one.logprobs or ()) for one in completions] == [1000, 1000]
    assert [one.usage for one in completions] == 2 * [Usage(3, 0, 9)]
