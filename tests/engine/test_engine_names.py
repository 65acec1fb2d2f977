"""An engine of a model that is given by its name."""

from __future__ import annotations

import json
import re
import urllib.request
from typing import Any

import pytest
from helpers_cli import Cli, cli
from helpers_hub import FakeHub, hub

from actorium.actors.launcher.engine import Engine
from actorium.actors.models import model_dir

__all__ = ["cli", "hub"]
pytestmark = pytest.mark.skipif(not (model_dir.DEMO_MODEL / "model.safetensors").is_file(),
                                reason="the demo model is not there")


@pytest.fixture(autouse=True)
def built_kernels(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    """They lie in the cache of the user: with another one they would be built anew."""
    monkeypatch.delenv("XDG_CACHE_HOME")


def demo_files() -> dict[str, bytes]:
    return {one.name: one.read_bytes() for one in model_dir.DEMO_MODEL.iterdir()}


def answer(url: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    request = urllib.request.Request(
        url, None if body is None else json.dumps(body).encode(),
        {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as found:
        return dict(json.loads(found.read()))


@pytest.mark.slow
def test_it_is_fetched_served_and_shown_by_that_name(hub: FakeHub, cli: Cli) -> None:
    hub.add("org/demo", demo_files())
    hub.break_after["model.safetensors"] = [1_000_000]
    with cli.serve("org/demo", "--port", "0", "--device", "cpu") as process:
        report = process.report.decode()  # type: ignore[attr-defined]
        assert "fetching org/demo" in report and "serves org/demo; ready" in report
        url = ""
        while not url:
            assert process.stderr is not None
            found = re.search(rb"http://[\d.:]+", process.stderr.readline())
            url = found[0].decode() if found else ""
        assert [one["id"] for one in answer(f"{url}/v1/models")["data"]] == ["org/demo"]
        for name in ("org/demo", "demo"):
            body = {"model": name, "prompt": "Once", "max_tokens": 2}
            assert answer(f"{url}/v1/completions", body)["model"] == "org/demo"
    hub.asked.clear()
    done = cli.run("generate", "org/demo", "--null-worker", "--prompt", "Once",
                   "--max-tokens", "2")
    assert done.returncode == 0, done.stderr
    assert hub.asked == []


def test_from_python(hub: FakeHub) -> None:
    hub.add("org/demo", demo_files())
    with Engine("org/demo", null_worker=True) as engine:
        info = engine.client.server_info()
        assert info["model"] == "org/demo"
        assert "models--org--demo" in info["model_path"]
