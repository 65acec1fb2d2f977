"""LoRA adapters over HTTP: loaded and unloaded as vLLM's and SGLang's routes do, and listed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from msgspec import Struct
from starlette.requests import Request as HttpRequest
from starlette.responses import PlainTextResponse, Response

from actorium.actors.errors import BadModel
from actorium.actors.gateway.engine_call import engine_of
from actorium.actors.gateway.http import bodies
from actorium.actors.gateway.http.http_errors import HttpError, bad_field
from actorium.actors.gateway.http.replies import JsonReply
from actorium.actors.gateway.served_engine import ServedEngine


class LoadAdapterBody(Struct, kw_only=True):
    """vLLM's and SGLang's body."""

    lora_name: str
    lora_path: str
    """Below --lora-dir, or relative to it."""
    load_inplace: bool = False
    """An adapter of this name may be there, and gives way."""
    pinned: bool = False


class UnloadAdapterBody(Struct, kw_only=True):
    """vLLM's and SGLang's body."""

    lora_name: str


async def load(http: HttpRequest) -> Response:
    """Handles `/v1/load_lora_adapter`."""
    engine, body = engine_of(http), await bodies.read(http, LoadAdapterBody)
    await _load(engine, body)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


async def unload(http: HttpRequest) -> Response:
    """Handles `/v1/unload_lora_adapter`."""
    engine, body = engine_of(http), await bodies.read(http, UnloadAdapterBody)
    await engine.client.unload_adapter(body.lora_name)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


async def sglang_load(http: HttpRequest) -> Response:
    """Handles `/load_lora_adapter`."""
    engine, body = engine_of(http), await bodies.read(http, LoadAdapterBody)
    await _load(engine, body)
    return await _sglang_answer(engine)


async def sglang_unload(http: HttpRequest) -> Response:
    """Handles `/unload_lora_adapter`."""
    engine, body = engine_of(http), await bodies.read(http, UnloadAdapterBody)
    await engine.client.unload_adapter(body.lora_name)
    return await _sglang_answer(engine)


async def listed(http: HttpRequest) -> Response:
    """Handles `/lora-adapters` of llama-server: all adapters; none changes what requests get that
    do not name it."""
    return JsonReply([{"id": number, "path": each["path"], "scale": 0.0, "name": each["name"]}
                      for number, each in enumerate(await adapters_of(engine_of(http)))])


async def adapters_of(engine: ServedEngine) -> list[dict[str, Any]]:
    """Returns the adapters of an engine, as the SDK lists them; none where it serves none."""
    return await engine.client.adapters() if engine.config.adapters.enable_lora else []


async def _sglang_answer(engine: ServedEngine) -> Response:
    return JsonReply({"success": True, "error_message": "", "loaded_adapters": {
        each["name"]: each["path"] for each in await adapters_of(engine)}})


async def _load(engine: ServedEngine, body: LoadAdapterBody) -> None:
    if body.pinned:
        raise bad_field("pinned", "not supported: the adapters used last stay in memory "
                        "(--max-cpu-loras)")
    path = _within(engine.config.adapters.lora_dir, body.lora_path)
    try:
        await engine.client.load_adapter(body.lora_name, path, body.load_inplace, timeout=None)
    except BadModel as error:
        raise HttpError(400, error.message, "lora_path", code=error.code) from None


def _within(folder: str | None, path: str) -> Path:
    """Returns the place of an adapter, links followed. Raises `HttpError` 400 where it is not below
    the folder."""
    if folder is None:
        raise bad_field("lora_path", "adapters are loaded over HTTP from below --lora-dir alone, "
                        "which this server has not")
    root = os.path.realpath(folder)
    try:
        place = os.path.realpath(os.path.join(root, path))
    except ValueError as error:  # a zero byte
        raise bad_field("lora_path", str(error)) from None
    if place == root or os.path.commonpath((root, place)) != root:
        raise bad_field("lora_path", "must be below --lora-dir")
    return Path(place)
