"""The Kubernetes manifest: valid by its schema, and in agreement with flags, routes and drain."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from actorium.actors.config.tree import Config
from actorium.actors.gateway.http.routes import ROUTES, Access
from actorium.tools.cli.command_line import parse
from actorium.tools.cli.serve_command import ServeOptions

MANIFEST = Path(__file__).parents[2] / "tools/deploy/kubernetes.yaml"
DEPLOYMENT, SERVICE = yaml.safe_load_all(MANIFEST.read_text())
POD: dict[str, Any] = DEPLOYMENT["spec"]["template"]["spec"]
ENGINE: dict[str, Any] = POD["containers"][0]


@pytest.mark.parametrize("document", [DEPLOYMENT, SERVICE], ids=lambda one: one["kind"])
def test_the_schema_accepts_it_and_would_refuse_a_misspelt_field(document: dict) -> None:
    newest = kubernetes_validate.latest_version()
    kubernetes_validate.validate(document, newest, strict=True)
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate({**document, "spce": {}}, newest, strict=True)


def test_probes_ask_open_routes_at_a_port_that_the_arguments_open() -> None:
    words = ENGINE["args"]
    port = int(words[words.index("--port") + 1])
    ports = {one["name"]: one["containerPort"] for one in ENGINE["ports"]}
    known = {path for one in ROUTES if one.access is Access.OPEN for path in one.paths}
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        asked = ENGINE[probe]["httpGet"]
        assert asked["path"] in known and ports[asked["port"]] == port
    assert ports[SERVICE["spec"]["ports"][0]["targetPort"]] == port


def test_the_arguments_parse_and_leave_time_to_drain() -> None:
    words = ENGINE["args"]
    assert words[0] == "serve"
    parse("actorium serve", words[1:], ServeOptions)
    drain = float(words[words.index("--drain-timeout") + 1])
    sleep = ENGINE["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert POD["terminationGracePeriodSeconds"] > sleep + drain


def test_the_key_comes_from_a_secret_under_a_name_that_is_read() -> None:
    named = {one["name"]: one for one in ENGINE["env"]}
    assert "secretKeyRef" in named["ACTORIUM_API_KEY"]["valueFrom"]
    assert hasattr(Config().gateway, "api_key")
