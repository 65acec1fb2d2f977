"""`/metrics` of an engine whose actors are killed: each request and each token is counted once, and
no counter of theirs falls."""

from __future__ import annotations

import asyncio
import http.client
from collections import Counter
from contextlib import suppress
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from actorium.actors.client.async_client import AsyncClient
from actorium.actors.watchdog.probe_server import where
from actorium.tools.chaos.checked_streams import CheckedRequest, RequestMaker, Traffic
from actorium.tools.chaos.faults import KILL, Fault, actors, strike
from actorium.tools.chaos.rig import SHORT_WORKER, Rig, rig

pytestmark = pytest.mark.chaos
KILLED = ("scheduler", "worker-0", "scheduler", "detokenizer", "watchdog", "tokenizer",
          "scheduler+worker-0", "watchdog+scheduler")
STREAMS = 12
OF_REQUESTS = ("vllm:request_", "vllm:prompt_tokens", "vllm:generation_tokens",
               "vllm:time_to_first", "vllm:inter_token", "vllm:e2e_", "vllm:num_preemptions",
               "vllm:iteration_tokens", "vllm:prefix_cache", "actorium:started_sequences",
               "actorium:rejected_requests",
               "actorium:preemptions", "actorium:resumed", "actorium:device_step_seconds")

Samples = dict[tuple[str, str], float]


def scrape(made: Rig) -> Samples:
    """Returns the samples by name and labels; {} while nobody answers."""
    with suppress(OSError, http.client.HTTPException):
        found = where(made.run_dir)
        if found is not None:
            link = http.client.HTTPConnection("127.0.0.1", found.port, timeout=5)
            link.request("GET", "/metrics")
            text = link.getresponse().read().decode()
            link.close()
            return {(sample.name, str(sorted(sample.labels.items()))): sample.value
                    for family in text_string_to_metric_families(text)
                    for sample in family.samples if not sample.name.endswith("_created")}
    return {}


def total(samples: Samples, name: str, label: str = "") -> float:
    return sum(n for (known, labels), n in samples.items() if known == name and label in labels)


def unaccounted(samples: Samples) -> float:
    """Returns it by hand."""
    return (total(samples, "actorium:started_sequences_total")
            - total(samples, "vllm:request_success_total")
            - total(samples, "actorium:open_sequences"))


class Watch:
    """Scrapes all the time, and collects what must not be."""

    def __init__(self, made: Rig) -> None:
        self._made, self._last, self.wrong, self.scrapes = made, Samples(), list[str](), 0

    async def run(self, over: asyncio.Event) -> None:
        while not over.is_set():
            self.look(await asyncio.to_thread(scrape, self._made))
            await asyncio.sleep(0.06)

    def look(self, samples: Samples) -> None:
        self.scrapes += bool(samples)
        for each, count in samples.items():
            if each[0].startswith(OF_REQUESTS) and not each[0].endswith("_created"):
                if count < self._last.get(each, 0.0):
                    self.wrong.append(f"{each} was {self._last[each]}, is {count}")
                self._last[each] = count
        lost = total(samples, "actorium:unaccounted_sequences")
        if ("actorium:started_sequences_total", "[]") in samples and (
                lost or unaccounted(samples)):
            self.wrong.append(f"{lost}, {unaccounted(samples)} sequences are unaccounted for")


async def drive(made: Rig, wants: list[CheckedRequest], traffic: Traffic, watch: Watch
                ) -> Counter[str]:
    """Returns how often each actor was killed."""
    struck: Counter[str] = Counter()
    over = asyncio.Event()
    watching = asyncio.create_task(watch.run(over))
    gate = asyncio.Semaphore(STREAMS)
    async with AsyncClient(made.engine.name, str(made.base)) as client:
        async def send(want: CheckedRequest) -> None:
            async with gate:
                assert await traffic.send(client, want) is None

        async def kill() -> None:
            for roles in KILLED:
                await asyncio.sleep(0.8)
                while not {*roles.split("+")} <= actors(made.run_dir).keys():
                    await asyncio.sleep(0.05)
                struck.update(victim.role for victim in strike(
                    Fault(0.0, KILL, tuple(roles.split("+"))), made.run_dir))

        await asyncio.gather(kill(), *(send(want) for want in wants))
        for _ in range(100):
            if (await client.status()).ready:
                break
            await asyncio.sleep(0.1)
    await asyncio.sleep(1.5)  # until the last heartbeat
    over.set()
    await watching
    return struck


def test_all_is_counted_once_over_deaths() -> None:
    maker = RequestMaker(5, (20, 60), prompt=60)
    wants = [maker.make() for _ in range(150)]
    traffic = Traffic(maker)
    with rig(SHORT_WORKER, probe_port=0, max_num_seqs=STREAMS - 2) as made:
        before = scrape(made)
        watch = Watch(made)
        struck = asyncio.run(drive(made, wants, traffic, watch))
        after = scrape(made)
    assert traffic.tally.wrong == made.left == watch.wrong[:9] == [] and watch.scrapes > 50
    assert total(before, "actorium:started_sequences_total") == 0
    choices = sum(want.params.n for want in wants)
    tokens = sum(want.params.n * (want.params.max_tokens or 0) for want in wants)
    prompts = sum(want.params.n * len(want.prompt) for want in wants)
    expected: dict[str, Any] = {
        "actorium:started_sequences_total": choices, "actorium:open_sequences": 0,
        "vllm:request_success_total": choices, "vllm:generation_tokens_total": tokens,
        "vllm:prompt_tokens_total": prompts, "vllm:time_to_first_token_seconds_count": choices,
        "vllm:e2e_request_latency_seconds_count": choices,
        "vllm:request_queue_time_seconds_count": choices,
        "vllm:inter_token_latency_seconds_count": tokens - choices,
        "vllm:request_generation_tokens_sum": tokens, "vllm:request_prompt_tokens_sum": prompts,
        "vllm:request_params_n_count": len(wants)}
    assert {name: total(after, name) for name in expected} == expected
    assert total(after, "vllm:request_success_total", "'length'") == choices
    for role in ("scheduler", "worker-0", "detokenizer", "tokenizer"):
        assert total(after, "actorium:restarts_total", f"'{role}'") == struck[role] > 0
