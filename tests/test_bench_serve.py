"""`actorium bench serve`: its flags, streams of several makers' servers, and runs through a real
engine."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from helpers_cli import Cli, cli  # noqa: F401

from actorium.actors.config import ModelConfig
from actorium.actors.errors import BadConfig
from actorium.actors.gateway.actor import where
from actorium.actors.runtime.rundir import engine_dir
from actorium.tools.bench.backends import CHAT, COMPLETIONS, GENERATE, Asking, http_stream, kind_of
from actorium.tools.bench.datasets.sample import SampleRequest
from actorium.tools.bench.http import Http
from actorium.tools.bench.run import RequestResult, drive
from actorium.tools.bench.sse import EventReader
from actorium.tools.cli import bench_serve
from actorium.tools.cli.bench_options import ServeOptions, check_serve
from actorium.tools.cli.bench_target import target_of
from actorium.tools.cli.flags import parse
from actorium.tools.cli.help import field_docs

VLLM_FIELDS = {
    "date", "endpoint_type", "backend", "label", "model_id", "tokenizer_id", "num_prompts",
    "request_rate", "burstiness", "max_concurrency", "duration", "completed", "failed",
    "total_input_tokens", "total_output_tokens", "request_throughput", "request_goodput",
    "output_throughput", "total_token_throughput", "max_output_tokens_per_s",
    "max_concurrent_requests",
    *(f"{what}_{name}_ms" for what in ("mean", "median", "std", "p99")
      for name in ("ttft", "tpot", "itl", "e2el"))}
"""What vLLM's result files hold."""
DETAILED = {"input_lens", "output_lens", "start_times", "ttfts", "itls", "generated_texts",
            "errors"}


# --- server-sent events --------------------------------------------------------------------------

STREAM = (b"\xef\xbb\xbf: a comment\n\nid: 7\nevent: x\ndata: {\"a\":1}\n\ndata:two\r\n\r\n"
          b"data: three\ndata: lines\n\nretry: 5\rdata: \xc3\xa9\r\r\n\ndata: last")


def test_events_in_any_cutting() -> None:
    wanted = [b'{"a":1}', b"two", b"three\nlines", "é".encode(), b"last"]
    for size in (1, 2, 3, 7, 1000):
        reader = EventReader()
        found = [event for place in range(0, len(STREAM), size)
                 for event in reader.feed(STREAM[place:place + size])]
        assert found + list(reader.end()) == wanted, size
    for cut in range(len(STREAM)):
        reader = EventReader()
        found = [*reader.feed(STREAM[:cut]), *reader.feed(b""), *reader.feed(STREAM[cut:])]
        assert found + list(reader.end()) == wanted, cut


# --- other makers' servers -----------------------------------------------------------------------

Answer = Callable[[str, dict[str, Any]], list[bytes]]
"""(path, body) -> the parts of the answer, head and all."""


def stream_of(*events: object, done: bool = True) -> list[bytes]:
    """A chunked answer, one chunk an event."""
    parts = [b"data: " + json.dumps(event).encode() + b"\n\n" for event in events]
    parts += [b"data: [DONE]\n\n"] if done else []
    head = (b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n")
    return [head, *(b"%x\r\n%b\r\n" % (len(part), part) for part in parts), b"0\r\n\r\n"]


def plain(text: bytes, status: bytes = b"200 OK") -> list[bytes]:
    return [b"HTTP/1.1 %b\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
            % (status, len(text), text)]


async def _served(answer: Answer, reader: asyncio.StreamReader,
                  writer: asyncio.StreamWriter) -> None:
    while not reader.at_eof():
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:
            break
        size = next((int(line.split(b":")[1]) for line in head.lower().split(b"\r\n")
                     if line.startswith(b"content-length:")), 0)
        body = json.loads(await reader.readexactly(size)) if size else {}
        parts = answer(head.split()[1].decode(), body)
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0)
        if b"Connection: close" in parts[0]:
            break
    writer.close()


def asked(answer: Answer, endpoint: str, asking: Asking,
          *requests: SampleRequest) -> list[RequestResult]:
    """What becomes of requests to a scripted server, one after the other."""

    async def run() -> list[RequestResult]:
        server = await asyncio.start_server(lambda r, w: _served(answer, r, w), "127.0.0.1", 0)
        http = Http(f"127.0.0.1:{server.sockets[0].getsockname()[1]}/v1")
        found, _ = await drive(http_stream(http, endpoint, asking), requests,
                               [0.0] * len(requests), 1, lambda n: None)
        http.close()
        server.close()
        return found

    return asyncio.run(asyncio.wait_for(run(), 20))


def completion_event(text: str | None, reason: str | None = None, **more: Any) -> dict[str, Any]:
    return {"id": "c", "object": "text_completion",
            "choices": [{"index": 0, "text": text, "logprobs": None, "finish_reason": reason}],
            "usage": None, **more}


def test_vllms_completions() -> None:
    """Usage in every event, of which one is of a burst, then usage alone."""
    bodies: list[dict[str, Any]] = []

    def answer(path: str, body: dict[str, Any]) -> list[bytes]:
        assert path == "/v1/completions"
        bodies.append(body)
        usage = [{"prompt_tokens": 9, "total_tokens": 9 + n, "completion_tokens": n}
                 for n in (1, 4, 4, 5)]
        return stream_of(completion_event("a", usage=usage[0]),
                         completion_event("bcd", usage=usage[1]),
                         completion_event("", usage=usage[2]),
                         completion_event("e", "length", usage=usage[3]),
                         {"choices": [], "usage": usage[3]})

    found = asked(answer, COMPLETIONS, Asking("m", {"temperature": 0.5, "top_k": 3}, True,
                                              {"seed": 1}),
                  SampleRequest([1, 2], None, 5), SampleRequest("hello", None, 5))
    assert [(r.counts, r.prompt_tokens, r.text, r.error) for r in found] == [
        ([1, 3, 1], 9, "abcde", None)] * 2
    assert bodies[0] == {
        "prompt": [1, 2], "max_tokens": 5, "stream": True, "model": "m", "ignore_eos": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "temperature": 0.5, "top_k": 3, "seed": 1}
    assert bodies[1]["prompt"] == "hello"


def test_vllms_chats() -> None:
    """A role chunk is no token; reasoning and calls are; usage comes at the end alone."""

    def answer(path: str, body: dict[str, Any]) -> list[bytes]:
        assert path == "/v1/chat/completions"
        assert body["messages"] == [{"role": "user", "content": "hi"}] and "prompt" not in body
        deltas: list[dict[str, Any]] = [
            {"role": "assistant", "content": ""}, {"reasoning_content": "hm"}, {"content": "x"},
            {"tool_calls": [{"index": 0, "function": {"arguments": "{}"}}]}, {}]
        return stream_of(*({"choices": [{"index": 0, "delta": delta}]} for delta in deltas),
                         {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 6,
                                                   "prompt_tokens_details": {"cached_tokens": 2}}})

    found, = asked(answer, CHAT, Asking(), SampleRequest("hi", None, 9))
    assert (found.counts, found.text, found.prompt_tokens) == ([2, 2, 2], "hmx", 3)
    assert found.cached_tokens == 2


@pytest.mark.parametrize("cumulative", [True, False])
def test_sglangs_own_stream(cumulative: bool) -> None:
    """The text so far in every event, or with --incremental-streaming-output what is new."""

    def answer(path: str, body: dict[str, Any]) -> list[bytes]:
        assert path == "/generate"
        assert body == {"input_ids": [1, 2], "stream": True, "sampling_params": {
            "max_new_tokens": 4, "ignore_eos": True, "temperature": 0.0}}
        texts = ["wo", "word", "words."] if cumulative else ["wo", "rd", "s."]
        return stream_of(*({"text": text, "output_ids": [1], "meta_info": {
            "id": "a", "finish_reason": None, "prompt_tokens": 2, "completion_tokens": tokens,
            "cached_tokens": 1}} for text, tokens in zip(texts, (1, 3, 4), strict=True)))

    found, = asked(answer, GENERATE, Asking(None, {"temperature": 0.0}, True),
                   SampleRequest([1, 2], None, 4))
    assert (found.counts, found.text, found.cached_tokens) == ([1, 2, 1], "words.", 1)


def test_llama_servers_stream() -> None:
    """No usage but at the end; the connection is closed behind it, without a length."""

    def answer(path: str, body: dict[str, Any]) -> list[bytes]:
        events = [completion_event("a"), completion_event("b"),
                  {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 2},
                   "timings": {"prompt_n": 5}}]
        return [b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n",
                *(f"data: {json.dumps(event)}\n\n".encode() for event in events),
                b"data: [DONE]\n"]

    found = asked(answer, COMPLETIONS, Asking(), *[SampleRequest("x", None, 2)] * 2)
    assert [(r.counts, r.prompt_tokens, r.error) for r in found] == [([1, 1], 5, None)] * 2


def test_whole_answers() -> None:
    def answer(path: str, body: dict[str, Any]) -> list[bytes]:
        assert body["stream"] is False and "stream_options" not in body
        whole = {"choices": [{"message": {"role": "assistant", "content": "all"},
                              "finish_reason": "stop"}],
                 "usage": {"prompt_tokens": 4, "completion_tokens": 3}}
        return plain(json.dumps(whole).encode())

    found, = asked(answer, CHAT, Asking(stream=False), SampleRequest("hi", None, 9))
    assert (found.counts, found.text, found.itl) == ([3], "all", [])


def test_errors_of_servers() -> None:
    torn = [part.replace(b"chunked\r\n", b"chunked\r\nConnection: close\r\n")
            for part in stream_of(completion_event("a"))[:2]]
    answers = [plain(b'{"error": {"message": "too\\nlong"}}', b"400 Bad Request"),
               stream_of(completion_event("a"), {"error": {"message": "worker died"}}),
               torn, stream_of("no object"),
               stream_of(completion_event("a"), completion_event("", "stop"))]
    texts = iter(answers)
    found = asked(lambda path, body: next(texts), COMPLETIONS, Asking(),
                  *[SampleRequest("x", None, 2)] * 5)
    errors = [r.error or "" for r in found]
    assert "400" in errors[0] and "too" in errors[0]
    assert "worker died" in errors[1] and "the connection broke" in errors[2]
    assert "in the stream: Expected `object`" in errors[3]
    assert (found[4].counts, errors[4]) == ([1], "")


def test_messages_do_not_fit_everywhere() -> None:
    chat = SampleRequest(None, [{"role": "user", "content": "x"}], 2)
    for endpoint, request in ((COMPLETIONS, chat), (GENERATE, chat),
                              (CHAT, SampleRequest([1], None, 2))):
        found, = asked(lambda path, body: stream_of(), endpoint, Asking(), request)
        assert found.error is not None and found.error.startswith("invalid_request")
    assert kind_of("/v2/chat/completions") == CHAT and kind_of("/generate") == GENERATE
    with pytest.raises(BadConfig, match="--endpoint"):
        kind_of("/v1/embeddings")


# --- flags ---------------------------------------------------------------------------------------

def test_flags_of_both_worlds() -> None:
    found = parse("actorium bench serve [MODEL]", [
        "--warmup-requests", "3", "--extra-body={}", "--disable-ignore-eos", "--dataset", "random",
        "--random_input", "4", "--random-seed", "9", "--tag", "x", "--http", "a:1", "--no-stream",
        "--goodput", "ttft:5", "tpot:6", "--port", "7", "--trust-remote-code"], ServeOptions)
    options = found.options
    assert (options.num_warmups, options.extra_request_body, options.seed) == (3, "{}", 9)
    assert (options.random_input_len, options.label, options.base_url) == (4, "x", "a:1")
    assert (options.ignore_eos, options.disable_stream) == (False, True)
    assert "ignore_eos" in found.written and options.goodput == ["ttft:5", "tpot:6"]
    assert options.port == 7 and found.config.gateway.port != 7
    assert found.config.model.seed == ModelConfig().seed


def test_help_has_a_text_for_every_flag() -> None:
    fields = {field.name for field in msgspec.structs.fields(ServeOptions)}
    assert fields <= set(field_docs(ServeOptions))


def target(named: bool = False, there: bool = False, **values: Any) -> tuple[Any, ...]:
    looked: list[str] = []

    def answers(url: str) -> bool:
        looked.append(url)
        return there

    found = target_of(ServeOptions(**values), {}, named, answers)
    return found.backend, found.endpoint, found.url, found.own, looked


def test_who_is_asked() -> None:
    vllm, sglang = "http://127.0.0.1:8000", "http://127.0.0.1:30000"
    assert target() == ("actorium", "", None, True, [])
    assert target(named=True) == ("actorium", "", None, False, [])
    assert target(base_url="self") == ("openai", COMPLETIONS, None, True, [])
    assert target(base_url="http://a:1") == ("openai", COMPLETIONS, "http://a:1", False, [])
    assert target(port=9) == ("openai", COMPLETIONS, "http://127.0.0.1:9", False, [])
    assert target(host="0.0.0.0")[2] == vllm and target(host="::1")[2] == "http://[::1]:8000"
    assert target(host="b", backend="sglang") == ("sglang", GENERATE, "http://b:30000", False, [])
    assert target(backend="vllm", there=True) == ("vllm", COMPLETIONS, vllm, False, [vllm])
    assert target(backend="vllm") == ("vllm", COMPLETIONS, None, True, [vllm])
    assert target(backend="sglang-oai", there=True)[2:] == (sglang, False, [sglang])
    assert target(named=True, backend="openai-chat") == ("openai-chat", CHAT, None, False, [])
    assert target(backend="vllm", port=1, endpoint=CHAT)[1] == CHAT
    assert target(backend="vllm", port=1, dataset_name="demo")[1] == CHAT
    for bad, named in (({"backend": "actorium", "port": 1}, "--backend"),
                       ({"endpoint": CHAT}, "--endpoint"),
                       ({"base_url": "http://a:1", "port": 2}, "--base-url")):
        with pytest.raises(BadConfig, match=named):
            target(**bad)


@pytest.mark.parametrize(("values", "named"), [
    ({"burstiness": 0.0}, "--burstiness"), ({"request_rate": -1.0}, "--request-rate"),
    ({"max_concurrency": -1}, "--max-concurrency"), ({"num_warmups": -1}, "--num-warmups"),
    ({"backend": "tgi"}, "--backend"), ({"endpoint": "/v1/rerank"}, "--endpoint"),
    ({"percentile_metrics": "ttft,p99"}, "--percentile-metrics"),
    ({"metric_percentiles": "101"}, "--metric-percentiles"),
    ({"metric_percentiles": "x"}, "--metric-percentiles"), ({"goodput": ["itl:5"]}, "--goodput"),
    ({"goodput": ["ttft"]}, "--goodput"), ({"profile": True}, "--profile"),
    ({"extra_request_body": "[1]"}, "--extra-request-body"), ({"header": ["x"]}, "--header"),
    ({"metadata": ["=1"]}, "--metadata"), ({"ramp_up_strategy": "linear"}, "--ramp-up-strategy"),
    ({"dataset_name": "wiki"}, "--dataset-name")])
def test_flags_out_of_range(values: dict[str, Any], named: str) -> None:
    with pytest.raises(BadConfig, match=named):
        check_serve(ServeOptions(**values), {})


def test_flags_that_exclude_each_other() -> None:
    options = ServeOptions(ramp_up_strategy="linear", ramp_up_start_rps=1, ramp_up_end_rps=2)
    check_serve(options, {})
    with pytest.raises(BadConfig, match="--request-rate"):
        check_serve(options, {"request_rate": "--request-rate"})


def test_what_options_mean() -> None:
    options = ServeOptions(goodput=["ttft:500", "e2el:9.5"], metadata=["tp=1", "a = b=c"],
                           metric_percentiles="50,99.9", top_p=0.5)
    assert options.goals == {"ttft": 500.0, "e2el": 9.5}
    assert options.pairs("metadata") == {"tp": "1", "a": "b=c"}
    assert options.percentile_names == ["p50", "p99.9"]
    assert options.metrics == ["ttft", "tpot", "itl", "itl_per_token", "e2el"]
    assert options.sampling == {"temperature": 0.0, "top_p": 0.5}
    assert math.isinf(options.request_rate)


# --- runs ----------------------------------------------------------------------------------------

def test_a_run_through_the_engine(cli: Cli, tmp_path: Path) -> None:  # noqa: F811
    done = cli.run("bench", "serve", "--shape", "TINY", "--null-worker", "--device", "cpu",
                   "--num-prompts", "20", "--max-concurrency", "4", "--output-len", "8",
                   "--goodput", "ttft:60000", "--save-result", "--result-dir", str(tmp_path),
                   "--result-filename", "run.json", "--metadata", "version=1")
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "run.json").read_text())
    assert (result["completed"], result["total_output_tokens"]) == (20, 160)
    assert result["total_input_tokens"] == 20 * 1024 and result["version"] == "1"
    assert set(result) >= VLLM_FIELDS and not DETAILED & set(result)
    assert result["request_goodput"] == result["request_throughput"] > 0
    text = done.stdout.decode()
    assert "Serving Benchmark Result" in text and "Peak concurrent requests:" in text
    assert cli.entries() == []


@contextmanager
def engine_over_http(cli: Cli) -> Iterator[str]:  # noqa: F811
    """The URL of a running engine named `measured`."""
    with cli.serve("--name", "measured", "--null-worker", "--device", "cpu", "--port", "0"):
        found = where(engine_dir("measured", cli.run_dir))
        assert found is not None
        yield found.url


KINDS = ("openai", "openai-chat", "vllm", "sglang-oai", "sglang")


def test_every_backend_of_a_served_engine(cli: Cli, tmp_path: Path,  # noqa: F811
                                          monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACTORIUM_RUN_DIR", cli.run_dir)
    with engine_over_http(cli) as url:
        for kind in KINDS:
            path = tmp_path / f"{kind}.json"
            assert bench_serve.run([
                "--backend", kind, "--base-url", url, "--num-prompts", "6", "--input-len", "9",
                "--output-len", "8", "--max-concurrency", "3", "--save-detailed", "--ignore-eos",
                "--json", str(path), "--tokenizer", ""]) == 0
            result = json.loads(path.read_text())
            assert (result["completed"], result["total_output_tokens"]) == (6, 48), kind
            assert set(result) >= VLLM_FIELDS | DETAILED and result["backend"] == kind
            assert all(result["generated_texts"]) and result["errors"] == [""] * 6
            assert result["total_output_tokens_retokenized"] > 0
        path = tmp_path / "sdk.json"
        assert bench_serve.run(["--name", "measured", "--num-prompts", "6", "--input-len", "9",
                                "--output-len", "8", "--json", str(path), "--flush-cache"]) == 0
        assert json.loads(path.read_text())["total_output_tokens"] == 48


def test_a_run_over_its_own_http(cli: Cli, tmp_path: Path) -> None:  # noqa: F811
    file = tmp_path / "serve.json"
    done = cli.run("bench", "serve", "--null-worker", "--device", "cpu", "--num-prompts", "12",
                   "--input-len", "9", "--max-concurrency", "4", "--output-len", "8",
                   "--http", "self", "--json", str(file))
    assert done.returncode == 0, done.stderr
    result = json.loads(file.read_text())
    assert (result["completed"], result["total_output_tokens"]) == (12, 96)
    assert (result["total_input_tokens"], result["base_url"]) == (108, "self")
    assert result["median_ttft_ms"] > 0 and cli.entries() == []


def test_nobody_there(cli: Cli) -> None:  # noqa: F811
    done = cli.run("bench", "serve", "--http", "127.0.0.1:1")
    assert done.returncode == 1 and b"--base-url: 127.0.0.1:1: Connect" in done.stderr


def test_bad_words_end_in_one_line(cli: Cli) -> None:  # noqa: F811
    for flags, named in ((("--http", "ftp://x"), "--base-url"), (("--profile",), "--profile"),
                         (("--dataset", "demo", "--shape", "TINY"), "--shape")):
        done = cli.run("bench", "serve", *flags)
        assert done.returncode == 2 and named in done.stderr.decode()
