"""The routes that change weights: what they ask the SDK's client for, and what they refuse by
name."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from actorium.actors.config.tree import Config, GatewayConfig, ModelConfig
from actorium.actors.errors import BadModel
from actorium.actors.gateway.api import weights_routes
from actorium.actors.gateway.app import build_app
from actorium.actors.gateway.gateway_state import GatewayState
from actorium.actors.messages import ActorStatus, Status


class Trained:
    """Stands for an `AsyncClient`."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    async def update_weights(self, weights: Any, mode: str, clear_cache: bool, version: int,
                             timeout: None) -> dict[str, Any]:
        self.calls.append((weights, mode, clear_cache, version))
        if str(weights).endswith("bad"):
            raise BadModel("/w/bad: tensor a is missing")
        return {"version": version or 1, "path": "", "seconds": 0.5, "read_seconds": 2.0}

    async def get_weights(self, name: str, most: int) -> dict[str, Any]:
        if name == "none":
            raise BadModel("name: the checkpoint has no tensor 'none'")
        return {"shape": [2], "dtype": "float32", "values": [1.0, 2.0][:most]}

    async def weight_version(self) -> int:
        return 3


def ask(client: Trained, method: str, path: str, folder: Path | None = None, key: str = "",
        **sent: Any) -> httpx.Response:
    state = GatewayState(Config(
        model=ModelConfig(weights_dir=None if folder is None else str(folder)),
        gateway=GatewayConfig(**({"api_key": "k", "admin_key": "root"} if key else {}))),
        Path("none"))
    state.engine.client = client  # type: ignore[assignment]

    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(app=build_app(state))
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
            sent.setdefault("headers", {})
            if key:
                sent["headers"]["authorization"] = f"Bearer {key}"
            return await http.request(method, path, **sent)

    return asyncio.run(run())


DISK, TENSOR = "/update_weights_from_disk", "/update_weights_from_tensor"


@pytest.mark.parametrize(("fields", "call"), [
    ({}, ("wait", True, 0)),
    ({"mode": "finish", "flush_cache": False}, ("wait", False, 0)),
    ({"mode": "in_place", "weight_version": "12"}, ("keep", True, 12)),
    ({"mode": "retract", "load_format": "auto", "weight_version": 7}, ("retract", True, 7)),
    ({"abort_all_requests": True, "token_step": 5}, ("abort", True, 0)),
])
def test_from_disk(tmp_path: Path, fields: dict[str, Any], call: tuple[Any, ...]) -> None:
    for path in ("step-1", str(tmp_path / "step-1"), "x/../step-1"):
        client = Trained()
        answer = ask(client, "POST", DISK, tmp_path, json={"model_path": path, **fields})
        assert client.calls == [(str(tmp_path / "step-1"), *call)]
        number = call[-1] or 1
        assert answer.json() == {
            "success": True, "message": f"Weight version updated to {number}.",
            "num_paused_requests": 0, "weight_version": str(number), "seconds": 0.5}


@pytest.mark.parametrize(("fields", "param"), [
    ({}, "model_path"), ({"model_path": "../other"}, "model_path"),
    ({"model_path": "/etc"}, "model_path"), ({"model_path": "link"}, "model_path"),
    ({"model_path": "a\0"}, "model_path"), ({"model_path": "bad"}, "model_path"),
    ({"model_path": "a", "mode": "now"}, "mode"),
    ({"model_path": "a", "load_format": "pt"}, "load_format"),
    ({"model_path": "a", "is_async": True}, "is_async"),
    ({"model_path": "a", "weight_version": "step-4"}, "weight_version"),
    ({"model_path": "a", "weight_version": 0}, "weight_version"),
    ({"model_path": "a", "weight_version": "9" * 5000}, "weight_version"),
])
def test_what_is_refused(tmp_path: Path, fields: dict[str, Any], param: str) -> None:
    (tmp_path / "link").symlink_to("/etc")
    answer = ask(Trained(), "POST", DISK, tmp_path, json=fields)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param


def test_nothing_is_read_without_a_folder() -> None:
    client = Trained()
    answer = ask(client, "POST", DISK, json={"model_path": "/w"})
    assert "--weights-dir" in answer.json()["error"]["message"] and not client.calls


def test_from_tensor() -> None:
    client = Trained()
    assert ask(client, "POST", f"{TENSOR}?mode=keep&flush_cache=false&weight_version=4",
               content=b"tensors").json()["weight_version"] == "4"
    assert client.calls == [(b"tensors", "keep", False, 4)]
    pickled = ask(client, "POST", TENSOR, json={"serialized_named_tensors": ["gASV"]})
    assert pickled.status_code == 501 and "pickle" in pickled.json()["error"]["message"]
    assert ask(client, "POST", f"{TENSOR}?mode=now", content=b"x").status_code == 400
    assert len(client.calls) == 1


def test_what_is_told() -> None:
    client = Trained()
    assert ask(client, "GET", "/get_weight_version").json() == {"weight_version": "3"}
    assert ask(client, "POST", "/get_weights_by_name",
               json={"name": "a", "truncate_size": 1}).json() == [1.0]
    for fields, param in (({"name": "none"}, "name"),
                          ({"name": "a", "truncate_size": 0}, "truncate_size"),
                          ({"name": "a", "truncate_size": 1 << 21}, "truncate_size")):
        answer = ask(client, "POST", "/get_weights_by_name", json=fields)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == param


def test_the_last_version_is_known_while_the_scheduler_is_dead(
        monkeypatch: pytest.MonkeyPatch) -> None:
    """What the gateway has heard, or the scheduler's last heartbeat."""
    class Dead(Trained):
        gauges: dict[str, float] = {}

        async def weight_version(self) -> int:
            await asyncio.Event().wait()
            raise AssertionError

        async def status(self, timeout: float) -> Status:
            return Status("", False, None, [ActorStatus(
                "e", "scheduler", 1, 1, "dead", 0, 0.0, 0.0, gauges=self.gauges)])

    async def run() -> list[int | None]:
        engine, dead = GatewayState(Config(), Path("none")).engine, Dead()
        found = []
        for version, client in ((0, dead), (2, dead), (0, Trained()), (0, dead), (4, dead)):
            dead.gauges = {"weight_version": float(version)} if version else {}
            engine.client = client  # type: ignore[assignment]
            found.append(await weights_routes.last_version(engine))
        return found

    monkeypatch.setattr(weights_routes, "STATUS_SECONDS", 0.05)
    assert asyncio.run(run()) == [None, 2, 3, 3, 4]


@pytest.mark.parametrize("path", [
    "/init_weights_update_group", "/update_weights_from_distributed", "/update_weights",
    "/collective_rpc", "/update_weights_from_ipc"])
def test_other_ways_are_refused_by_name(path: str) -> None:
    answer = ask(Trained(), "POST", path, json={})
    assert answer.status_code == 501 and answer.json()["error"]["message"].startswith(path)


def test_orders_need_the_administrators_key(tmp_path: Path) -> None:
    for path, body in ((DISK, {"model_path": "a"}), ("/get_weights_by_name", {"name": "a"})):
        for key, status in (("k", 401), ("root", 200)):
            assert ask(Trained(), "POST", path, tmp_path, key,
                       json=body).status_code == status
    assert ask(Trained(), "GET", "/get_weight_version", key="k").status_code == 200
