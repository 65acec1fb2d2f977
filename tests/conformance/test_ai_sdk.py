"""Vercel's AI SDK (`ai`) with its providers for OpenAI's, compatible and Anthropic's APIs: each
thing tried is a function of `ai_sdk.mjs`."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest
from thinking import CLOSE, LESS
from wire import Server

pytestmark = [pytest.mark.conformance, pytest.mark.models("demo")]
SCRIPT = Path(__file__).with_name("ai_sdk.mjs")
MODULES = Path(__file__).parents[2] / "build" / "node"
PROVIDERS = ("chat", "responses", "unkept", "compatible", "anthropic")
"""`unkept` are responses with `store: false`: the SDK sends items instead of references to them."""
NAMES = [quoted or plain for quoted, plain in
         re.findall(r'^  async (?:"([^"]+)"|(\w+))\(', SCRIPT.read_text(), re.MULTILINE)]
NOT_THERE = {
    # The SDK makes a tool of the format, and forces one of the tools.
    ("an object beside tools, called", "anthropic"),
    ("an object beside a required call", "anthropic"),
    # The SDK mends the number.
    ("errors", "anthropic"),
    # It reads no thoughts there.
    *((name, "chat") for name in NAMES if name.startswith("a thought"))}
TRIES = [(provider, name) for provider in PROVIDERS for name in NAMES
         if (name, provider) not in NOT_THERE]
PLAIN = [one for one in TRIES if "thought" not in one[1]]
THINKING = [one for one in TRIES if "thought" in one[1]]


@cache
def found(server: Server, tries: tuple[tuple[str, str], ...],
          provider: str) -> dict[str, str | None]:
    """What is wrong with each of a provider's tries: one process runs them all."""
    node = shutil.which("node")
    assert node and (MODULES / "node_modules" / "ai").exists(), "see setup.sh node"
    done = subprocess.run(
        [node, str(SCRIPT), server.url, server.model, str(MODULES), provider,
         *(name for one, name in tries if one == provider)],
        env=os.environ | {"LESS_THAN": str(LESS), "THOUGHT_END": str(CLOSE)},
        capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    told: dict[str, str | None] = json.loads(done.stdout)
    return told


@pytest.mark.parametrize("provider,name", PLAIN)
def test_the_ai_sdk(server: Server, provider: str, name: str) -> None:
    wrong = found(server, tuple(PLAIN), provider)[name]
    assert wrong is None, wrong


@pytest.mark.parametrize("provider,name", THINKING)
def test_the_ai_sdk_with_thoughts(thinking_server: Server, provider: str, name: str) -> None:
    wrong = found(thinking_server, tuple(THINKING), provider)[name]
    assert wrong is None, wrong
