"""The image, Compose's services and systemd's unit: in agreement with each other and with flags,
routes, timeouts and the Kubernetes manifests. `make install-check` builds and starts the image."""

from __future__ import annotations

import configparser
import json
import re
import shlex
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import yaml
from helpers_code_facts import ROOT

from actorium.actors.config.tree import Config, RuntimeConfig
from actorium.actors.gateway.http.routes import ROUTES, Access
from actorium.actors.runtime.process import EXIT_BAD_CONFIG
from actorium.tools.cli.command_line import parse
from actorium.tools.cli.serve_command import PORT, ServeOptions

DEPLOY, GRAFANA = ROOT / "tools/deploy", ROOT / "tools/grafana"
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
ENGINE, PROMETHEUS, SHOWN = (COMPOSE["services"][name]
                             for name in ("engine", "prometheus", "grafana"))
SCRAPES = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())
OPEN = {path for route in ROUTES if route.access is Access.OPEN for path in route.paths}


def dockerfile() -> list[tuple[str, str]]:
    """(instruction, its words) of the image."""
    lines = [line for line in (DEPLOY / "Dockerfile").read_text().splitlines()
             if not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [(name, words.strip()) for name, _, words in
            (line.partition(" ") for line in joined.splitlines() if line)]


def only(name: str) -> str:
    found, = [words for instruction, words in dockerfile() if instruction == name]
    return found


def served(words: list[str]) -> Config:
    """What `actorium serve` makes of these words."""
    assert words[0] == "serve"
    return parse("actorium serve", words[1:], ServeOptions).config


def mounts(service: dict[str, Any]) -> dict[str, str]:
    """Path in the container -> what is there."""
    return {target: source for source, target in
            (volume.split(":")[:2] for volume in service["volumes"])}


def seconds(text: str) -> float:
    return float(text.removesuffix("s"))


# --- the image -----------------------------------------------------------------------------------

def test_the_image_has_the_sources_that_it_names() -> None:
    copied = [word for name, words in dockerfile() if name == "COPY" and "--from" not in words
              for word in words.split()[:-1]]
    assert {"pyproject.toml", "actorium", "actors", "gpu", "kernels", "tools"} <= {*copied}
    assert [name for name in copied if not (ROOT / name).exists()] == []


def test_the_image_serves_all_who_reach_it_without_being_root() -> None:
    assert json.loads(only("ENTRYPOINT")) == ["actorium"]
    gateway = served(json.loads(only("CMD"))).gateway
    assert gateway.host == "0.0.0.0" and int(only("EXPOSE")) == PORT
    user, group = map(int, only("USER").split(":"))
    assert user > 0 and group > 0
    environment = dict(word.split("=", 1) for word in only("ENV").split())
    assert environment["HOME"] == only("VOLUME")


def test_its_health_is_asked_at_an_open_route() -> None:
    path, = re.findall(rf"http://127\.0\.0\.1:{PORT}(/\w+)", only("HEALTHCHECK"))
    assert path in OPEN
    start, = re.findall(r"--start-period=(\w+)", only("HEALTHCHECK"))
    assert seconds(start) >= RuntimeConfig().start_timeout


def test_pods_run_it_as_its_user() -> None:
    for name in ("kubernetes", "kubernetes-cluster"):
        for each in yaml.safe_load_all((DEPLOY / f"{name}.yaml").read_text()):
            if each["kind"] in ("Deployment", "StatefulSet"):
                context = each["spec"]["template"]["spec"]["securityContext"]
                user = f"{context['runAsUser']}:{context['runAsGroup']}"
                assert user == only("USER")


def test_kustomize_sets_images_that_are_named() -> None:
    given = yaml.safe_load((DEPLOY / "kustomization.yaml").read_text())
    assert set(given) == {"apiVersion", "kind", "resources", "images"}
    used = {image.rpartition(":")[0] for name in given["resources"] for image in
            re.findall(r"image: (\S+)", (DEPLOY / name).read_text())}
    assert {each["name"] for each in given["images"]} == used


# --- Compose -------------------------------------------------------------------------------------

def test_every_file_that_is_mounted_exists() -> None:
    for service in COMPOSE["services"].values():
        for source in mounts(service).values():
            assert (DEPLOY / source).exists() if "/" in source else source in COMPOSE["volumes"]
    build = ENGINE["build"]
    assert (DEPLOY / build["context"]).resolve() == ROOT
    assert (ROOT / build["dockerfile"]).is_file()
    arguments = {words.partition("=")[0] for name, words in dockerfile() if name == "ARG"}
    assert set(build["args"]) <= arguments


@pytest.mark.parametrize("given", ["", "Qwen/Qwen3-0.6B --max-num-seqs 64"])
def test_composes_engine_serves_what_is_asked(given: str) -> None:
    words = ENGINE["command"].replace("${ACTORIUM_ARGS:-}", given)
    config = served(shlex.split(words))
    assert config.gateway.host == "0.0.0.0"
    assert seconds(ENGINE["stop_grace_period"]) > config.runtime.drain_timeout
    assert only("VOLUME") in mounts(ENGINE)


def test_composes_ports_are_of_this_machine_alone_and_nothing_is_writable() -> None:
    for service in COMPOSE["services"].values():
        assert service["read_only"] and service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
        assert not service["image"].endswith(":latest") or "build" in service


def test_prometheus_scrapes_the_engine_and_reads_its_rules() -> None:
    scraped, = SCRAPES["scrape_configs"]
    assert scraped["static_configs"] == [{"targets": [f"engine:{PORT}"]}]
    assert mounts(PROMETHEUS)["/etc/prometheus"] == "./prometheus"
    assert all((DEPLOY / "prometheus" / name).is_file() for name in SCRAPES["rule_files"])


def test_alerts_ask_for_what_the_dashboard_shows() -> None:
    """Whose metrics are compared with what an engine exports in `test_probes_metrics.py`."""
    group, = yaml.safe_load((DEPLOY / "prometheus/rules.yml").read_text())["groups"]
    rules = {each["alert"]: each for each in group["rules"]}
    asked = {name for each in rules.values() for name in re.findall(r"actorium:\w+", each["expr"])}
    shown = {name for name in re.findall(r"actorium:\w+", (GRAFANA / "actorium.json").read_text())}
    assert asked and asked <= shown
    jobs = {job for each in rules.values() for job in re.findall(r'job="(\w+)"', each["expr"])}
    assert jobs == {each["job_name"] for each in SCRAPES["scrape_configs"]}
    document = re.search(r"```yaml\n(groups:.*?)```", (ROOT / "docs/operations.md").read_text(),
                         re.S)
    assert document is not None
    for each in yaml.safe_load(document[1])["groups"][0]["rules"]:
        assert rules[each["alert"]] == each


def test_grafana_finds_prometheus_and_the_dashboard() -> None:
    target = "/etc/grafana/provisioning"
    provisioning = (DEPLOY / mounts(SHOWN)[target]).resolve()
    source, = yaml.safe_load((provisioning / "datasources/prometheus.yaml").read_text())[
        "datasources"]
    variable = next(each for each in json.loads((GRAFANA / "actorium.json").read_text())[
        "templating"]["list"] if each["type"] == "datasource")
    assert source["type"] == variable["query"] and source["isDefault"]
    host, port = source["url"].removeprefix("http://").split(":")
    assert COMPOSE["services"][host] is PROMETHEUS
    assert PROMETHEUS["ports"] == [f"127.0.0.1:{port}:{port}"]
    assert source["jsonData"]["timeInterval"] == SCRAPES["global"]["scrape_interval"]
    provider, = yaml.safe_load((provisioning / "dashboards/actorium.yaml").read_text())["providers"]
    shown, = [path for path, file in mounts(SHOWN).items() if file.endswith("actorium.json")]
    assert str(PurePosixPath(shown).parent) == provider["options"]["path"]
    assert SHOWN["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"] == shown


# --- systemd -------------------------------------------------------------------------------------

def unit() -> configparser.SectionProxy:
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(DEPLOY / "actorium.service")
    return parser["Service"]


def test_the_unit_starts_an_engine_and_waits_long_enough(tmp_path: Path) -> None:
    service = unit()
    program, *words = shlex.split(service["ExecStart"])
    assert program.endswith("/bin/actorium")
    file = tmp_path / "actorium.toml"
    file.write_text("")
    assert words[1] == "--config" and words[2].startswith("/etc/actorium/")
    runtime = served([words[0], words[1], str(file)]).runtime
    assert float(service["TimeoutStartSec"]) > runtime.start_timeout
    assert float(service["TimeoutStopSec"]) > runtime.drain_timeout
    assert int(service["RestartPreventExitStatus"]) == EXIT_BAD_CONFIG


def test_the_unit_leaves_the_actors_to_the_launcher() -> None:
    """SIGTERM to all processes would end the streams that the launcher drains; and it alone speaks
    to systemd."""
    service = unit()
    assert service["KillMode"] == "mixed" and service["Type"] == "notify"
    assert service["NotifyAccess"] == "main" and float(service["WatchdogSec"]) >= 10


def test_the_units_folders_are_those_that_it_makes() -> None:
    service = unit()
    variables = dict(each.split("=", 1) for each in service["Environment"].split())
    for name, root, kind in (("HOME", "%S", "State"), ("XDG_CACHE_HOME", "%C", "Cache"),
                             ("ACTORIUM_RUN_DIR", "%t", "Runtime")):
        assert variables[name] == f"{root}/{service[f'{kind}Directory']}"
        assert service[f"{kind}DirectoryMode"] == "0700"
