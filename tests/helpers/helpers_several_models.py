"""A gateway of several models: over a model manager's core behind its socket, and scripted engines.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from time import monotonic
from typing import Any

import httpx2 as httpx
import msgspec
import pytest
import zmq
from helpers_gateway import Scripted, ScriptedStream

from actorium.actors.config.models_settings import ModelsConfig
from actorium.actors.config.tree import Config, GatewayConfig, ModelConfig, dump
from actorium.actors.gateway import engine_uses, served_engine
from actorium.actors.gateway.app import build_app
from actorium.actors.gateway.gateway_state import GatewayState
from actorium.actors.model_manager.manager_core import ManagerCore
from actorium.actors.model_manager.manager_messages import ToManagerFront
from actorium.actors.model_manager.manager_orders import (
    PlanEngine,
    ScanModels,
    StartEngine,
    StopEngine,
)
from actorium.actors.model_manager.model_record import CatalogEntry, EngineLimits
from actorium.actors.models.model_facts import CheckpointFacts
from actorium.actors.runtime.rundir import address
from actorium.actors.runtime.security.private_paths import open_directory

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(ToManagerFront).decode
TICK = 0.002
"""Seconds between two wakes of the manager."""


class NamedEngine(Scripted):
    """An engine that says its model's name."""

    def __init__(self, run_dir: Path, resume_timeout: float) -> None:
        super().__init__([f"I am {run_dir.name}."])
        self.model = run_dir.name
        self.closed = False
        self.aborted: list[str] = []
        self.given_up = ""

    def give_up(self, reason: str) -> None:
        self.given_up = reason

    async def abort(self, rid: str) -> None:
        self.aborted.append(rid)

    async def close(self) -> None:
        self.closed = True


class ManagerInLoop:
    """The model manager's core behind its socket, in the loop of the test. Engines take `delay`
    seconds to start; those of `faults` fail instead."""

    def __init__(self, run_dir: Path, names: tuple[str, ...], engines: int = 0, delay: float = 0.0,
                 default: str = "", keep_alive: float = -1.0,
                 tasks: Mapping[str, tuple[str, ...]] = {}) -> None:
        """tasks: what models do, by their names, as their files say it."""
        self.run_dir, self.delay = run_dir, delay
        self.entries = [CatalogEntry((name, f"{name}-alias"), Config(model=ModelConfig(
            model=f"/models/{name}")), default=name == default, keep_alive=keep_alive,
            facts=CheckpointFacts(tasks=tasks.get(name, ())))
            for name in names]
        self.limits = EngineLimits(0, engines)
        self.faults: dict[str, str] = {}
        self.running: set[str] = set()
        self._serving: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Starts, or starts again: engines that run are adopted."""
        self.core = ManagerCore(self.limits, 60.0, 100)
        for entry in self.entries:
            if entry.name in self.running:
                self.core.adopt(entry, str(self.run_dir / entry.name), True, monotonic())
        self._serving = asyncio.ensure_future(self._serve())

    def kill_engine(self, name: str) -> None:
        """Its launcher is killed."""
        self.running.discard(name)
        self.core.engine_ended(name, "its launcher was killed by SIGKILL", monotonic(), True)

    async def kill(self) -> None:
        """Ends without a word."""
        assert self._serving is not None
        self._serving.cancel()
        await asyncio.gather(self._serving, return_exceptions=True)

    async def _serve(self) -> None:
        with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            socket.bind(address(self.run_dir, "manager.front"))
            while True:
                with suppress(zmq.Again):
                    while True:
                        client, frame = socket.recv_multipart(zmq.NOBLOCK)
                        self.core.on_client(client, _decode(frame), monotonic())
                self._wake(socket)
                await asyncio.sleep(TICK)

    def _wake(self, socket: Any) -> None:
        for send in self.core.on_wake(monotonic()):
            socket.send_multipart([send.client, _encode(send.message)], zmq.NOBLOCK)
        for order in self.core.pop_orders():
            match order:
                case ScanModels():
                    self.core.set_catalog(self.entries, monotonic())
                case PlanEngine(entry):
                    self.core.set_plan(entry, 1, "", monotonic())
                case StartEngine(entry):
                    asyncio.get_running_loop().call_later(self.delay, self._started, entry.name)
                case StopEngine(name):
                    self.running.discard(name)
                    self.core.engine_ended(name, "", monotonic())

    def _started(self, name: str) -> None:
        if name in self.faults:
            self.core.engine_ended(name, self.faults[name], monotonic())
            return
        path = self.run_dir / name
        path.mkdir(mode=0o700, exist_ok=True)
        (path / "config.json").unlink(missing_ok=True)
        (path / "config.json").write_bytes(dump(Config()))
        self.running.add(name)
        self.core.engine_ready(name, str(path), monotonic())


class ModelsGateway:
    """The manager, the gateway, and an HTTP client of it."""

    def __init__(self, manager: ManagerInLoop, state: GatewayState) -> None:
        self.manager, self.state, self.app = manager, state, build_app(state)
        self.client = httpx.AsyncClient(transport=httpx.ASGITransport(app=self.app),
                                        base_url="http://gateway")

    async def chat(self, model: str | None, **more: Any) -> httpx.Response:
        body = {"messages": [{"role": "user", "content": "Who are you?"}], **more}
        return await self.client.post("/v1/chat/completions", json=body if model is None
                                      else {"model": model, **body})

    @property
    def in_use(self) -> dict[str, int]:
        """Granted uses of each model that has any."""
        return {model.name: model.in_use for model in self.manager.core.models if model.in_use}

    async def until(self, condition: Any) -> None:
        """Waits until the manager has come to what the condition says."""
        async with asyncio.timeout(10):
            while not condition():
                await asyncio.sleep(TICK)


@asynccontextmanager
async def several_models(monkeypatch: pytest.MonkeyPatch, path: Path, *names: str,
                         settings: GatewayConfig | None = None, **how: Any
                         ) -> AsyncIterator[ModelsGateway]:
    """how: of `ManagerInLoop`."""
    monkeypatch.setattr(served_engine, "AsyncClient", NamedEngine)
    monkeypatch.setattr("actorium.actors.gateway.engine_call.AsyncDeltaStream", ScriptedStream)
    monkeypatch.setattr(engine_uses.rundir, "is_running", lambda path: path.exists())
    run_dir = path / "run"
    open_directory(run_dir, make=True)
    manager = ManagerInLoop(run_dir, names, **how)
    manager.start()
    state = GatewayState(Config(gateway=settings or GatewayConfig(),
                                models=ModelsConfig(models_dir="/models")), run_dir)
    try:
        yield ModelsGateway(manager, state)
    finally:
        await state.close()
        await manager.kill()
