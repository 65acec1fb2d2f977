"""The routes that put an engine to sleep and pause it: what they ask the SDK's client for, and what
they refuse by name."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from actorium.actors.config.tree import Config, GatewayConfig
from actorium.actors.errors import Aborted
from actorium.actors.gateway.app import build_app
from actorium.actors.gateway.gateway_state import GatewayState
from actorium.actors.gateway.served_engine import obstacle
from actorium.actors.messages import ActorStatus, Status


class Sleepy:
    """Stands for an `AsyncClient`."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.phase = "idle"

    async def sleep(self, level: int, mode: str, timeout: None) -> dict[str, Any]:
        self.calls.append(("sleep", level, mode))
        return {"sleeping": level, "paused": False, "cache_kept": level == 1}

    async def wake_up(self) -> None:
        self.calls.append(("wake_up",))
        if self.phase == "drowsy":
            raise Aborted("wake_up: the engine was sent to sleep again")

    async def pause(self, mode: str, clear_cache: bool = False, timeout: None = None) -> None:
        self.calls.append(("pause", mode, clear_cache))

    async def resume(self) -> None:
        self.calls.append(("resume",))

    async def is_sleeping(self) -> bool:
        return True

    async def is_paused(self) -> bool:
        return False

    async def status(self) -> Status:
        return Status("r", True, None, [ActorStatus("e", "scheduler", 1, 1, self.phase, 0, 0., 0.)])


def ask(client: Sleepy, method: str, path: str, key: str = "", **sent: Any) -> httpx.Response:
    state = GatewayState(Config(gateway=GatewayConfig(**(
        {"api_key": "k", "admin_key": "root"} if key else {}))), Path("none"))
    state.engine.client = client  # type: ignore[assignment]

    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(app=build_app(state))
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
            return await http.request(method, path, headers={"authorization": f"Bearer {key}"}
                                      if key else None, **sent)

    return asyncio.run(run())


@pytest.mark.parametrize(("path", "body", "call", "answer"), [
    ("/sleep", None, ("sleep", 1, "abort"), {"status": "sleeping", "level": 1, "cache_kept": True}),
    ("/sleep?level=2&mode=keep", None, ("sleep", 2, "keep"),
     {"status": "sleeping", "level": 2, "cache_kept": False}),
    ("/wake_up", None, ("wake_up",), {"status": "awake"}),
    ("/wake_up?tags=weights&tags=kv_cache", None, ("wake_up",), {"status": "awake"}),
    ("/pause", None, ("pause", "abort", True), {"status": "paused"}),
    ("/pause?mode=keep", None, ("pause", "keep", False), {"status": "paused"}),
    ("/pause?mode=wait&clear_cache=false", None, ("pause", "wait", False), {"status": "paused"}),
    ("/pause?wait_for_inflight_requests=true", None, ("pause", "wait", True),
     {"status": "paused"}),
    ("/resume", None, ("resume",), {"status": "resumed"}),
    ("/release_memory_occupation", None, ("sleep", 1, "wait"), {"success": True}),
    ("/release_memory_occupation", {"tags": ["kv_cache", "weights", "cuda_graph"]},
     ("sleep", 1, "wait"), {"success": True}),
    ("/resume_memory_occupation", {}, ("wake_up",), {"success": True}),
    ("/pause_generation", {}, ("pause", "abort", False), None),
    ("/pause_generation", {"mode": "in_place"}, ("pause", "keep", False), None),
    ("/pause_generation", {"mode": "retract"}, ("pause", "retract", False), None),
    ("/continue_generation", {}, ("resume",), None)])
def test_what_an_order_asks_for(path: str, body: Any, call: tuple[Any, ...], answer: Any) -> None:
    client = Sleepy()
    found = ask(client, "POST", path, **({} if body is None else {"json": body}))
    assert found.status_code == 200 and client.calls == [call]
    assert answer is None or found.json() == answer


@pytest.mark.parametrize(("path", "body", "field"), [
    ("/sleep?level=3", None, "level"), ("/sleep?level=0", None, "level"),
    ("/sleep?mode=retract", None, "mode"), ("/sleep?offload_tags=weights", None, "offload_tags"),
    ("/wake_up?tags=weights", None, "tags"), ("/wake_up?tags=weights&tags=lora", None, "tags"),
    ("/pause?mode=now", None, "mode"), ("/pause?clear_cache=maybe", None, "clear_cache"),
    ("/resume?mode=keep", None, "mode"),
    ("/release_memory_occupation", {"tags": ["kv_cache"]}, "tags"),
    ("/pause_generation", {"mode": "keep"}, "mode")])
def test_what_is_refused_by_name(path: str, body: Any, field: str) -> None:
    client = Sleepy()
    found = ask(client, "POST", path, **({} if body is None else {"json": body}))
    assert (found.status_code, found.json()["error"]["param"]) == (400, field)
    assert not client.calls


def test_questions_and_health() -> None:
    client = Sleepy()
    assert ask(client, "GET", "/is_sleeping").json() == {"is_sleeping": True}
    assert ask(client, "GET", "/is_paused").json() == {"is_paused": False}
    for phase, state in (("idle", "running"), ("sleeping", "sleeping"), ("paused", "paused"),
                         ("waking", "waking")):
        client.phase = phase
        found = ask(client, "GET", "/health")
        assert (found.status_code, found.json()) == \
            (200, {"ready": True, "status": "ok", "state": state})
    client.phase = "drowsy"
    found = ask(client, "POST", "/wake_up")
    assert (found.status_code, found.json()["error"]["code"]) == (409, "aborted")


@pytest.mark.parametrize(("scheduler", "worker", "waits"), [
    ("sleeping", "released", False), ("sleeping", "sleeping", False), ("waking", "loading", False),
    ("paused", "idle", False), ("idle", "loading", True), ("exited", "released", True)])
def test_requests_pass_to_the_queue_of_an_engine_that_sleeps(scheduler: str, worker: str,
                                                             waits: bool) -> None:
    """Else none would ever wake it."""
    status = Status("r", True, None, [
        ActorStatus("e", role, 1, 1, phase, 0, 0.0, 0.0) for role, phase in (
            ("scheduler", scheduler), ("worker-0", worker), ("tokenizer", "ready"),
            ("detokenizer", "stepping"))])
    assert bool(obstacle(status)) == waits


@pytest.mark.parametrize("path", [
    "/sleep", "/wake_up", "/pause", "/resume", "/release_memory_occupation",
    "/resume_memory_occupation", "/pause_generation", "/continue_generation"])
def test_orders_are_the_administrators(path: str) -> None:
    client = Sleepy()
    assert ask(client, "POST", path, key="k").status_code in (401, 403) and not client.calls
    assert ask(client, "POST", path, key="root").status_code == 200 and client.calls
