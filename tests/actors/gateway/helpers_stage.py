"""A gateway over a scripted engine behind a real socket, for a browser."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from helpers_browser import Browser, Tab
from helpers_gateway import Scripted, ScriptedStream

from actorium.actors.client.requests import Request, StreamDelta
from actorium.actors.config.tree import Config, GatewayConfig, ModelConfig
from actorium.actors.errors import EngineUnavailable
from actorium.actors.gateway.app import build_app
from actorium.actors.gateway.gateway_state import GatewayState
from actorium.actors.messages import ActorStatus, Status

EVIL = ('<img src=x onerror="window.pwned=1"><script>window.pwned=2</script>\n\n# <b>head</b>\n\n'
        '- <svg onload=window.pwned=3>\n- [x](javascript:window.pwned=4)\n\n'
        '```html\n</code></pre><img src=x onerror=window.pwned=5>\n```\n\n`<i>` and **<u>**')
"""What a model that means harm says."""
STORY = "Tell me a story about a fox."
DONE = "!document.querySelector('.turn.live') && document.querySelector('.assistant .acts button')"
"""The answer that was asked for has come."""
HELPERS = """
window.acts = (turn, name) => [...document.querySelectorAll(`${turn} .acts button`)].find(
    one => one.textContent === name);
window.showTurns = (asked, answer) => {
  const made = newConversation();
  const turn = addTurn(made, null, {role: 'user', content: asked});
  addTurn(made, turn.id, {role: 'assistant', ...answer});
  showConversation(made);
};
"""
"""Of tests, in every tab: a button of a turn by its text, and turns that are not asked for."""
NEVER_ENDS = """{ const ask = window.fetch; window.fetch = (to, how) => {
  if (how && how.body && to.endsWith('completions')) how.body = JSON.stringify({
      ...JSON.parse(how.body), ignore_eos: true, max_tokens: 3500});
  return ask(to, how); } }"""


class Staged(Scripted):
    """A scripted model with all that the page asks."""

    most = 10**9
    """Deltas that may be told for now."""
    media: dict[str, Any] | None = None
    """What the model takes beside text."""
    answers = True
    """Whether the engine answers those who ask for its state."""
    lives = 1
    """Of the actor that it has."""

    async def server_info(self, timeout: float | None = None) -> dict[str, Any]:
        return {**await super().server_info(), "model": EVIL[:60], "model_path": "", "dtype": "",
                "architecture": "", "vocab_size": 1, "eos_ids": [], "has_tokenizer": True,
                "has_chat_template": True, "limits": {}, "generation_defaults": {EVIL[:20]: 1},
                "media": self.media}

    async def abort(self, rid: str) -> None:
        """Nothing is under way elsewhere."""

    async def status(self, timeout: float | None = None) -> Status:
        """Not ready, but nothing is missing that a request needs."""
        if not self.answers:
            raise EngineUnavailable("no watchdog")
        line = ActorStatus("e", EVIL[:70], 1, self.lives, EVIL[:70], 0, 0.0, 0.0)
        return Status("r", False, None, [line])


class Dripping(ScriptedStream):
    """A delta each millisecond, as far as the script may go."""

    def __init__(self, client: Staged, request: Request) -> None:
        super().__init__(client, request)
        self._script, self._count = client, 0

    async def __anext__(self) -> StreamDelta:
        self._count += 1
        await asyncio.sleep(0.001)
        while self._count > self._script.most:
            await asyncio.sleep(0.001)
        return await super().__anext__()


@contextmanager
def staged(texts: list[str], names: tuple[str, ...] = (), media: bool = False,
           **settings: Any) -> Iterator[tuple[Staged, str]]:
    """A gateway over a script, in a thread. names: of the model; media: it takes pictures."""
    script = Staged(texts)
    script.media = {} if not media else {"image": True}
    gateway = GatewayState(Config(gateway=GatewayConfig(**settings),
                             model=ModelConfig(served_model_name=names)), Path("none"))
    gateway.engine.client = script  # type: ignore[assignment]
    server = uvicorn.Server(uvicorn.Config(build_app(gateway), lifespan="off", ws="none",
                                           log_config=None, timeout_graceful_shutdown=1))
    with pytest.MonkeyPatch.context() as patch, socket.socket() as sock:
        patch.setattr("actorium.actors.gateway.engine_call.AsyncDeltaStream", Dripping)
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        thread = threading.Thread(target=lambda: server.run([sock]), daemon=True)
        thread.start()
        try:
            yield script, f"http://127.0.0.1:{sock.getsockname()[1]}/"
        finally:
            server.should_exit = server.force_exit = True
            thread.join(10)
    assert not thread.is_alive()


@contextmanager
def opened(browser: Browser, url: str, init: str = "", **how: Any) -> Iterator[Tab]:
    """A tab that must not complain."""
    tab = browser.open(url, init=HELPERS + init, **how)
    try:
        yield tab
        assert tab.complaints() == [], tab.complaints()
    finally:
        tab.close()


def send(tab: Tab, text: str) -> None:
    tab.js("document.getElementById('text').focus()")
    tab.type(text)
    tab.press("Enter")
