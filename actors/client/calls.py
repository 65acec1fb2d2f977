"""The parts of a client's calls that need no socket: prompts told apart, answers unpacked. Pure,
but for the looks at the run directory and the pauses of `wait_ready`.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from actorium.actors.client.remote import Remote
from actorium.actors.client.requests import (
    Completion,
    Request,
    chat_messages,
    check_template,
    check_timeout,
    column,
    packed,
)
from actorium.actors.errors import (
    DeadlineExceeded,
    EngineFailed,
    EngineUnavailable,
    InvalidRequest,
)
from actorium.actors.messages import (
    Detokenize,
    FlushCache,
    GetStatus,
    ServerInfo,
    Status,
    Tokenize,
)
from actorium.actors.params import SamplingParams
from actorium.actors.runtime import rundir

Prompt: TypeAlias = str | list[int]
Prompts: TypeAlias = str | list[int] | list[str] | list[list[int]] | list[str | list[int]]

WORKER = "worker-0"
LIVENESS = 0.25
"""Seconds of silence after which the engine's lock is looked at."""
REATTACH = 5.0
"""Seconds of silence after which the detokenizer is asked whether it still knows this client."""
READY_TIMEOUT = 600.0
STATUS_TIMEOUT = 10.0
MEMORY_GAUGES = (
    "free_pages", "used_pages", "held_pages", "cached_pages", "quarantined_pages",
    "cache_hit_tokens", "cache_lookup_tokens", "evicted_pages",
    "preemptions_memory", "preemptions_priority", "preemptions_forced")
"""What the scheduler's heartbeat tells of pages, prefix cache and preemptions. Pages are those of
the moment; tokens, evictions and preemptions are counted since the start."""
BYTES, PLANNED = "_bytes", "_bytes_planned"
"""How the worker's heartbeat calls bytes of something: measured, and as the plan has them."""
SPECULATION = "spec_decode_"
"""What the scheduler's heartbeat tells of drafts begins so."""
POLL = 0.02


class Quiet:
    """How long nothing has come."""

    def __init__(self, now: float) -> None:
        self._since = now

    def heard(self, now: float) -> None:
        self._since = now

    def ask(self, now: float) -> bool:
        """True once every `REATTACH` seconds of silence."""
        if now - self._since < REATTACH:
            return False
        self._since = now
        return True


def fresh_prefix() -> str:
    """First part of a client's rids."""
    return os.urandom(6).hex()


def one(choices: list[Completion]) -> Any:
    """A single completion for n == 1, else the list."""
    return choices[0] if len(choices) == 1 else choices


def requests(prompt: Any, params: Any, timeout: float | None, priority: int = 0,
             truncate_prompt_tokens: int | None = None, cache_salt: str | None = None
             ) -> tuple[list[Request], Callable[[list[Any]], Any]]:
    """The requests of a `generate` call, and what makes its result of theirs.

    Raises `InvalidRequest` naming `prompt` or `params`.
    """
    single = isinstance(prompt, str) or not _is_list_of_prompts(prompt)
    prompts = [prompt] if single else list(prompt)
    if isinstance(params, list | tuple):
        if len(params) != len(prompts):
            raise InvalidRequest(f"params: {len(params)} for {len(prompts)} prompts", "params")
        each: Sequence[Any] = params
    else:
        each = [params] * len(prompts)
    made = [Request(prompt=p, params=q, timeout=timeout, priority=priority,
                    truncate_prompt_tokens=truncate_prompt_tokens, cache_salt=cache_salt)
            for p, q in zip(prompts, each, strict=True)]
    flat = all(not isinstance(q, SamplingParams) or q.n == 1 for q in each)

    def shape(found: list[Any]) -> Any:
        out = [r[0] if flat and isinstance(r, list) else r for r in found]
        return out[0] if single else out

    return made, shape


def _is_list_of_prompts(prompt: Any) -> bool:
    if not hasattr(prompt, "__len__") or isinstance(prompt, bytes | dict | set):
        raise InvalidRequest("prompt: must be text, a list of token ids, or a list of either, "
                             f"got {type(prompt).__name__}", "prompt")
    if not len(prompt):
        raise InvalidRequest("prompt: must not be empty", "prompt")
    return isinstance(prompt[0], str) or hasattr(prompt[0], "__len__")


# --- questions and answers ------------------------------------------------------------------------

def tokenize(text: str, add_special_tokens: bool) -> Callable[[str], Tokenize]:
    if not isinstance(text, str):
        raise InvalidRequest(f"text: must be a string, got {type(text).__name__}", "text")
    return lambda rid: Tokenize(rid, text, add_special_tokens)


def tokenize_chat(messages: Any, template_args: dict[str, Any] | None = None,
                  tools: list[dict[str, Any]] | None = None, chat_template: str | None = None,
                  add_generation_prompt: bool = True, continue_final_message: bool = False
                  ) -> Callable[[str], Tokenize]:
    turns, template = chat_messages(messages), check_template(chat_template)
    args = packed(template_args or {}, dict, "template_args")
    shown = packed(tools or [], list, "tools")
    return lambda rid: Tokenize(
        rid, "", False, turns, args, shown, chat_template=template,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message)


def detokenize(ids: Sequence[int], skip_special_tokens: bool) -> Callable[[str], Detokenize]:
    packed = column(ids, "token_ids") if len(ids) else b""
    return lambda rid: Detokenize(rid, packed, skip_special_tokens)


def server_info(rid: str) -> ServerInfo:
    return ServerInfo(rid)


def flush_cache(rid: str) -> FlushCache:
    return FlushCache(rid)


def get_status(wait: bool) -> Callable[[str], GetStatus]:
    return lambda rid: GetStatus(rid, wait)


def ids_of(answer: Any) -> list[int]:
    return array("i", answer.tokens).tolist()


def info_of(answer: Any) -> dict[str, Any]:
    return msgspec.json.decode(answer.json, type=dict[str, Any])


def flushed_of(answer: Any) -> dict[str, int]:
    return msgspec.json.decode(answer.json, type=dict[str, int])


def gauges_of(status: Status) -> dict[str, Any]:
    """The blocks of `server_info` that come from heartbeats: `memory` and `speculation`."""
    return {"memory": memory_of(status), "speculation": speculation_of(status)}


def speculation_of(status: Status) -> dict[str, float]:
    """Drafts made and accepted since the start, the present number of drafts (`k`), and what its
    choice rests on; empty where nothing is drafted."""
    return {name.removeprefix(SPECULATION): value for actor in status.actors
            if actor.role == "scheduler" for name, value in actor.gauges.items()
            if name.startswith(SPECULATION)}


def memory_of(status: Status) -> dict[str, Any]:
    """The scheduler's `MEMORY_GAUGES`, those that it tells, and as `bytes` the worker's."""
    told: dict[str, Any] = {}
    for actor in status.actors:
        if actor.role == "scheduler":
            told |= {name: int(actor.gauges[name]) for name in MEMORY_GAUGES
                     if name in actor.gauges}
        elif actor.role == WORKER and (found := bytes_of(actor.gauges)):
            told["bytes"] = found
    return told


def bytes_of(gauges: Mapping[str, float]) -> dict[str, dict[str, int]]:
    """What a worker's heartbeat tells of bytes: name -> {"planned", "measured"}. The workspace also
    has "tokens" and "rows" of the largest step it was measured at, 0 while there was none."""
    names = [key.removesuffix(PLANNED) for key in gauges if key.endswith(PLANNED)]
    found = {name: {"planned": int(gauges[name + PLANNED]), "measured": int(gauges[name + BYTES])}
             for name in names if name + BYTES in gauges}
    if "workspace" in found:
        found["workspace"] |= {part: int(gauges.get(f"workspace_{part}", 0))
                               for part in ("tokens", "rows")}
    return found


# --- readiness ------------------------------------------------------------------------------------

def ready_deadline(timeout: float | None, now: float) -> float:
    return now + (READY_TIMEOUT if timeout is None else timeout)


def may_exist(directory: Path | Remote) -> bool:
    """True if an engine runs there (looks at the lock only where there is a configuration), or
    might, on another machine."""
    if isinstance(directory, Remote):
        return True
    return (directory / "config.json").exists() and rundir.is_running(directory)


def check_late(directory: Path | Remote, deadline: float, now: float) -> None:
    """Raise `EngineUnavailable` past the deadline."""
    if now >= deadline and isinstance(directory, Path):
        raise EngineUnavailable(f"no engine {directory.name!r} is running "
                                f"(looked in {directory.parent})", "name")


def is_ready(status: Status) -> bool:
    """Raises `EngineFailed` if it will never be."""
    if status.error is not None:
        raise EngineFailed(status.error)
    return status.ready


def not_ready(timeout: float | None) -> DeadlineExceeded:
    """The error of a `wait_ready` that took too long."""
    seconds = READY_TIMEOUT if timeout is None else timeout
    return DeadlineExceeded(f"the engine is not ready after {seconds:g} s")


def gone_away(directory: Path | Remote) -> EngineUnavailable:
    """The error of everything that was under way when the engine died."""
    if isinstance(directory, Remote):
        return directory.why()
    return EngineUnavailable(f"the engine {directory.name!r} went away", "name")


class Resumption:
    """How a client's requests outlive an engine: who it was there, and until when it waits."""

    def __init__(self, timeout: float) -> None:
        """Raises `InvalidRequest` unless `timeout` is a number of seconds, 0 = do not wait."""
        if timeout != 0:
            check_timeout(timeout, "resume_timeout")
        self._timeout = timeout
        self._until = 0.0
        self.identity = b""
        """Under which the client is known to the engine that is gone; empty = it need not be."""
        self.waiting = False
        """For another engine, to take up what was under way."""

    def begin(self, identity: bytes, now: float) -> bool:
        """The engine has gone; True = wait for another one."""
        if self._timeout > 0 and not self.waiting:
            self.identity, self._until, self.waiting = identity, now + self._timeout, True
        return self.waiting

    def late(self, now: float) -> bool:
        """It was waited for long enough, or need not be."""
        return not self.waiting or now >= self._until

    def end(self) -> bool:
        """It is there, or given up; True if it was waited for."""
        waiting, self.waiting = self.waiting, False
        return waiting


class Incarnation:
    """Tells the engine that a client is connected to from a later one in the same run directory."""

    def __init__(self, directory: Path | Remote) -> None:
        self._directory = directory
        self._known: tuple[int, ...] = ()

    def remember(self) -> None:
        """A connection is being made to the engine of now."""
        self._known = self._look()

    def gone(self) -> bool:
        """True if that engine does not run any more, whether or not another one does."""
        if isinstance(self._directory, Remote):
            return self._directory.lost()
        now = self._look()
        if 0 in self._known:  # it was only just starting when it was looked at
            self._known = now
        return now != self._known or not rundir.is_running(self._directory)

    def replaced(self) -> bool:
        """True if another engine has the directory: cheaper than `gone`, for each call."""
        return 0 not in self._known and self._look() != self._known

    def _look(self) -> tuple[int, ...]:
        found: list[int] = []
        if isinstance(self._directory, Remote):
            return ()  # nothing there can be looked at
        for name in ("lock", "config.json"):  # one made, the other written by each launcher
            try:
                info = os.stat(self._directory / name)
                found += (info.st_ino, info.st_mtime_ns)
            except OSError:
                found += (0, 0)
        return tuple(found)
