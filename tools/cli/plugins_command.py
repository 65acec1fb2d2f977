"""`actorium plugins`: the plug-ins that are installed, and whether each can be used."""

from __future__ import annotations

import json
import sys

from msgspec import Struct

from actorium.actors.plugins.entry_points import (
    GROUPS,
    LOGITS_PROCESSORS,
    MODELS,
    REASONING_PARSERS,
    TOOL_PARSERS,
    LoadedPlugin,
    narrowed,
)
from actorium.actors.plugins.logits_processors import load_processors
from actorium.actors.plugins.parser_plugins import load_call_formats, load_reasoning_formats
from actorium.gpu.families.architectures import load_plugin_families
from actorium.tools.cli.command_line import parse

LOADERS = {TOOL_PARSERS: load_call_formats, REASONING_PARSERS: load_reasoning_formats,
           LOGITS_PROCESSORS: load_processors, MODELS: load_plugin_families}
ABOUT = """List the plug-ins of the packages that --plugins lets in: what each brings, and why one
cannot be used. Their code is imported for it. The exit code is 1 where one has a fault."""


class PluginsOptions(Struct, frozen=True, kw_only=True):
    """How to say it."""

    json: bool = False
    """Print an object instead of lines."""


def run(command: str, argv: list[str]) -> int:
    parsed = parse("actorium plugins", argv, PluginsOptions, ABOUT)
    plugins = parsed.config.runtime.plugins
    narrowed(plugins)
    loaded: list[LoadedPlugin] = []
    heavy = ""
    for group, load in LOADERS.items():
        loaded += load(plugins)
        if not heavy and "torch" in sys.modules:
            heavy = group
    loaded.sort(key=lambda one: (one.plugin.package, GROUPS.index(one.plugin.group)))
    if parsed.options.json:
        print(json.dumps({"plugins": [one.plugin._asdict() | {"fault": one.fault}
                                      for one in loaded], "torch_imported_by": heavy or None}))
    else:
        print("\n".join(_lines(loaded, heavy)))
    return 1 if any(one.fault for one in loaded) else 0


def _lines(loaded: list[LoadedPlugin], heavy: str) -> list[str]:
    if not loaded:
        return ["no plug-ins are installed (docs/plugins.md)"]
    lines, package = [], ""
    for one in loaded:
        if one.plugin.package != package:
            package = one.plugin.package
            lines.append(f"{package} {one.plugin.version}")
        group = one.plugin.group.removeprefix("actorium.")
        state = f"cannot be used: {one.fault}" if one.fault else "ok"
        lines.append(f"  {group:<20}{one.plugin.name:<24}{state}")
    if heavy:
        lines.append(f"a plug-in of {heavy} imports torch when it is loaded, and so do all "
                     "processes that load it: import torch in the function that uses it")
    return lines
