"""What else answers at the serving port, without a flag."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest
from wire import CHAT, COMPLETIONS, MESSAGES, RESPONSES, STORY, Json, Server, chat, completion

pytestmark = pytest.mark.conformance


@pytest.mark.parametrize("method,path", [
    ("GET", "/health"), ("GET", "/ping"), ("POST", "/ping"), ("GET", "/health_generate"),
    ("GET", "/version"), ("GET", "/load"), ("GET", "/metrics"), ("GET", "/docs"),
    ("GET", "/redoc"), ("GET", "/openapi.json"), ("GET", "/v1/models"), ("GET", "/models"),
    ("GET", "/server_info"), ("GET", "/is_scaling_elastic_ep"), ("GET", "/")])
def test_it_answers(server: Server, method: str, path: str) -> None:
    answer = server.send(method, path)
    assert answer.status == 200, (answer.status, answer.text[:200])


def test_the_version(server: Server) -> None:
    assert re.match(r"\d+\.\d+", server.get("/version").ok()["version"])


def test_the_load_of_an_idle_engine(server: Server) -> None:
    deadline = time.monotonic() + 10
    while (found := server.get("/load").ok()["server_load"]) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert found == 0


@pytest.mark.parametrize("path,body", [
    ("/completions", completion()), ("/chat/completions", chat()),
    ("/responses", {"input": "Hi", "max_output_tokens": 8}),
    ("/messages", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}),
    ("/v1/tokenize", {"prompt": STORY}), ("/v1/detokenize", {"tokens": [5]}),
    ("/invocations", completion()), ("/invocations", chat())], ids=str)
def test_other_paths_of_the_same(server: Server, path: str, body: Json) -> None:
    assert server.post(path, body).ok()


@pytest.mark.parametrize("body,same", [(completion(), COMPLETIONS), (chat(), CHAT)],
                         ids=["completion", "chat"])
def test_invocations_say_the_same(server: Server, body: Json, same: str) -> None:
    told, want = (server.post(path, body).ok() for path in ("/invocations", same))
    assert set(told) == set(want)
    assert told["choices"] == want["choices"]


@pytest.mark.parametrize("body", [{}, {"text": 5}, {"messages": []}], ids=str)
def test_invocations_of_nothing(server: Server, body: Json) -> None:
    assert server.post("/invocations", body).status in (400, 415, 422)


def test_native_generation_with_token_ids(server: Server) -> None:
    """`/inference/v1/generate`: ids in, ids out."""
    ids = server.tokenize(STORY)
    found = server.post("/inference/v1/generate", {
        "token_ids": ids, "sampling_params": {"max_tokens": 4, "temperature": 0}}).ok()
    want = server.complete(ids, max_tokens=4, return_token_ids=True)["choices"][0]["token_ids"]
    assert found["choices"][0]["token_ids"] == want


def samples(server: Server) -> dict[str, float]:
    """Metrics, labels summed up."""
    found: dict[str, float] = {}
    for line in server.get("/metrics").text.splitlines():
        if line and not line.startswith("#"):
            name = re.split(r"[{ ]", line, maxsplit=1)[0]
            found[name] = found.get(name, 0.0) + float(line.rsplit(" ", 1)[1])
    return found


HISTOGRAMS = [
    "request_prompt_tokens", "request_generation_tokens", "request_params_n",
    "request_params_max_tokens", "time_to_first_token_seconds", "inter_token_latency_seconds",
    "e2e_request_latency_seconds", "request_queue_time_seconds", "request_inference_time_seconds",
    "request_prefill_time_seconds", "request_decode_time_seconds", "iteration_tokens_total"]
GAUGES = ["num_requests_running", "num_requests_waiting", "num_requests_waiting_by_reason",
          "kv_cache_usage_perc", "cache_config_info"]
COUNTERS = ["prefix_cache_queries_total", "prefix_cache_hits_total", "num_preemptions_total",
            "prompt_tokens_total", "generation_tokens_total", "request_success_total"]


@pytest.mark.parametrize("name", [*GAUGES, *COUNTERS, *(f"{name}_{end}" for name in HISTOGRAMS
                                                        for end in ("sum", "count", "bucket"))])
def test_a_metric_that_dashboards_read(server: Server, name: str) -> None:
    server.complete(max_tokens=2)
    assert f"vllm:{name}" in samples(server)


def test_metrics_count(server: Server) -> None:
    ids = server.tokenize(STORY)
    wanted = {"request_success_total": 5, "prompt_tokens_total": 5 * len(ids),
              "generation_tokens_total": 50, "request_params_n_count": 5,
              "request_params_max_tokens_sum": 50, "request_generation_tokens_sum": 50,
              "e2e_request_latency_seconds_count": 5, "time_to_first_token_seconds_count": 5}
    before: dict[str, float] = {}
    while before != (before := {name: samples(server).get(f"vllm:{name}", 0.0) for name in wanted}):
        time.sleep(1)  # the last heartbeat may not have told of the requests before
    for _ in range(5):
        server.complete(ids, max_tokens=10, ignore_eos=True)
    deadline = time.monotonic() + 15
    while time.monotonic() < deadline:
        now = samples(server)
        grown = {name: now[f"vllm:{name}"] - before[name] for name in wanted}
        if grown == wanted:
            return
        time.sleep(0.5)
    assert grown == wanted


def test_the_description_names_every_route(server: Server) -> None:
    found = server.get("/openapi.json").ok()
    assert found["openapi"].startswith("3.")
    assert {COMPLETIONS, CHAT, RESPONSES, MESSAGES, "/generate", "/tokenize", "/detokenize",
            "/v1/models", "/metrics"} <= set(found["paths"])


@pytest.mark.parametrize("path", ["/docs", "/redoc"])
def test_pages_need_no_network(server: Server, path: str) -> None:
    answer = server.get(path)
    assert answer.headers["content-type"].startswith("text/html")
    assert not re.search(r"(src|href)=[\"']https?://", answer.text)


def test_request_ids(server: Server) -> None:
    seen: set[Any] = {server.post(COMPLETIONS, completion(max_tokens=1)).headers["x-request-id"]
                      for _ in range(2)}
    assert len(seen) == 2
    told = server.post(COMPLETIONS, completion(max_tokens=1), headers={"X-Request-Id": "mine-1"})
    assert told.headers["x-request-id"] == "mine-1"
