"""Sleep, wake, pause and resume: vLLM's routes, and SGLang's of the same meaning."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from msgspec import Struct
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from actorium.actors.gateway.engine_call import engine_of
from actorium.actors.gateway.http import bodies
from actorium.actors.gateway.http.http_errors import bad_field
from actorium.actors.gateway.http.replies import JsonReply
from actorium.actors.messages import RunningMode

WEIGHTS, KV_CACHE = "weights", "kv_cache"
TAGS = frozenset({WEIGHTS, KV_CACHE, "cuda_graph", "scheduling"})
"""Names of the parts of an engine that other ones free, or bring back, one by one."""
MODES: dict[str, RunningMode] = {"abort": "abort", "wait": "wait", "keep": "keep"}
SWITCHES = {"true": True, "1": True, "false": False, "0": False}


async def sleep(http: HttpRequest) -> Response:
    """Handles `/sleep`. Requests that run are aborted by default, as vLLM does."""
    asked = _query(http, "level", "mode")
    level = {"1": 1, "2": 2}.get(asked.get("level", "1"))
    if level is None:
        raise bad_field("level", "must be 1 (the worker's process stays) or 2 (it ends); /pause "
                        "keeps weights and cache")
    state = await engine_of(http).client.sleep(level, _mode(asked), timeout=None)
    return JsonReply({"status": "sleeping", "level": state["sleeping"],
                      "cache_kept": state["cache_kept"]})


async def wake_up(http: HttpRequest) -> Response:
    """Handles `/wake_up`."""
    _query(http, "tags")
    _whole(http.query_params.getlist("tags"))
    await engine_of(http).client.wake_up()
    return JsonReply({"status": "awake"})


async def is_sleeping(http: HttpRequest) -> Response:
    """Handles `/is_sleeping`."""
    return JsonReply({"is_sleeping": await engine_of(http).client.is_sleeping()})


async def pause(http: HttpRequest) -> Response:
    """Handles `/pause`. By default requests that run are aborted and the prefix cache is emptied,
    as vLLM does; with mode=keep it is not."""
    asked = _query(http, "mode", "clear_cache", "wait_for_inflight_requests")
    mode = _mode(asked)
    if _switch(asked, "wait_for_inflight_requests", False):
        mode = "wait"
    clears = _switch(asked, "clear_cache", mode != "keep")
    await engine_of(http).client.pause(mode, clears, timeout=None)
    return JsonReply({"status": "paused"})


async def resume(http: HttpRequest) -> Response:
    """Handles `/resume`."""
    _query(http)
    await engine_of(http).client.resume()
    return JsonReply({"status": "resumed"})


async def is_paused(http: HttpRequest) -> Response:
    """Handles `/is_paused`."""
    return JsonReply({"is_paused": await engine_of(http).client.is_paused()})


def _query(http: HttpRequest, *names: str) -> dict[str, str]:
    """Returns the parameters of the URL, of which `model` chooses the engine. Raises `HttpError` at
    one that is not known."""
    for name in http.query_params:
        if name not in (*names, "model"):
            raise bad_field(name, "this route has no such parameter")
    return dict(http.query_params)


def _mode(asked: dict[str, str]) -> RunningMode:
    mode = MODES.get(asked.get("mode", "abort"))
    if mode is None:
        raise bad_field("mode", f"must be one of {', '.join(MODES)}")
    return mode


def _switch(asked: dict[str, str], name: str, default: bool) -> bool:
    value = SWITCHES.get(asked[name].lower()) if name in asked else default
    if value is None:
        raise bad_field(name, "must be true or false")
    return value


def _whole(tags: Iterable[str]) -> None:
    """Raises `HttpError` unless the tags name all that sleeps, or nothing."""
    named = set(tags)
    if unknown := sorted(named - TAGS):
        raise bad_field("tags", f"{unknown[0][:40]!r} is none of {', '.join(sorted(TAGS))}")
    if named and not {WEIGHTS, KV_CACHE} <= named:
        raise bad_field("tags", "an engine sleeps and wakes as a whole: name weights and kv_cache, "
                        "or nothing")


# --- SGLang's ------------------------------------------------------------------------------------

class OccupationBody(Struct, kw_only=True):
    """What is freed or brought back."""

    tags: list[str] | None = None
    """None = everything; parts alone are refused."""


class PauseBody(Struct, kw_only=True):
    """What becomes of requests that run."""

    mode: Literal["abort", "retract", "in_place"] = "abort"
    """abort | retract (they give up their pages, and are computed again later) | in_place."""


async def release_memory(http: HttpRequest) -> Response:
    """Handles `/release_memory_occupation`: sleeps at level 1. SGLang demands that nothing runs;
    here that is waited for."""
    _whole((await _body(http, OccupationBody)).tags or ())
    await engine_of(http).client.sleep(1, "wait", timeout=None)
    return JsonReply({"success": True})


async def resume_memory(http: HttpRequest) -> Response:
    """Handles `/resume_memory_occupation`."""
    _whole((await _body(http, OccupationBody)).tags or ())
    await engine_of(http).client.wake_up()
    return JsonReply({"success": True})


async def pause_generation(http: HttpRequest) -> Response:
    """Handles `/pause_generation`."""
    mode = (await _body(http, PauseBody)).mode
    await engine_of(http).client.pause("keep" if mode == "in_place" else mode, timeout=None)
    return JsonReply({"status": "ok", "message": "generation is paused"})


async def continue_generation(http: HttpRequest) -> Response:
    """Handles `/continue_generation`; its body is ignored."""
    await engine_of(http).client.resume()
    return JsonReply({"status": "ok", "message": "generation goes on"})


async def _body(http: HttpRequest, kind: type[bodies.Body]) -> bodies.Body:
    """Returns the body, which may be empty."""
    return bodies.decode(await bodies.raw(http) or b"{}", kind)
