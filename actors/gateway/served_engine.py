"""One engine behind a gateway: its client, its model, and whether it can serve now."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable
from pathlib import Path
from time import monotonic

from actorium.actors.client.async_client import AsyncClient
from actorium.actors.config.adapter_settings import adapter_name_fault
from actorium.actors.config.reasoning_formats import NONE
from actorium.actors.config.tree import Config
from actorium.actors.errors import ActoriumError
from actorium.actors.gateway.http.http_errors import SERVER, HttpError, bad_field
from actorium.actors.gateway.served_model import ServedModel, TokenTexts
from actorium.actors.health import SLEEPING, WAKING, WORKING_PHASES, activity_of, not_at_work
from actorium.actors.messages import Status

LOG = logging.getLogger("actorium.gateway")
STATUS_SECONDS = 1.0
"""Seconds that new requests wait for the watchdog's status."""


class ServedEngine:
    """One engine, as a gateway uses it. Closed by `close`."""

    def __init__(self, config: Config, run_dir: Path, patience: float,
                 resume_timeout: float = 0.0) -> None:
        """config, run_dir: the engine's; patience: seconds that requests wait while it recovers;
        resume_timeout: seconds that they wait when the whole engine ends and is started again; 0 =
        it is not."""
        self.config, self.run_dir = config, run_dir
        self.client = AsyncClient(run_dir, resume_timeout=resume_timeout)
        self.token_texts = TokenTexts(config)
        self.gate = RecoveryGate(lambda: self.client.status(STATUS_SECONDS), patience,
                                 comes_back=resume_timeout > 0)
        self.weight_version: int | None = None
        """Of its weights, as last heard; None = not yet."""
        self._model: ServedModel | None = None
        self._asking_model = asyncio.Lock()

    async def served_model(self) -> ServedModel:
        """Returns the model, which is asked for once. Raises `ActoriumError` while the engine does
        not answer."""
        if self._model is None:
            async with self._asking_model:
                if self._model is None:
                    self._model = await self._ask_model()
        return self._model

    async def _ask_model(self) -> ServedModel:
        model = ServedModel(await self.client.server_info(), self.config)
        if model.templates.generic_tools:
            LOG.info("the chat template has no place for tools: the system message tells a "
                     "request's, and asks for calls as <tool_call>{...}</tool_call>")
        if model.parsing.reasoning != NONE and not self.config.model.skip_tokenizer:
            model.thought_end = await self.client.tokenize(model.parsing.row.end[0], False)
        return model

    async def check_model(self, name: str | None) -> ServedModel:
        """Returns the model that a request names. Raises `HttpError` 404 if it is not served."""
        model = await self.served_model()
        if not model.names.known(name):
            raise HttpError(404, f"model: {str(name)[:200]!r} is not served here; "
                            f"{model.name!r} is", "model", code="model_not_found")
        return model

    async def requested_model(self, name: str | None,
                              adapter: str | list[str | None] | None) -> ServedModel:
        """Returns the model of a request that generates. name: what it calls the model, which may
        be an adapter (of that name, or behind the model's as `model:adapter`); adapter: what it
        names beside, for all of its prompts or for each. Whether there is such an adapter, the
        engine says. Raises `HttpError`."""
        if not self.config.adapters.enable_lora:
            if adapter:
                raise bad_field("lora_path", "this engine serves no LoRA adapters: start it with "
                                "--enable-lora")
            return await self.check_model(name)
        model = await self.served_model()
        if not adapter and name and not model.names.known(name):
            before, _, behind = name.rpartition(":")
            adapter = behind if before and model.names.known(before) else name
        if not adapter or isinstance(adapter, list):
            return model
        if fault := adapter_name_fault(adapter):
            raise bad_field("lora_path" if adapter != name else "model", fault)
        return model.with_adapter(adapter)

    def give_up(self, reason: str) -> None:
        """The engine has ended and is not started again: all that waits for it fails."""
        self.gate.give_up(reason)
        self.client.give_up(reason)

    async def close(self) -> None:
        """Aborts what is under way and disconnects."""
        await self.client.close()


FRESH = 0.25
"""Seconds for which the watchdog's status counts as current."""
AGAIN = 0.1
"""Seconds between two status queries while the engine is not ready."""
NEEDED = ("tokenizer", "detokenizer", "scheduler", "worker-")
"""Without one of these no token is generated. Gateways are not among them: this one runs. While the
engine sleeps or wakes, requests wait for the worker in the scheduler's queue."""


def obstacle(status: Status) -> str:
    """Returns why new requests cannot be served; empty = they can."""
    rests = activity_of(status.actors) in (SLEEPING, WAKING)
    needed = (actor for actor in status.actors if actor.role.startswith(NEEDED)
              and not (rests and actor.role.startswith("worker-")))
    return status.error or not_at_work(needed, WORKING_PHASES)


class RecoveryGate:
    """Holds requests back while the engine recovers."""

    def __init__(self, ask: Callable[[], Awaitable[Status]], patience: float,
                 comes_back: bool = False) -> None:
        """ask: the watchdog; patience: seconds; comes_back: what ends is started again."""
        self._ask, self._patience, self._comes_back = ask, patience, comes_back
        self._asked = -float("inf")
        self._known = False
        """The watchdog has answered."""
        self._since: float | None = None
        """When the engine was first seen not to be ready."""
        self._why = ""
        self._given_up = False
        """It will never be ready again."""
        self._open = asyncio.Event()
        """There is nothing to wait for."""
        self._open.set()
        self._looking: asyncio.Task[None] | None = None

    async def enter(self) -> None:
        """Returns when a new request can be expected to be served. Raises `HttpError` 503 if that
        takes too long, or will never be."""
        now = monotonic()
        if self._looking is None and now >= self._asked + FRESH:
            self._asked = now
            self._looking = asyncio.ensure_future(self._look())
        if not self._known and self._looking is not None:
            await asyncio.wait([self._looking], timeout=FRESH)
        if self._since is None:
            return
        late = False
        try:
            async with asyncio.timeout_at(_loop_time(self._since + self._patience)):
                await self._open.wait()
        except TimeoutError:
            late = True
        if late or self._given_up:
            raise HttpError(503, f"the engine is not ready: {self._why}", None, SERVER,
                            "unavailable")

    def give_up(self, reason: str) -> None:
        """The engine will never be ready again."""
        if self._looking is not None:
            self._looking.cancel()
        self._asked, self._since = math.inf, monotonic()
        self._why, self._given_up = reason, True
        self._open.set()

    async def _look(self) -> None:
        try:
            while await self._blocked():
                await asyncio.sleep(AGAIN)
        finally:
            self._looking = None

    async def _blocked(self) -> bool:
        try:
            status = await self._ask()
            why = obstacle(status)
            self._given_up = bool(status.error) and not self._comes_back
        except ActoriumError:  # the watchdog itself may be recovering: nothing has changed
            why = self._why
        self._asked, self._known = monotonic(), True
        if not why:
            self._since, self._why = None, ""
            self._open.set()
            return False
        self._why = why
        self._since = self._since if self._since is not None else self._asked
        if self._given_up:
            self._open.set()
        else:
            self._open.clear()
        return True


def _loop_time(when: float) -> float:
    """Converts a time of CLOCK_MONOTONIC to the loop's."""
    return asyncio.get_running_loop().time() + when - monotonic()
