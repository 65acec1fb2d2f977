"""openai for Node: each thing tried is a function of `openai_node.mjs`."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from wire import Server

pytestmark = pytest.mark.conformance
SCRIPT = Path(__file__).with_name("openai_node.mjs")
MODULES = Path(__file__).parents[2] / "build" / "node"
TRIES = [quoted or plain for quoted, plain in
         re.findall(r'^  async (?:"([^"]+)"|(\w+))\(', SCRIPT.read_text(), re.MULTILINE)]


@pytest.mark.parametrize("name", TRIES)
def test_openai_for_node(server: Server, name: str) -> None:
    node = shutil.which("node")
    assert node and (MODULES / "node_modules" / "openai").exists(), "see setup.sh node"
    done = subprocess.run([node, str(SCRIPT), server.url, server.model, str(MODULES), name],
                          capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-1500:]
