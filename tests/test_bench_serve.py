"""The serving benchmark: the load, the figures, and a run through a real engine."""

from __future__ import annotations

import asyncio
import json
import math
import statistics
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from helpers_cli import Cli, cli  # noqa: F401

from actorium.actors.errors import BadConfig, EngineUnavailable
from actorium.tools.bench import load, serving
from actorium.tools.bench.http import Http, http_stream
from actorium.tools.bench.serving import Done, Piece


def test_arrivals_have_the_rate_and_the_burstiness() -> None:
    for burstiness in (0.5, 1.0, 4.0):
        times = load.arrivals(4000, 10.0, burstiness, 1)
        gaps = [b - a for a, b in zip(times, times[1:], strict=False)]
        assert statistics.fmean(gaps) == pytest.approx(0.1, rel=0.1)
        variation = statistics.pstdev(gaps) / statistics.fmean(gaps)
        assert variation == pytest.approx(burstiness ** -0.5, rel=0.1)
    assert load.arrivals(3, math.inf, 1.0, 0) == [0.0] * 3
    assert load.arrivals(9, 2.0, 1.0, 5) == load.arrivals(9, 2.0, 1.0, 5)


def test_random_prompts_keep_to_their_lengths() -> None:
    asks = load.random_asks(200, load.Shape(50, 20, 0.2), 300, 3)
    lengths = [len(ask.prompt or ()) for ask in asks]
    assert min(lengths) >= 40 and max(lengths) <= 60 and len(set(lengths)) > 5
    assert all(16 <= ask.output <= 24 for ask in asks)
    assert all(0 <= token < 300 for ask in asks for token in ask.prompt or ())


def test_demo_chats() -> None:
    asks = load.demo_asks(20, 32, 0)
    assert len(asks) == 20 and all(ask.messages for ask in asks)
    assert len({ask.messages[0]["content"] for ask in asks if ask.messages}) == 20
    with pytest.raises(BadConfig, match="--num-prompts"):
        load.demo_asks(20_000, 32, 0)


def test_figures() -> None:
    done = [Done(0.0, prompt_tokens=10, tokens=3, first=0.1, last=0.3, gaps=[0.1, 0.1]),
            Done(1.0, prompt_tokens=20, tokens=1, first=1.5, last=1.5, gaps=[]),
            Done(0.0, error="queue_full: no")]
    found = serving.figures(done, 2.0)
    assert (found["completed"], found["failed"], found["errors"]) == (2, 1, ["queue_full: no"])
    assert (found["total_input_tokens"], found["output_throughput"]) == (30, 2.0)
    assert found["mean_ttft_ms"] == pytest.approx(300)
    assert found["mean_tpot_ms"] == pytest.approx(100)
    assert found["p99_itl_ms"] == pytest.approx(100)
    assert found["median_e2el_ms"] == pytest.approx(400)
    text = serving.table(found)
    assert "Mean TTFT (ms):" in text and "300.00" in text and "Speculative" not in text


def test_tokens_that_come_together_share_the_wait() -> None:
    async def stream(ask: load.Ask) -> AsyncIterator[Piece]:
        yield Piece(1)
        await asyncio.sleep(0.03)
        yield Piece(0)
        yield Piece(3)
        yield Piece(0, prompt_tokens=7)

    found, _ = asyncio.run(serving.drive(stream, [load.Ask([1], None, 4)], [0.0], 0,
                                         lambda n: None))
    assert (found[0].tokens, found[0].prompt_tokens) == (4, 7)
    assert len(found[0].gaps) == 3 and found[0].gaps[0] == found[0].gaps[2]
    assert sum(found[0].gaps) == pytest.approx(found[0].last - found[0].first)


def test_concurrency_is_bounded_and_errors_are_kept() -> None:
    under_way, most = 0, 0

    async def stream(ask: load.Ask) -> AsyncIterator[Piece]:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0.002)
        under_way -= 1
        if ask.output == 5:
            raise EngineUnavailable("gone")
        yield Piece(1)

    asks = [load.Ask([1], None, i) for i in range(12)]
    found, _ = asyncio.run(serving.drive(stream, asks, [0.0] * 12, 3, lambda n: None))
    assert most == 3
    assert [d.ok for d in found] == [i != 5 for i in range(12)]
    assert found[5].error == "unavailable: gone"


def test_acceptance_is_what_lies_between_two_readings() -> None:
    name = "spec_decode_num_"
    before = {f"{name}drafts": 10.0, f"{name}draft_tokens": 20.0, f"{name}accepted_tokens": 5.0,
              f"{name}accepted_tokens_pos_0": 4.0, f"{name}accepted_tokens_pos_1": 1.0}
    after = {f"{name}drafts": 20.0, f"{name}draft_tokens": 40.0, f"{name}accepted_tokens": 17.0,
             f"{name}accepted_tokens_pos_0": 12.0, f"{name}accepted_tokens_pos_1": 5.0}
    found = serving.acceptance(before, after)
    assert found["acceptance_per_position"] == [0.8, 0.4]
    assert (found["acceptance_rate"], found["acceptance_length"]) == (0.6, 2.2)
    assert "Position 1" in serving.table({**serving.figures([], 1.0), "speculation": found})
    assert serving.acceptance({}, {}) == {}


def test_a_run_through_the_engine(cli: Cli, tmp_path: Path) -> None:  # noqa: F811
    file = tmp_path / "serve.json"
    done = cli.run("bench", "serve", "--shape", "TINY", "--null-worker", "--device", "cpu",
                   "--num-prompts", "20", "--max-concurrency", "4", "--output-len", "8",
                   "--json", str(file))
    assert done.returncode == 0, done.stderr
    result = json.loads(file.read_text())
    assert (result["completed"], result["total_output_tokens"]) == (20, 160)
    assert result["median_ttft_ms"] > 0
    assert "Serving Benchmark Result" in done.stdout.decode()
    assert cli.entries() == []


def test_a_run_over_http(cli: Cli, tmp_path: Path) -> None:  # noqa: F811
    file = tmp_path / "serve.json"
    done = cli.run("bench", "serve", "--null-worker", "--device", "cpu", "--num-prompts", "12",
                   "--input-len", "9", "--max-concurrency", "4", "--output-len", "8",
                   "--http", "self", "--json", str(file))
    assert done.returncode == 0, done.stderr
    result = json.loads(file.read_text())
    assert (result["completed"], result["total_output_tokens"]) == (12, 96)
    assert (result["total_input_tokens"], result["http"]) == (108, "self")
    assert result["median_ttft_ms"] > 0 and cli.entries() == []


def test_other_servers_streams_are_read_in_any_cutting() -> None:
    """A server that tells no usage: an event is a token; its parts come as they like."""
    events = [b'data: {"choices":[{"text":"a"}]}\r\n\r\n', b'data: {"choices":[]}\n\n',
              b"data: [DONE]\n\n"]

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await reader.readuntil(b"\r\n\r\n"):
            size = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            await reader.readexactly(size)
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
                         b"Transfer-Encoding: chunked\r\n\r\n")
            for part in (*b"".join(events).partition(b"oices"), b""):
                writer.write(b"%x\r\n%b\r\n" % (len(part), part))

    async def run() -> list[list[Piece]]:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        http = Http(f"127.0.0.1:{port}/v1")
        stream = http_stream(http, "m", 0.0)
        found = [[piece async for piece in stream(load.Ask([1], None, 2))] for _ in range(2)]
        http.close()
        server.close()
        return found

    assert asyncio.run(run()) == [[Piece(1), Piece(1)]] * 2


def test_nobody_there(cli: Cli) -> None:  # noqa: F811
    done = cli.run("bench", "serve", "--http", "127.0.0.1:1")
    assert done.returncode == 1 and b"--http: 127.0.0.1:1: Connect" in done.stderr


@pytest.mark.parametrize(("flags", "named"), [
    (("--http", "ftp://x"), "--http"),
    (("--num-prompts", "0"), "--num-prompts"), (("--request-rate", "0"), "--request-rate"),
    (("--dataset", "wiki"), "--dataset"), (("--range-ratio", "1"), "--range-ratio"),
    (("--dataset", "demo", "--shape", "TINY"), "--shape")])
def test_bad_flags(cli: Cli, flags: tuple[str, ...], named: str) -> None:  # noqa: F811
    done = cli.run("bench", "serve", *flags)
    assert done.returncode == 2 and named in done.stderr.decode()
