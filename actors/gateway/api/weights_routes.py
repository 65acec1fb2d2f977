"""Other weights for a model that serves: SGLang's routes for trainers."""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from typing import Any, Literal

from msgspec import Struct
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from actorium.actors.errors import ActoriumError, BadModel
from actorium.actors.gateway.api.sglang import shown_version
from actorium.actors.gateway.engine_call import engine_of
from actorium.actors.gateway.http import bodies
from actorium.actors.gateway.http.http_errors import HttpError, bad_field
from actorium.actors.gateway.http.replies import JsonReply
from actorium.actors.gateway.served_engine import STATUS_SECONDS, ServedEngine
from actorium.actors.messages import MAX_VALUES, RunningMode

MODES: dict[str, RunningMode] = {"wait": "wait", "finish": "wait", "keep": "keep",
                                 "in_place": "keep", "retract": "retract", "abort": "abort"}
MAX_VERSION = 2**31 - 1


class UpdateBody(Struct, kw_only=True):
    """SGLang's body; `mode` is ours."""

    model_path: str
    """A checkpoint's directory, below --weights-dir or relative to it."""
    load_format: str | None = None
    mode: Literal["wait", "finish", "keep", "in_place", "retract", "abort"] = "wait"
    """What becomes of requests that run: they end first (wait, or finish), go on with the new
    weights (keep, or in_place), are computed again by them (retract), or are aborted."""
    abort_all_requests: bool = False
    """As mode abort."""
    flush_cache: bool = True
    weight_version: str | int | None = None
    """The number of the new version, above the present one; None = the next."""
    is_async: bool = False


class TensorBody(Struct, kw_only=True):
    """SGLang's body."""

    name: str
    truncate_size: int = 100
    """Rows that are wanted, the first ones; of a vector: numbers."""


async def from_disk(http: HttpRequest) -> Response:
    """Handles `/update_weights_from_disk`."""
    engine, body = engine_of(http), await bodies.read(http, UpdateBody)
    if body.load_format not in (None, "auto", "safetensors"):
        raise bad_field("load_format", "must be auto or safetensors")
    if body.is_async:
        raise bad_field("is_async", "not supported: the answer comes when the weights are in use")
    mode = "abort" if body.abort_all_requests else body.mode
    try:
        state = await engine.client.update_weights(
            _within(engine.config.model.weights_dir, body.model_path), MODES[mode],
            body.flush_cache, _number(body.weight_version), timeout=None)
    except BadModel as error:
        raise HttpError(400, error.message, "model_path", code=error.code) from None
    return _updated(state)


async def from_tensor(http: HttpRequest) -> Response:
    """Handles `/update_weights_from_tensor`, whose body is a safetensors file."""
    engine, asked = engine_of(http), dict(http.query_params)
    if http.headers.get("content-type", "").startswith("application/json"):
        raise HttpError(501, "serialized_named_tensors: tensors in a pickle are never read; send a "
                        "safetensors file as the body, as application/octet-stream",
                        "serialized_named_tensors", code="not_supported")
    mode = MODES.get(asked.get("mode", "wait"))
    if mode is None:
        raise bad_field("mode", f"must be one of {', '.join(MODES)}")
    flush = asked.get("flush_cache", "true").lower() in ("true", "1")
    try:
        state = await engine.client.update_weights(
            await bodies.raw(http), mode, flush, _number(asked.get("weight_version")), timeout=None)
    except BadModel as error:
        raise HttpError(400, error.message, code=error.code) from None
    return _updated(state)


async def by_name(http: HttpRequest) -> Response:
    """Handles `/get_weights_by_name`: a tensor's first rows, of a vector its first numbers."""
    engine, body = engine_of(http), await bodies.read(http, TensorBody)
    if not 0 < body.truncate_size <= MAX_VALUES:
        raise bad_field("truncate_size", f"must be from 1 to {MAX_VALUES}")
    try:
        found = await engine.client.get_weights(body.name, body.truncate_size)
    except BadModel as error:
        raise HttpError(400, error.message, "name", code=error.code) from None
    return JsonReply(found["values"])


async def version(http: HttpRequest) -> Response:
    """Handles `/get_weight_version`."""
    return JsonReply({
        "weight_version": shown_version(await engine_of(http).client.weight_version())})


async def refused(http: HttpRequest) -> Response:
    """Handles the routes by which weights come over a group of devices, or by another engine's
    call."""
    path = http.url.path
    raise HttpError(501, f"{path}: weights come from a directory (/update_weights_from_disk), as a "
                    "safetensors file (/update_weights_from_tensor), or from Python "
                    "(Client.update_weights); no other way is built", code="not_supported")


async def last_version(engine: ServedEngine) -> int | None:
    """Returns the version of the weights within two seconds: while the scheduler does not answer,
    what it has said last, to this gateway or the watchdog; None where that is not known."""
    with suppress(TimeoutError, ActoriumError):
        async with asyncio.timeout(STATUS_SECONDS):
            engine.weight_version = await engine.client.weight_version()
            return engine.weight_version
    with suppress(ActoriumError):
        for actor in (await engine.client.status(STATUS_SECONDS)).actors:
            if (version := actor.gauges.get("weight_version")) is not None:
                engine.weight_version = max(int(version), engine.weight_version or 0)
    return engine.weight_version


def _updated(state: dict[str, Any]) -> Response:
    number = state["version"]
    return JsonReply({"success": True, "message": f"Weight version updated to {number}.",
                      "num_paused_requests": 0, "weight_version": str(number),
                      "seconds": state["seconds"]})


def _number(asked: str | int | None) -> int:
    """Returns the version that is asked for; 0 = the next."""
    if asked is None:
        return 0
    text = str(asked)
    if not text.isascii() or not text.isdecimal() or not 0 < int(text[:20]) <= MAX_VERSION:
        raise bad_field("weight_version", f"must be a number from 1 to {MAX_VERSION}: versions "
                        "are counted")
    return int(text)


def _within(folder: str | None, path: str) -> str:
    """Returns the place of a checkpoint, links followed. Raises `HttpError` 400 where it is not
    below the folder."""
    if folder is None:
        raise bad_field("model_path", "weights are read over HTTP from below --weights-dir alone, "
                        "which this server has not")
    root = os.path.realpath(folder)
    try:
        place = os.path.realpath(os.path.join(root, path))
    except ValueError as error:  # a zero byte
        raise bad_field("model_path", str(error)) from None
    if place != root and os.path.commonpath((root, place)) != root:
        raise bad_field("model_path", "must be below --weights-dir")
    return place
