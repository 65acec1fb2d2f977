"""The page and its dashboard, without a browser."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from base64 import b64encode
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from helpers_gateway import Scripted

from actorium.actors.config.retention import DASHBOARD_SAMPLES
from actorium.actors.config.tree import Config, GatewayConfig
from actorium.actors.errors import EngineUnavailable
from actorium.actors.gateway.app import build_app
from actorium.actors.gateway.gateway_state import GatewayState
from actorium.actors.gateway.page import documents
from actorium.actors.gateway.page.dashboard import Dashboard, DashboardSampler
from actorium.actors.messages import ActorStatus, Status

GAUGES = {"running": 3.0, "waiting": 2.0, "free_pages": 90.0, "used_pages": 10.0, "held_pages": 6.0,
          "quarantined_pages": 1.0, "tokens": 0.0, "prompt_tokens": 0.0, "steps": 0.0,
          "busy_us": 0.0}


def status(phase: str = "stepping", ready: bool = True, epoch: int = 1, beat_age: float = 0.0,
           error: str | None = None, **gauges: float) -> Status:
    def line(role: str, phase: str, epoch: int, told: dict[str, float]) -> ActorStatus:
        return ActorStatus("e", role, 1, epoch, phase, 0, 0.0, beat_age, "", told)

    return Status("r", ready, error, [line("worker-0", phase, 1, {}),
                                      line("scheduler", "idle", epoch, GAUGES | gauges)])


class Watched(Scripted):
    """Counts the looks at it."""

    def __init__(self, answer: Status | Exception) -> None:
        super().__init__([])
        self.answer, self.looks = answer, 0

    async def status(self, timeout: float | None = None) -> Status:
        self.looks += 1
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def over(client: Any, **settings: Any) -> GatewayState:
    gateway = GatewayState(Config(gateway=GatewayConfig(**settings)), Path("none"))
    gateway.engine.client = client
    return gateway


@asynccontextmanager
async def asking(gateway: GatewayState) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app=build_app(gateway))
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        yield client


def get(path: str, headers: dict[str, str] | None = None, **settings: Any) -> httpx.Response:
    async def ask() -> httpx.Response:
        async with asking(over(Scripted([]), **settings)) as client:
            return await client.get(path, headers=headers or {})

    return asyncio.run(ask())


# --- the page ---------------------------------------------------------------------------------


PATHS = pytest.mark.parametrize("path", ["/", "/status", "/docs", "/redoc"])


@PATHS
def test_a_page_is_one_document_that_needs_no_key(path: str) -> None:
    answer = get(path, api_key="secret")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert answer.text.startswith("<!doctype html>")
    markup = re.sub(r"<script>.*?</script>", "", answer.text, flags=re.DOTALL)
    names = re.findall(r"""(?:src|<link[^>]*href)=["']([^"']*)""", markup)
    assert [name for name in names if not name.startswith("data:")] == [], "nothing else to load"


@PATHS
def test_it_is_sent_once(path: str) -> None:
    etag = get(path).headers["etag"]
    for given in (etag, f'"other", W/{etag}', "*"):
        again = get(path, {"if-none-match": given})
        assert (again.status_code, again.content) == (304, b"")
        assert again.headers["etag"] == etag
    assert get(path, {"if-none-match": '"other"'}).status_code == 200


@PATHS
def test_the_policy_names_what_is_inline_and_nothing_else(path: str) -> None:
    answer = get(path)
    rules = dict(rule.split(" ", 1) for rule in
                 answer.headers["content-security-policy"].split("; "))
    assert rules["default-src"] == rules["base-uri"] == rules["frame-ancestors"] == "'none'"
    assert rules["connect-src"] == "'self'"
    assert rules["require-trusted-types-for"] == "'script'"
    for kind in ("style", "script"):
        inline = re.findall(rf"<{kind}>(.*?)</{kind}>", answer.text, re.DOTALL)
        want = [f"'sha256-{b64encode(hashlib.sha256(one.encode()).digest()).decode()}'"
                for one in inline]
        assert want and rules[f"{kind}-src"].split() == want
        assert answer.text.count(f"<{kind}") == len(inline), "each is one that has a hash"
    markup = re.sub(r"<(script|style)>.*?</\1>", "", answer.text, flags=re.DOTALL)
    assert not re.search(r"\s(?:on\w+|style)=", markup), "attributes have no hash"


VENDOR = Path(documents.__file__).with_name("vendor")


def test_foreign_files_are_those_of_the_manifest() -> None:
    """Each is whole, as it was published, and lies beside its licence."""
    manifest = json.loads((VENDOR / "vendor.json").read_text())
    for entry in manifest:
        digest = hashlib.sha256((VENDOR / entry["file"]).read_bytes()).hexdigest()
        assert digest == entry["sha256"], entry["file"]
        assert entry["licence"] in (VENDOR / entry["licence_file"]).read_text()
        assert entry["name"] in entry["from"] and entry["version"] in entry["from"]
    there = {path.name for path in VENDOR.iterdir()}
    assert there == {"vendor.json"} | {entry[name] for entry in manifest
                                       for name in ("file", "licence_file")}
    assert sum(path.stat().st_size for path in VENDOR.iterdir()) < 400 << 10


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text('<link rel="stylesheet" href="gone.css">')
    with pytest.raises(OSError, match="gone.css"):
        documents.load(tmp_path)


# --- the dashboard ----------------------------------------------------------------------------


def test_a_sample_has_the_schedulers_gauges() -> None:
    first = DashboardSampler().sample(status(), False, 5.0, 100.0)
    assert (first.at, first.ready, first.why) == (5.0, True, "")
    assert (first.running, first.waiting) == (3, 2)
    assert (first.pages, first.pages_used, first.pages_cached) == (100, 6, 3)
    assert first.tokens_per_second is first.step_ms is first.acceptance is None
    assert (first.pages_quarantined, first.resumed) == (1, 0)
    assert [(line.role, line.phase, line.queue, line.pid) for line in first.actors] == [
        ("scheduler", "idle", 2, 1), ("worker-0", "stepping", None, 1)]


def test_an_actor_that_is_not_heard_of_is_silent() -> None:
    line = DashboardSampler().sample(status(beat_age=9.0), False, 5.0, 100.0).actors[0]
    assert (line.phase, line.beat_age) == ("silent", 9.0)


def test_rates_are_by_the_time_between_beats() -> None:
    sampler = DashboardSampler()
    sampler.sample(status(beat_age=0.5), False, 0.0, 100.0)
    more = {"tokens": 300.0, "prompt_tokens": 30.0, "steps": 50.0, "busy_us": 100_000.0,
            "spec_decode_num_draft_tokens": 40.0, "spec_decode_num_accepted_tokens": 30.0}
    second = sampler.sample(status(beat_age=0.0, **more), False, 1.0, 101.0)
    assert second.tokens_per_second == pytest.approx(200.0)
    assert second.prompt_tokens_per_second == pytest.approx(20.0)
    assert second.step_ms == pytest.approx(2.0)
    assert second.acceptance == pytest.approx(0.75)
    same = sampler.sample(status(beat_age=0.9, **more), False, 1.9, 101.9)
    assert same.tokens_per_second == second.tokens_per_second, "the same beat says the same"
    rest = sampler.sample(status(**more), False, 3.0, 103.0)
    assert rest.tokens_per_second == 0.0
    assert rest.step_ms is rest.acceptance is None, "nothing was done"


@pytest.mark.parametrize("after", [
    {"epoch": 2, "tokens": 500.0}, {"tokens": 50.0}, {"epoch": 2, "tokens": 0.0}])
def test_a_new_scheduler_restarts_the_rates(after: dict[str, Any]) -> None:
    sampler = DashboardSampler()
    sampler.sample(status(tokens=100.0), False, 0.0, 100.0)
    assert sampler.sample(status(**after), False, 1.0, 101.0).tokens_per_second is None


@pytest.mark.parametrize(("answer", "draining", "why"), [
    (status("loading", ready=False), False, "worker-0 is loading"),
    (status(ready=False, error="no memory"), False, "no memory"),
    (status(), True, "the engine is stopping"),
])
def test_a_sample_says_why_the_engine_is_not_ready(answer: Status, draining: bool,
                                                   why: str) -> None:
    sample = DashboardSampler().sample(answer, draining, 0.0, 100.0)
    assert (sample.ready, sample.why) == (False, why)


def test_the_engine_is_asked_once_for_all_watchers_and_not_without_any() -> None:
    async def look() -> None:
        watched = Watched(status())
        board = Dashboard(over(watched), period=0.01)
        assert watched.looks == 0
        viewers = [board.events() for _ in range(5)]
        for _ in range(4):
            told = await asyncio.gather(*(anext(one) for one in viewers))
            assert len(set(told)) == 1, "all see the same"
        assert watched.looks <= 6, "five who look cost what one does"
        for one in viewers:
            await one.aclose()
        await asyncio.sleep(0)
        assert board.viewers == 0 and asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(look())


def test_a_later_watcher_gets_the_last_sample() -> None:
    async def look() -> None:
        board = Dashboard(over(Watched(status())), period=0.001)
        first = board.events()
        for _ in range(2 * DASHBOARD_SAMPLES):
            await anext(first)
        later = board.events()
        assert (await anext(later)).count(b"data: ") == DASHBOARD_SAMPLES, "and no more is kept"
        await first.aclose()
        await later.aclose()

    asyncio.run(look())


def test_an_engine_that_does_not_answer_is_a_sample_too() -> None:
    async def look() -> bytes:
        board = Dashboard(over(Watched(EngineUnavailable("no watchdog"))))
        events = board.events()
        try:
            return await anext(events)
        finally:
            await events.aclose()

    told = json.loads(asyncio.run(look()).removeprefix(b"data: "))
    assert (told["ready"], told["why"], told["actors"]) == (False, "no watchdog", [])


def test_watching_does_not_delay_a_stop() -> None:
    async def look() -> None:
        gateway = over(Watched(status()))
        events = Dashboard(gateway, period=0.001).events()
        await anext(events)
        gateway.draining = True
        async with asyncio.timeout(5):
            assert len([one async for one in events]) <= 1

    asyncio.run(look())


def test_the_dashboard_needs_the_key() -> None:
    assert get("/dashboard/events", api_key="secret").status_code == 401
