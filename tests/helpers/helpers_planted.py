"""Actors that fail in the middle of a request with an exception that quotes it: where work on one
request is guarded, and where it is not. What they fail on has the word or the token."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import numpy as np

from actorium.actors.core import Context, Core
from actorium.actors.messages import Submit

WORD = "xyzzyquoted7b1"
"""In what is quoted."""
FAILING = {role: f"xyzzyfails{role}" for role in ("tokenizer", "detokenizer", "gateway", "task")}
"""In what each of them fails on."""
TOKENS = [411, 412, 413, 414]
"""At the beginning of a prompt; for an actor that sees no text."""


class Quoting(ValueError):
    """With what was asked in its text, notes and cause."""


def fail(what: Any, role: str) -> None:
    """If it is to."""
    if FAILING[role] in repr(what):
        error = Quoting(f"cannot work on {what!r}")
        error.add_note(f"it was {what!r}")
        try:
            raise KeyError(repr(what))
        except KeyError as cause:
            raise error from cause


def tokenizer(ctx: Context) -> Core:
    """Fails on a text, in what is guarded."""
    from actorium.actors.tokenizer.core import build
    from actorium.actors.tokenizer.prompt_encoder import PromptEncoder

    usual = PromptEncoder._prompt

    def ids(prompts: PromptEncoder, message: Any, render: Any) -> Any:
        fail(message.text, "tokenizer")
        return usual(prompts, message, render)

    PromptEncoder._prompt = ids  # type: ignore[method-assign]
    return build(ctx)


def scheduler(ctx: Context) -> Core:
    """Fails on a prompt's tokens where nothing guards it."""
    from actorium.actors.scheduler.scheduler_actor import build

    actor = build(ctx)
    core = actor._core
    usual = core.on_message

    def on_message(message: Any, now: float) -> None:
        if isinstance(message, Submit) and ctx.epoch == 1:
            asked = np.frombuffer(message.prompt, np.int32)[:len(TOKENS)].tolist()
            if asked == TOKENS:
                raise Quoting(f"{WORD} {message.text.stop}")
        usual(message, now)

    core.on_message = on_message  # type: ignore[method-assign]
    return actor


def detokenizer(ctx: Context) -> Core:
    """Fails on what opens a sequence, where nothing guards it."""
    from actorium.actors.detokenizer.core import build

    core = build(ctx)
    usual = core.on_message

    def on_message(message: Any, now: float) -> None:
        if ctx.epoch == 1:
            fail(message, "detokenizer")
        usual(message, now)

    core.on_message = on_message  # type: ignore[method-assign]
    return core


def gateway(ctx: Context) -> Core:
    """Fails on a body, in what is guarded, and beside it: in a task that nobody waits for, and in
    a thread."""
    from actorium.actors.gateway.actor import build
    from actorium.actors.gateway.http import bodies

    usual = bodies.decode
    tasks = []

    async def forgotten(body: bytes) -> None:
        fail(body, "task")

    def decode(body: bytes, kind: type[Any]) -> Any:
        fail(body, "gateway")
        if FAILING["task"].encode() in body:
            tasks.append(asyncio.ensure_future(forgotten(body)))
            asyncio.get_running_loop().call_later(0.05, tasks.clear)
            threading.Thread(target=fail, args=(body, "task")).start()
        return usual(body, kind)

    bodies.decode = decode
    return build(ctx)
