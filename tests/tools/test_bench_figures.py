"""The figures of a serving run: from streams to numbers, to the table and to result files."""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from actorium.actors.errors import BadConfig, EngineUnavailable
from actorium.tools.bench import figures, results
from actorium.tools.bench.datasets.sample import SampleRequest
from actorium.tools.bench.load_driver import RequestResult, StreamChunk, StreamRecorder, drive
from actorium.tools.bench.results import (
    compared,
    named_runs,
    offline_table,
    picture,
    serving_table,
)

ASK = SampleRequest([1], None, 4)


def result(sent: float, times: list[float], counts: list[int] | None = None,
           prompt: int = 10) -> RequestResult:
    return RequestResult(sent, prompt, times=times, counts=counts or [1] * len(times))


def test_figures() -> None:
    found = [result(0.0, [0.1, 0.2, 0.3]), result(1.0, [1.5], prompt=20),
             RequestResult(0.0, error="queue_full: no", times=[], counts=[])]
    out = figures.figures(found, 2.0, [50.0, 99.0, 99.9])
    assert (out["completed"], out["failed"]) == (2, 1)
    assert (out["total_input_tokens"], out["total_output_tokens"]) == (30, 4)
    assert (out["output_throughput"], out["total_token_throughput"]) == (2.0, 17.0)
    assert (out["request_throughput"], out["request_goodput"]) == (1.0, None)
    assert out["mean_ttft_ms"] == pytest.approx(300)
    assert out["std_ttft_ms"] == pytest.approx(200)
    assert out["p99_ttft_ms"] == pytest.approx(100 + 0.99 * 400)
    assert out["p99.9_ttft_ms"] == pytest.approx(100 + 0.999 * 400)
    assert out["mean_tpot_ms"] == out["mean_itl_ms"] == pytest.approx(100)
    assert out["median_e2el_ms"] == pytest.approx(400)
    assert figures.figures([], 1.0)["completed"] == 0


def test_percentiles_are_between_values() -> None:
    values = [float(v) for v in range(1, 101)]
    assert figures.percentile(values, 50) == 50.5
    assert figures.percentile(values, 99) == pytest.approx(99.01)
    assert figures.percentile(values, 0) == 1 and figures.percentile(values, 100) == 100
    assert figures.percentile([7.0], 99) == 7.0


def test_the_two_latencies_between_tokens() -> None:
    burst = result(0.0, [1.0, 1.3, 1.4], [1, 3, 1])
    assert burst.itl == pytest.approx([0.3, 0.1])
    assert burst.itl_per_token == pytest.approx([0.1, 0.1, 0.1, 0.1])
    assert burst.tpot == pytest.approx(0.1)
    out = figures.figures([burst], 2.0)
    assert out["mean_itl_ms"] == pytest.approx(200)
    assert out["mean_itl_per_token_ms"] == pytest.approx(100)
    text = serving_table(out, ["itl", "itl_per_token"], ["p99"])
    assert "(per event, vLLM's)" in text and "(per token)" in text
    assert [line.split()[-1] for line in text.splitlines() if line.startswith("Mean ITL")] == [
        "200.00", "100.00"]


def test_peaks() -> None:
    found = [result(10.0, [10.5, 11.2, 11.3], [1, 2, 3]), result(11.1, [11.25], [4]),
             result(11.3, [12.9])]
    assert figures.peak_throughput(found, 3.0) == 9
    assert figures.peak_concurrency(found) == 2
    touching = [result(0.0, [1.0]), result(1.0, [2.0])]
    assert figures.peak_concurrency(touching) == 1
    assert figures.peak_throughput(touching, 0.5) == 4
    assert figures.peak_concurrency([]) == figures.peak_throughput([], 1.0) == 0


def test_goodput() -> None:
    found = [result(0.0, [0.1, 0.2]), result(0.0, [0.1, 0.9]), result(0.0, [0.5, 0.6]),
             result(0.0, [0.1])]
    assert figures.goodput(found, {"ttft": 200}, 2.0) == 1.5
    assert figures.goodput(found, {"ttft": 200, "tpot": 150}, 2.0) == 1.0
    assert figures.goodput(found, {"e2el": 150}, 2.0) == 0.5
    out = figures.figures(found, 2.0, goals={"ttft": 200})
    assert out["request_goodput"] == 1.5 and "goodput" in serving_table(out, [], [])


def recorded(*chunks: StreamChunk) -> RequestResult:
    recorder = StreamRecorder(0.0, 5)
    for place, chunk in enumerate(chunks):
        recorder.take(chunk, float(place))
    return recorder.end()


def test_token_counts_with_every_event() -> None:
    found = recorded(StreamChunk("", False, 0, 7), StreamChunk("ab", True, 2),
                     StreamChunk("", True, 2),
                     StreamChunk("c", True, 5), StreamChunk("", False, 5, 7, 4))
    assert (found.counts, found.times, found.text) == ([2, 3], [1.0, 3.0], "abc")
    assert (found.prompt_tokens, found.cached_tokens) == (7, 4)


def test_token_counts_at_the_end_only() -> None:
    found = recorded(StreamChunk("a"), StreamChunk("b"), StreamChunk("c"),
                     StreamChunk("", False, 8))
    assert found.tokens == 8 and found.times == [0.0, 1.0, 2.0]
    assert sorted(found.counts) == [2, 3, 3]


def test_without_token_counts_events_are_counted() -> None:
    found = recorded(StreamChunk("", False), StreamChunk("a"), StreamChunk("b"),
                     StreamChunk("", False))
    assert (found.tokens, found.times, found.prompt_tokens) == (2, [1.0, 2.0], 5)
    assert not recorded(StreamChunk("", False)).ok


def test_concurrency_is_bounded_and_errors_are_kept() -> None:
    under_way, most = 0, 0

    async def stream(ask: SampleRequest) -> AsyncIterator[StreamChunk]:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0.002)
        under_way -= 1
        if ask.output_len == 5:
            raise EngineUnavailable("gone")
        yield StreamChunk("x")

    asks = [SampleRequest([1], None, i) for i in range(12)]
    found, seconds = asyncio.run(drive(stream, asks, [0.0] * 12, 3, lambda n: None))
    assert most == 3 and seconds >= 0.008
    assert [r.ok for r in found] == [i != 5 for i in range(12)]
    assert found[5].error == "unavailable: gone"
    assert max(r.sent for r in found) > 0.005  # those that had to wait count from when they went


def test_requests_are_sent_at_their_time() -> None:
    async def stream(ask: SampleRequest) -> AsyncIterator[StreamChunk]:
        yield StreamChunk("x")

    found, _ = asyncio.run(drive(stream, [ASK] * 3, [0.0, 0.2, 0.4], None, lambda n: None))
    assert [r.sent for r in found] == pytest.approx([0.0, 0.2, 0.4], abs=0.15)
    assert found[1].sent >= 0.2 and found[2].sent >= 0.4


# --- speculation ---------------------------------------------------------------------------------

def test_acceptance_is_what_lies_between_two_readings() -> None:
    name = "spec_decode_num_"
    before = {f"{name}drafts": 10.0, f"{name}draft_tokens": 20.0, f"{name}accepted_tokens": 5.0,
              f"{name}accepted_tokens_pos_0": 4.0, f"{name}accepted_tokens_pos_1": 1.0}
    after = {f"{name}drafts": 20.0, f"{name}draft_tokens": 40.0, f"{name}accepted_tokens": 17.0,
             f"{name}accepted_tokens_pos_0": 12.0, f"{name}accepted_tokens_pos_1": 5.0}
    found = figures.acceptance(before, after)
    assert found["spec_decode_per_position_acceptance_rates"] == [0.8, 0.4]
    assert found["spec_decode_acceptance_rate"] == 60.0
    assert found["spec_decode_acceptance_length"] == 2.2
    text = serving_table({**figures.figures([], 1.0), **found}, [], [])
    assert "Position 1" in text and "40.00" in text and "Draft tokens:" in text
    assert figures.acceptance({}, {}) == figures.acceptance(after, after) == {}


def vllm_metrics(drafts: int, tokens: int, accepted: int, *positions: int) -> str:
    labels = 'engine="0",model_name="m"'
    lines = ["# HELP vllm:spec_decode_num_drafts_total Number of drafts.",
             f"vllm:spec_decode_num_drafts_total{{{labels}}} {drafts}.0",
             f"vllm:spec_decode_num_draft_tokens_total{{{labels}}} {tokens}.0",
             f"vllm:spec_decode_num_accepted_tokens_total{{{labels}}} {accepted}.0",
             f"vllm:spec_decode_num_drafts_created{{{labels}}} 1.7e+09"]
    lines += [f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{{labels},position="{i}"}} {n}.0'
              for i, n in enumerate(positions)]
    return "\n".join(lines)


def test_acceptance_from_metrics_of_vllm() -> None:
    before = figures.counters(vllm_metrics(10, 20, 5, 4, 1))
    after = figures.counters(vllm_metrics(20, 40, 17, 12, 5))
    found = figures.acceptance(before, after)
    assert found["spec_decode_per_position_acceptance_rates"] == [0.8, 0.4]
    assert found["spec_decode_num_drafts"] == 10
    twice = figures.counters(vllm_metrics(1, 2, 1, 1) + "\n" + vllm_metrics(1, 2, 1, 1))
    assert twice["spec_decode_num_drafts"] == 2  # two engines behind one port


def test_acceptance_from_metrics_of_sglang() -> None:
    text = ('sglang:spec_verify_calls_total{{model_name="m"}} {}\n'
            'sglang:generation_tokens_total{{model_name="m"}} {}\n'
            'sglang:spec_accept_rate{{model_name="m"}} 0.7\n'
            'sglang:spec_accept_length{{model_name="m"}} 2.4\n')
    found = figures.acceptance(figures.counters(text.format(100.0, 250.0)),
                                   figures.counters(text.format(200.0, 500.0)))
    assert found == {"spec_decode_acceptance_length": 2.5, "spec_decode_num_drafts": 100,
                     "spec_decode_acceptance_rate": pytest.approx(70.0)}
    gauge = figures.counters('sglang:spec_accept_length{a="b"} 2.4')
    assert figures.acceptance({}, gauge) == {"spec_decode_acceptance_length": 2.4}
    assert figures.counters("nonsense\nx{ 1\nvllm:spec_decode_num_drafts_total NaN?") == {
        "spec_decode_num_drafts": 0.0}


# --- files ---------------------------------------------------------------------------------------

def test_details_are_vllms() -> None:
    found = [result(0.0, [0.1, 0.3]), RequestResult(0.5, error="x: y", times=[], counts=[])]
    out = figures.details(found)
    assert set(out) == set(results.DETAILS)
    assert out["ttfts"] == [0.1, 0.0] and out["output_lens"] == [2, 0]
    assert out["itls"] == [pytest.approx([0.2]), []] and out["errors"] == ["", "x: y"]
    assert "ttfts" not in results.without_details({"ttfts": [], "completed": 1})


def test_names_of_files() -> None:
    head: dict[str, Any] = {"backend": "vllm", "label": None, "model_id": "org/Model-7B",
                            "request_rate": "inf", "date": "20261122-120000"}
    assert results.default_name(head) == "vllm-infqps-Model-7B-20261122-120000.json"
    assert results.default_name({**head, "label": "new", "max_concurrency": 8,
                                 "request_rate": 2.5}) == (
        "new-2.5qps-concurrency8-Model-7B-20261122-120000.json")


def test_files_are_written_appended_and_read(tmp_path: Path) -> None:
    path = tmp_path / "new" / "out.json"
    results.write_result(path, {"output_throughput": 1.0, "label": "a"}, append=True)
    results.write_result(path, {"output_throughput": 2.0, "label": "b"}, append=True)
    assert [r["label"] for r in results.read_results(path)] == ["a", "b"]
    results.write_result(path, {"output_throughput": 3.0}, append=False)
    assert results.read_results(path) == [{"output_throughput": 3.0}]
    path.write_text('{"output_throughput": 1.0}\n{\n "output_throughput": 2.0\n}')
    assert len(results.read_results(path)) == 2
    for text, what in (("", "holds no result"), ("[1]", "no result of"), ("{", "no JSON"),
                       ('{"a": 1}', "output_throughput is missing")):
        path.write_text(text)
        with pytest.raises(BadConfig, match=what):
            results.read_results(path)
    with pytest.raises(BadConfig, match="No such file"):
        results.read_results(tmp_path / "none.json")


def test_sglangs_names_are_understood() -> None:
    found = results.translated({"mean_e2e_latency_ms": 5.0, "total_throughput": 9.0,
                                "accept_length": None, "duration": 1.0, "output_throughput": 4.0})
    assert found == {"mean_e2el_ms": 5.0, "total_token_throughput": 9.0, "duration": 1.0,
                     "output_throughput": 4.0}
    offline = results.translated({"total_latency": 2.0, "successful_requests": 3,
                                  "total_throughput": 7.0})
    assert offline == {"duration": 2.0, "completed": 3, "total_token_throughput": 7.0}


def runs() -> list[tuple[str, dict[str, Any]]]:
    ours = {"label": "ours", "request_rate": "inf",
            **figures.figures([result(0.0, [0.1, 0.2, 0.3])], 1.0),
            "spec_decode_acceptance_length": 2.2, "spec_decode_acceptance_rate": 60.0,
            "spec_decode_per_position_acceptance_rates": [0.8, 0.4]}
    theirs = results.translated({"duration": 1.0, "output_throughput": 1.5, "completed": 1,
                                 "mean_e2e_latency_ms": 600.0, "p90_ttft_ms": 7.0})
    return [("a/x.json", ours), ("a/sgl.jsonl", theirs), ("a/sgl.jsonl", theirs)]


def test_runs_compared() -> None:
    named = named_runs(runs())
    assert [run.name for run in named] == ["ours", "sgl #1", "sgl #2"]
    lines = {cells[0]: cells[1:] for line in compared(named).splitlines()
             if (cells := re.split("  +", line))}
    assert lines["output tokens/s"] == ["3.0", "1.5 (0.50x)", "1.5 (0.50x)"]
    assert lines["mean E2EL ms"] == ["300.00", "600.00 (2.00x)", "600.00 (2.00x)"]
    assert lines["p90 TTFT ms"] == ["-", "7.00", "7.00"]
    assert lines["acceptance % at 1"] == ["40.00", "-", "-"]
    assert lines["request rate"] == ["inf", "-", "-"]


def test_runs_in_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "new" / "runs.png"
    picture(str(path), named_runs(runs()))
    assert path.read_bytes().startswith(b"\x89PNG")


def test_offline_table() -> None:
    text = offline_table({"backend": "engine", "successful_requests": 2, "total_latency": 1.5,
                          "total_input_tokens": 10, "total_output_tokens": 20,
                          "last_gen_throughput": 3.0, "request_throughput": 1.0,
                          "input_throughput": 2.0, "output_throughput": 4.0,
                          "total_throughput": 6.0})
    rows = [line.partition(":")[0] for line in text.splitlines()[1:-1]]
    assert rows == ["Backend", "Successful requests", "Benchmark duration (s)",
                    "Total input tokens", "Total generated tokens",
                    "Last generation throughput (tok/s)", "Request throughput (req/s)",
                    "Input token throughput (tok/s)", "Output token throughput (tok/s)",
                    "Total token throughput (tok/s)"]
    assert math.isclose(float(text.splitlines()[6].split()[-1]), 3.0)


def test_results_are_json() -> None:
    out = {**figures.figures([result(0.0, [0.1, 0.2])], 1.0), **figures.details([result(0, [1])])}
    assert json.loads(json.dumps(out))["completed"] == 1
