"""Fifty streams of a real model go on over an upgrade to another version."""

from __future__ import annotations

import json
import re
import sys
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from helpers_runtime import child_env
from helpers_served import Served, serving
from helpers_upgrade import SLOW, other_version, upgrade

from actorium import Client, SamplingParams
from actorium.actors.config import sources
from actorium.actors.launcher.handover import OUTCOME, UpgradeOutcome
from actorium.actors.runtime.roles import roles_of
from actorium.actors.runtime.rundir import engine_dir

openai = pytest.importorskip("openai")
TOKENS, FEW = 600, 10
TALE = "Tell me a story about a fox."


def by_openai(served: Served, number: int) -> tuple[Any, ...]:
    """A stream of a plain openai client: text, log-probabilities and usage."""
    client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=300)
    stream = client.chat.completions.create(
        model="default", messages=[{"role": "user", "content": TALE}], max_tokens=TOKENS,
        seed=number, temperature=0.8, stream=True, logprobs=True,
        stream_options={"include_usage": True}, extra_body={"ignore_eos": True})
    text, logprobs, usage, ids = "", [], 0, set()
    for chunk in stream:
        ids.add(chunk.id)
        for choice in chunk.choices:
            text += choice.delta.content or ""
            if choice.logprobs is not None:
                logprobs += [each.logprob for each in choice.logprobs.content or ()]
        usage = chunk.usage.completion_tokens if chunk.usage is not None else usage
    assert len(ids) == 1 and usage == TOKENS == len(logprobs)
    return text, logprobs


def whole(served: Served, number: int) -> tuple[Any, ...]:
    """An answer that is not streamed."""
    body = _asked(served, "/v1/completions", {"prompt": TALE, "max_tokens": TOKENS, "seed": number,
                                             "ignore_eos": True, "temperature": 0.8})
    assert body["usage"]["completion_tokens"] == TOKENS
    return (body["choices"][0]["text"],)


def by_sdk(served: Served, number: int) -> tuple[Any, ...]:
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True, seed=number, temperature=0.8)
    with Client(served.engine.name) as client:
        deltas = list(client.stream(TALE, params))
    tokens = [token for delta in deltas for token in delta.token_ids]
    assert len(tokens) == TOKENS
    return tokens, "".join(delta.text for delta in deltas)


def in_background(served: Served, number: int) -> tuple[Any, ...]:
    body = _asked(served, "/v1/responses", {
        "input": TALE, "background": True, "max_output_tokens": FEW, "temperature": 0.8,
        "seed": number, "ignore_eos": True})
    while body["status"] in ("queued", "in_progress"):
        time.sleep(0.2)
        with urllib.request.urlopen(f"{served.url}/v1/responses/{body['id']}", timeout=300) as got:
            body = json.loads(got.read())
    assert body["status"] == "incomplete", body
    return (body["output"][0]["content"][0]["text"],)


def _asked(served: Served, path: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(f"{served.url}{path}", json.dumps(body).encode(),
                                     {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as answer:
        return dict(json.loads(answer.read()))


STREAMS = [*[(in_background, n) for n in range(5)], *[(by_openai, n) for n in range(20)],
           *[(whole, n) for n in range(10)], *[(by_sdk, n) for n in range(15)]]
"""The first of them end before the upgrade, which waits for them."""


def counts(served: Served) -> dict[str, float]:
    """Sums of the metrics of requests, over their labels."""
    with urllib.request.urlopen(f"{served.url}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    out: dict[str, float] = {}
    for line in lines:
        if match := re.match(r"(\S+?)(\{.*\})? (\S+)$", line):
            out[match[1]] = out.get(match[1], 0.0) + float(match[3])
    return out


@pytest.fixture(autouse=True)
def actors_find_helpers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", child_env()["PYTHONPATH"])


def serving_paced(**config: Any) -> AbstractContextManager[Served]:
    """With workers that a file can slow down."""
    roles = roles_of(sources.from_kwargs("", port=0, **config))
    workers = dict.fromkeys((role for role in roles if role.startswith("worker-")),
                            "helpers_upgrade:build_paced")
    return serving(roles=roles | workers, **config)


def under_way(served: Served) -> float:
    [scheduler] = [actor for actor in served.engine.client.status().actors
                   if actor.role == "scheduler"]
    return scheduler.gauges.get("running", 0.0) + scheduler.gauges.get("waiting", 0.0)


def upgrade_under(served: Served, streams: int, start: Callable[[], list[Future[Any]]],
                  *flags: str, python: str = sys.executable) -> list[Any]:
    """Upgrades when so many of the requests run that `start` makes; returns their results. As many
    must not be finished when the old actors are killed."""
    run_dir = engine_dir(served.engine.name)
    (run_dir / SLOW).touch()
    running, ended = start(), list[float]()
    for each in running:
        each.add_done_callback(lambda _: ended.append(time.monotonic()))
    while under_way(served) < streams:
        time.sleep(0.05)
    done = upgrade(served.engine, *flags, python=python)
    assert done.returncode == 0, done.stderr
    outcome = msgspec.json.decode((run_dir / OUTCOME).read_bytes(), type=UpgradeOutcome)
    results = [each.result() for each in running]
    assert sum(at > outcome.ended_at for at in ended) >= streams
    return results


@pytest.mark.parametrize("ledger", [8, 11])
@pytest.mark.slow
def test_fifty_streams_outlive_an_upgrade(tmp_path: Path, ledger: int) -> None:
    python = other_version(tmp_path, "9.9", ledger=ledger) if ledger == 11 else sys.executable
    with serving_paced(max_num_seqs=32, exact="on",
                       responses_store=str(tmp_path / "kept.db")) as served:
        with ThreadPoolExecutor(len(STREAMS)) as pool:
            def start() -> list[Any]:
                return [pool.submit(ask, served, number) for ask, number in STREAMS]

            expected = [each.result() for each in start()]
            assert expected == upgrade_under(served, 40, start, "--max-num-seqs", "24",
                                             "--kv-cache-bytes", "512m", python=python)
        after = counts(served)
        assert after["actorium:unaccounted_sequences"] == 0
        assert after["vllm:request_success_total"] == 2 * len(STREAMS)
        assert after["vllm:generation_tokens_total"] == 2 * (45 * TOKENS + 5 * FEW)


@pytest.mark.slow
def test_ranks_go_together() -> None:
    with serving_paced(max_num_seqs=8, exact="on", tp=2) as served:
        with ThreadPoolExecutor(4) as pool:
            def start() -> list[Any]:
                return [pool.submit(ask, served, number)
                        for ask in (by_openai, by_sdk) for number in range(2)]

            expected = [each.result() for each in start()]
            assert expected == upgrade_under(served, 4, start, "--max-num-seqs", "4")
        epochs = {each.role: each.epoch for each in served.engine.client.status().actors}
        assert epochs["worker-0"] == epochs["worker-1"] == 2
