"""The dashboard over a real Prometheus: Debian's scrapes an engine with a key, one with replicas
and a server of several models, and evaluates every expression that a panel of
`tools/grafana/actorium.json` has."""

from __future__ import annotations

import json
import re
import shutil
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import pytest
from wire import CHAT, COMPLETIONS, Server, chat, completion

pytestmark = pytest.mark.conformance
DASHBOARD = json.loads((Path(__file__).parents[2] / "tools/grafana/actorium.json").read_text())
RULES = Path(__file__).parents[2] / "tools/deploy/prometheus/rules.yml"
EXPRESSIONS = [target["expr"] for panel in DASHBOARD["panels"]
               for target in panel.get("targets", [])]
NAME = re.compile(r"(?:vllm|actorium):\w+|http_\w+")
OTHER_MACHINES = re.compile(r"actorium:(nodes|nodes_joined|node_\w+|ray_\w+)")
"""What is told only where other machines may join."""
UP_SECONDS, SCRAPES = 60.0, 4
Engines = tuple[Server, Server, Server]


class Prometheus:
    """One that runs here, by its HTTP API."""

    def __init__(self, url: str) -> None:
        self._url = url

    def ask(self, path: str) -> Any:
        """`data` of the answer."""
        with urllib.request.urlopen(f"{self._url}/api/v1/{path}", timeout=30) as answer:
            told = json.load(answer)
        assert told["status"] == "success", told
        return told["data"]

    def series(self, expression: str) -> list[Any]:
        """What a panel with this expression would draw."""
        shown = expression.replace("$instance", ".+").replace("$__rate_interval", "1m")
        found: list[Any] = self.ask(f"query?query={quote(shown)}")["result"]
        return found

    def names(self) -> set[str]:
        """Every metric that it has stored."""
        return set(self.ask("label/__name__/values"))


@pytest.fixture(scope="module")
def engines(scraped_servers: Engines) -> Engines:
    """All have answered, and refused."""
    for server in scraped_servers:
        server.post(COMPLETIONS, completion(model=server.model, max_tokens=16)).ok()
        server.post(CHAT, chat(model=server.model, max_tokens=16, n=2)).ok()
        server.post(CHAT, chat("fox " * 400, model=server.model)).error(400)
    return scraped_servers


@pytest.fixture(scope="module")
def prometheus(engines: Engines,
               tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """It has scraped all some times."""
    binary = shutil.which("prometheus")
    if binary is None:
        pytest.fail("no prometheus here; tests/conformance/setup.sh installs it")
    folder = tmp_path_factory.mktemp("prometheus")
    config = folder / "prometheus.yml"
    config.write_text(json.dumps({  # JSON is YAML, too
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(RULES)],
        "scrape_configs": [
            {"job_name": server.engine, "authorization": {"credentials": server.key or "none"},
             "static_configs": [{"targets": [urlsplit(server.url).netloc]}]}
            for server in engines]}))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = folder / "log"
    with log.open("w") as told:
        process = subprocess.Popen(
            [binary, f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}",
             f"--web.listen-address=127.0.0.1:{port}"], stdout=told, stderr=told)
    try:
        found = Prometheus(f"http://127.0.0.1:{port}")
        _wait(found, process, log)
        yield found
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


def _wait(prometheus: Prometheus, process: subprocess.Popen[bytes], log: Path) -> None:
    """Until all targets are up and scraped often enough for a rate."""
    deadline = time.monotonic() + UP_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            scraped = prometheus.series("count_over_time(up[1m])")
        except OSError:
            scraped = []
        if sum(float(one["value"][1]) >= SCRAPES for one in scraped) == 3:
            return
        time.sleep(0.5)
    process.kill()
    pytest.fail(f"Prometheus did not scrape: {log.read_text()[-2000:]}")


def test_all_engines_are_scraped_without_an_error(prometheus: Prometheus) -> None:
    targets = prometheus.ask("targets")["activeTargets"]
    assert [(one["health"], one["lastError"]) for one in targets] == [("up", "")] * 3


def test_names_are_stored_as_documented(prometheus: Prometheus,
                                        engines: Engines) -> None:
    told = {line.partition("{")[0].partition(" ")[0] for server in engines
            for line in server.get("/metrics").text.splitlines() if not line.startswith("#")}
    assert len(told) > 150 and told - prometheus.names() == set()


def test_the_dashboards_instances_are_found(prometheus: Prometheus,
                                            engines: Engines) -> None:
    (query,) = [one["query"]["query"] for one in DASHBOARD["templating"]["list"]
                if isinstance(one["query"], dict)]
    (found,) = re.findall(r"label_values\((\S+), instance\)", query)
    assert set(prometheus.ask(f"label/instance/values?match[]={quote(found)}")) \
        == {urlsplit(server.url).netloc for server in engines}


def test_every_expression_of_the_dashboard_returns_a_series(prometheus: Prometheus) -> None:
    stored = prometheus.names()
    expected = [one for one in EXPRESSIONS if not OTHER_MACHINES.search(one)]
    assert len(expected) > 140
    missing = {name for one in expected for name in NAME.findall(one)} - stored
    assert missing == set()
    assert [one for one in expected if not prometheus.series(one)] == []


def test_no_alert_fires_and_every_rule_is_understood(prometheus: Prometheus) -> None:
    group, = prometheus.ask("rules")["groups"]
    assert len(group["rules"]) == RULES.read_text().count("- alert:")
    assert {(rule["health"], rule["state"]) for rule in group["rules"]} == {("ok", "inactive")}
