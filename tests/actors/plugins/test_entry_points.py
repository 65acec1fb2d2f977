"""Plug-ins are found, chosen by package, and one that is broken harms nobody."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers_plugins import write_example, write_package

from actorium.actors.config.tree import Config, GatewayConfig, RuntimeConfig
from actorium.actors.config.validation import validate
from actorium.actors.errors import BadConfig
from actorium.actors.launcher.preflight import check_plugins, with_installed_plugins
from actorium.actors.plugins.entry_points import (
    GROUPS,
    LOGITS_PROCESSORS,
    TOOL_PARSERS,
    installed,
    narrowed,
    plugins_of,
)
from actorium.actors.plugins.logits_processors import load_processors
from actorium.actors.plugins.parser_plugins import load_call_formats
from actorium.gpu.plan.memory_plan import demand_of

BROKEN = {
    "raises": "raise RuntimeError('no\\nluck')", "exits": "raise SystemExit(3)",
    "imports": "import nobody_has_this", "wrong": "THING = 5"}
"""Name -> a module that is no plug-in."""


def write_broken(site: Path, group: str = LOGITS_PROCESSORS) -> None:
    for name, code in BROKEN.items():
        (site / f"plugged_{name}.py").write_text(code + "\n")
    write_package(site, "broken-ones", {group: {
        name: f"plugged_{name}:THING" for name in BROKEN}})


def with_plugins(plugins: str, **gateway: str) -> Config:
    return Config(runtime=RuntimeConfig(plugins=plugins), gateway=GatewayConfig(**gateway))


def test_without_packages_there_are_none(site: Path) -> None:
    assert installed() == () and narrowed("all") == narrowed("none") == "none"


def test_a_package_that_is_shadowed_does_not_count(site: Path,
                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    for version, folder in (("2.0", site / "a"), ("1.0", site / "b")):
        write_package(folder, "Some.Package", {TOOL_PARSERS: {f"of_{version}": "x:y"}}, version)
    monkeypatch.syspath_prepend(str(site / "b"))
    monkeypatch.syspath_prepend(str(site / "a"))
    assert [(one.package, one.name) for one in installed()] == [("some-package", "of_2.0")]


def test_packages_are_chosen_by_name(site: Path) -> None:
    write_example(site)
    write_package(site, "other", {TOOL_PARSERS: {"x": "x:y"}, "console_scripts": {"z": "z:z"}})
    assert {one.group for one in installed()} == set(GROUPS)
    found = {plugins: [one.name for one in plugins_of(plugins, TOOL_PARSERS)]
             for plugins in ("all", "none", "Other", "other, actorium_example")}
    both = ["example_lines", "example_marks", "x"]
    assert found == {"all": both, "none": [], "Other": ["x"], "other, actorium_example": both}
    assert narrowed("all") == "actorium-example,other"
    assert with_installed_plugins(Config()).runtime.plugins == "actorium-example,other"
    with pytest.raises(BadConfig, match="plugins: missing is not installed") as caught:
        narrowed("other,missing")
    assert caught.value.param == "runtime.plugins"


@pytest.mark.parametrize("plugins", ["", "a,,b", "a b", "-x", "../x"])
def test_values_that_name_no_package(plugins: str) -> None:
    with pytest.raises(BadConfig, match="plugins: must be all, none or names"):
        validate(with_plugins(plugins))


def test_broken_plugins_stop_nothing_and_say_why(site: Path,
                                                 caplog: pytest.LogCaptureFixture) -> None:
    write_broken(site)
    write_example(site)
    faults = {one.plugin.name: one.fault for one in load_processors("all")}
    assert faults == {
        "no_repeated_ngrams": "", "raises": "RuntimeError: no luck", "exits": "SystemExit: 3",
        "imports": "ModuleNotFoundError: No module named 'nobody_has_this'",
        "wrong": "must be callable, with a method check"}
    check_plugins(with_plugins("all"))
    check_plugins(with_plugins("actorium-example"))


def test_a_package_that_is_asked_for_must_work(site: Path) -> None:
    write_broken(site, "actorium.models")
    with pytest.raises(BadConfig, match="plugins: plug-in actorium.models .* of broken-ones 1.0 "
                                        "cannot be used: "):
        check_plugins(with_plugins("broken-ones"))


def test_a_parser_that_is_asked_for_must_work(site: Path) -> None:
    write_broken(site, TOOL_PARSERS)
    config = with_plugins("all", tool_call_parser="raises")
    validate(config)
    with pytest.raises(BadConfig, match="tool_call_parser: plug-in .* no luck") as caught:
        check_plugins(config)
    assert caught.value.param == "gateway.tool_call_parser"
    for other in (with_plugins("none", tool_call_parser="raises"),
                  with_plugins("all", reasoning_parser="raises")):
        with pytest.raises(BadConfig, match="_parser: must be one of"):
            validate(other)


def test_the_memory_plan_counts_what_processors_read(site: Path) -> None:
    write_example(site)
    assert demand_of(with_plugins("all")).history
    assert not demand_of(with_plugins("none")).history


def test_nobody_takes_a_name_that_is_taken(site: Path) -> None:
    (site / "plugged_row.py").write_text(
        "from actorium.actors.gateway.parsers.call_formats import FORMATS\n"
        "ROW = FORMATS['hermes']\n")
    for package in ("aa", "bb"):
        write_package(site, package, {TOOL_PARSERS: dict.fromkeys(
            ("hermes", "auto", "glm47", "mine"), "plugged_row:ROW")})
    faults = [(one.plugin.package, one.plugin.name, one.fault) for one in load_call_formats("all")]
    ours = "actorium has one of this name itself"
    assert faults == [
        *(("aa", name, ours) for name in ("auto", "glm47", "hermes")), ("aa", "mine", ""),
        *(("bb", name, ours) for name in ("auto", "glm47", "hermes")),
        ("bb", "mine", "aa has one of this name")]
