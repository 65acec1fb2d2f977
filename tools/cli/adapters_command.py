"""`actorium adapters`: the LoRA adapters of a running engine."""

from __future__ import annotations

import json
from typing import Any

from msgspec import Struct

from actorium.actors.client.client import Client
from actorium.actors.config.adapter_settings import parse_lora_modules
from actorium.actors.errors import BadConfig
from actorium.tools.cli.command_line import parse
from actorium.tools.cli.ps_command import name_first
from actorium.tools.cli.status import running_dir

ABOUT = """The LoRA adapters that requests to a running engine may name; --load and --unload change
them. docs/adapters.md"""


class AdaptersOptions(Struct, frozen=True, kw_only=True):
    """What to change."""

    load: str = ""
    """NAME=PATH: load this adapter."""
    replace: bool = False
    """With --load: an adapter of that name gives way."""
    unload: str = ""
    """The name of an adapter that requests may name no more; those that run end with it."""
    json: bool = False
    """A list of objects instead of a table."""


def run(_command: str, argv: list[str]) -> int:
    """Raises `EngineUnavailable`, `InvalidRequest`, `BadModel`."""
    parsed = parse("actorium adapters [NAME]", name_first(argv), AdaptersOptions, ABOUT,
                   model=False)
    options, runtime = parsed.options, parsed.config.runtime
    if options.replace and not options.load:
        raise BadConfig("--replace: goes with --load", "replace")
    running_dir(runtime)
    with Client(runtime.name, run_dir=runtime.run_dir) as client:
        if options.load:
            name, path = _named(options.load)
            client.load_adapter(name, path, options.replace)
        if options.unload:
            client.unload_adapter(options.unload)
        adapters = client.adapters()
    if options.json:
        print(json.dumps(adapters))
    else:
        print("\n".join(_table(adapters)) if adapters else "no adapters")
    return 0


def _named(text: str) -> tuple[str, str]:
    try:
        (module,) = parse_lora_modules((text,))
    except ValueError as error:
        raise BadConfig(f"--load: {error}", "load") from None
    return module.name, module.path


def _table(adapters: list[dict[str, Any]]) -> list[str]:
    width = max(len("NAME"), *(len(each["name"]) for each in adapters))
    return [f"{'NAME':<{width}}  RANK  RUNNING  PATH", *(
        f"{each['name']:<{width}}  {each['rank']:>4}  {each.get('running', '-'):>7}  {each['path']}"
        for each in adapters)]
