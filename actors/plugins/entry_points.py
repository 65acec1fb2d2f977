"""Plug-ins: what other installed packages add to an engine, by entry points.

The groups, and what the objects of each must be, are in docs/plugins.md. Finding a plug-in reads
its package's metadata alone; its code is imported when it is loaded. `--plugins` says which
packages count.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from actorium.actors.errors import BadConfig

LOG = logging.getLogger("actorium.plugins")
MODELS, TOOL_PARSERS = "actorium.models", "actorium.tool_parsers"
REASONING_PARSERS, LOGITS_PROCESSORS = "actorium.reasoning_parsers", "actorium.logits_processors"
GROUPS = (MODELS, TOOL_PARSERS, REASONING_PARSERS, LOGITS_PROCESSORS)
ALL, NONE = "all", "none"
"""Values of `--plugins`, beside names of packages."""


class Plugin(NamedTuple):
    """An entry point of one of the `GROUPS`."""

    package: str
    """The name of its distribution, normalised as in PyPI's addresses."""
    version: str
    group: str
    name: str
    target: str
    """MODULE:OBJECT"""

    @property
    def title(self) -> str:
        """Returns its name and where it comes from, for messages."""
        return f"{self.group} {self.name} of {self.package} {self.version}"


class LoadedPlugin(NamedTuple):
    """What became of a plug-in."""

    plugin: Plugin
    value: Any
    """Its object; None with a fault."""
    fault: str = ""
    """Why it is not used, in one line; empty if it is."""


def normalised(package: str) -> str:
    """Returns a package's name in the form in which names are compared (PEP 503)."""
    return re.sub(r"[-_.]+", "-", package).lower()


def chosen_packages(plugins: str) -> tuple[str, ...] | None:
    """Returns the packages that a value of `--plugins` names; None = all that are installed."""
    if plugins == ALL:
        return None
    names = (normalised(name.strip()) for name in plugins.split(","))
    return () if plugins == NONE else tuple(dict.fromkeys(names))


@cache
def installed() -> tuple[Plugin, ...]:
    """Returns the plug-ins of all packages on `sys.path`, sorted. Of a package that is there twice
    the first one counts, as for imports."""
    # importlib.metadata takes 45 ms, on the way to the first token: these files 2.
    files = (file for folder in sys.path for file in Path(folder).glob("*-info/entry_points.txt"))
    if not any(b"[actorium." in file.read_bytes() for file in files):
        return ()
    from importlib.metadata import entry_points

    return tuple(sorted(
        Plugin(normalised(point.dist.name), point.dist.version, group, point.name, point.value)
        for group in GROUPS for point in entry_points(group=group) if point.dist is not None))


def plugins_of(plugins: str, group: str) -> list[Plugin]:
    """Returns the plug-ins of a group that a value of `--plugins` lets in."""
    if plugins == NONE:
        return []
    packages = chosen_packages(plugins)
    return [one for one in installed()
            if one.group == group and (packages is None or one.package in packages)]


def has_plugin(plugins: str, group: str, name: str) -> bool:
    """Returns whether there is a plug-in of this name; nothing is imported."""
    return any(one.name == name for one in plugins_of(plugins, group))


def narrowed(plugins: str) -> str:
    """Returns the value of `--plugins` that names the packages with plug-ins that are installed
    now: actors that start later then use no others, and need not search where there are none.

    Raises `BadConfig` naming a package that brings no plug-in.
    """
    wanted = chosen_packages(plugins)
    if wanted == ():
        return NONE
    present = {one.package for one in installed()}
    if missing := [name for name in wanted or () if name not in present]:
        raise BadConfig(f"plugins: {missing[0]} is not installed, or brings no plug-in "
                        "(`actorium plugins` lists those that do)", "runtime.plugins")
    return ",".join(sorted(present) if wanted is None else wanted) or NONE


def load_plugin(plugin: Plugin, fault_of: Callable[[Any], str]) -> LoadedPlugin:
    """Imports a plug-in. fault_of: says what is wrong with its object, or nothing.

    Whatever its code raises is its fault and nobody else's, an attempt to exit among it."""
    from importlib.metadata import EntryPoint

    try:
        value = EntryPoint(plugin.name, plugin.target, plugin.group).load()
        fault = fault_of(value)
    except (Exception, SystemExit) as error:
        text = " ".join(str(error).split())
        return LoadedPlugin(plugin, None, f"{type(error).__name__}: {text}" if text else
                            type(error).__name__)
    return LoadedPlugin(plugin, None if fault else value, fault)


def load_group(plugins: str, group: str, fault_of: Callable[[Any], str],
               taken: Callable[[str], bool] = lambda _: False) -> list[LoadedPlugin]:
    """Imports the plug-ins of a group. taken: whether the engine itself has one of a name, which a
    plug-in never replaces."""
    loaded: list[LoadedPlugin] = []
    names: dict[str, str] = {}
    for one in plugins_of(plugins, group):
        if taken(one.name):
            loaded.append(LoadedPlugin(one, None, "actorium has one of this name itself"))
        elif one.name in names:
            loaded.append(LoadedPlugin(one, None, f"{names[one.name]} has one of this name"))
        else:
            names[one.name] = one.package
            loaded.append(load_plugin(one, fault_of))
    return loaded


def usable(loaded: list[LoadedPlugin]) -> dict[str, Any]:
    """Returns the objects by name; a warning names each plug-in that has a fault."""
    for one in loaded:
        if one.fault:
            LOG.warning("plug-in %s is not used: %s", one.plugin.title, one.fault)
    return {one.plugin.name: one.value for one in loaded if not one.fault}


def refuse_faults(loaded: list[LoadedPlugin], packages: tuple[str, ...], name: str = "",
                  param: str = "runtime.plugins") -> None:
    """Raises `BadConfig` where a plug-in with a fault was asked for: by its package, or, under the
    flag `param`, by its name."""
    for one in loaded:
        if one.fault and (one.plugin.package in packages or one.plugin.name == name):
            field = param.rpartition(".")[2]
            raise BadConfig(f"{field}: plug-in {one.plugin.title} cannot be used: {one.fault}",
                            param)
