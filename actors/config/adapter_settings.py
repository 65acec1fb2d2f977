"""The settings of LoRA adapters, a section of the tree."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct

MAX_NAME = 256
"""Characters of an adapter's name."""
MAX_ADAPTERS = 4096
"""Adapters that an engine knows at once."""
MAX_RANK = 1024


class AdapterConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """LoRA adapters: which are served beside the model, and how many at once (docs/adapters.md)."""

    enable_lora: bool = False
    """Serve LoRA adapters beside the model: requests name one as their `model`."""
    lora_modules: tuple[str, ...] = ()
    """Adapters that are loaded at the start, as NAME=PATH, or in vLLM's form as a JSON object with
    `name` and `path`: a folder in PEFT's format, or a .gguf file."""
    lora_dir: str | None = None
    """Folder below which adapters may lie that are loaded over HTTP, symbolic links followed;
    default: none is loaded over HTTP."""
    max_loras: int = 8
    """Different adapters of the sequences that run at once; each has memory on the device."""
    max_lora_rank: int = 16
    """The highest rank of an adapter's modules."""
    max_cpu_loras: int | None = None
    """Adapters whose weights stay in the worker's memory, at least `max_loras`: of more, those that
    were used longest ago are read again when a request names them. Default: all."""


class LoraModule(NamedTuple):
    """An adapter as a setting or a request names it."""

    name: str
    path: str
    base: str = ""
    """Name of the model that it is for, as vLLM has it; "" = not said."""


def adapter_rules(settings: AdapterConfig) -> list[tuple[str, bool, str]]:
    """(section.field, whether its value is valid, what it must be)"""
    s, on = settings, settings.enable_lora
    fault = lora_modules_fault(s.lora_modules)
    defaults = AdapterConfig()
    return [
        ("adapters.lora_modules", not fault, fault),
        ("adapters.lora_dir", s.lora_dir is None or os.path.isdir(s.lora_dir),
         "must be a folder that is there"),
        ("adapters.max_loras", 1 <= s.max_loras <= 256, "must be between 1 and 256"),
        ("adapters.max_lora_rank", 1 <= s.max_lora_rank <= MAX_RANK,
         f"must be between 1 and {MAX_RANK}"),
        ("adapters.max_cpu_loras", s.max_cpu_loras is None
         or s.max_loras <= s.max_cpu_loras <= MAX_ADAPTERS,
         f"must be between --max-loras, which is {s.max_loras}, and {MAX_ADAPTERS}"),
        *((f"adapters.{name}", on or getattr(s, name) == getattr(defaults, name),
           "goes with --enable-lora")
          for name in ("lora_modules", "lora_dir", "max_loras", "max_lora_rank", "max_cpu_loras")),
    ]


def lora_modules_fault(texts: tuple[str, ...]) -> str:
    """What is wrong with `lora_modules`; empty: nothing."""
    try:
        parse_lora_modules(texts)
    except ValueError as error:
        return str(error)
    return ""


def parse_lora_modules(texts: tuple[str, ...]) -> tuple[LoraModule, ...]:
    """The adapters of `lora_modules`: NAME=PATH, PATH (its name is the path, as SGLang has it), or
    a JSON object of vLLM's or SGLang's, or a list of them. Raises `ValueError` with what it must
    be."""
    modules = tuple(module for text in texts for module in _modules(text))
    names = [module.name for module in modules]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"must be different names: {twice!r} is given twice")
    if len(modules) > MAX_ADAPTERS:
        raise ValueError(f"must be at most {MAX_ADAPTERS} adapters")
    return modules


def adapter_name_fault(name: str) -> str:
    """What is wrong with the name of an adapter; empty: nothing."""
    if not name or len(name) > MAX_NAME:
        return f"must be a name of 1 to {MAX_NAME} characters"
    if not name.isprintable() or name != name.strip():
        return "must be printable, without spaces around it"
    return ""


def _modules(text: str) -> list[LoraModule]:
    if text.startswith(("{", "[")):
        try:
            value = msgspec.json.decode(text)
        except (msgspec.DecodeError, RecursionError) as error:
            raise ValueError(f"must be NAME=PATH or a JSON object: {error}") from None
        return [_from_json(entry) for entry in (value if isinstance(value, list) else [value])]
    name, equals, path = text.partition("=")
    return [_checked(name, path if equals else name)]


_KEYS = {"name": "name", "lora_name": "name", "path": "path", "lora_path": "path",
         "base_model_name": "base"}
"""Keys of vLLM's and SGLang's objects."""


def _from_json(entry: Any) -> LoraModule:
    if not isinstance(entry, dict):
        raise ValueError("must be JSON objects with name and path")
    found = {"base": ""}
    for key, value in entry.items():
        if key == "pinned" and value is False or key in _KEYS and value is None:
            continue
        if key not in _KEYS:
            raise ValueError(f"must be JSON objects with name and path: {key!r} is not served")
        if not isinstance(value, str):
            raise ValueError(f"{key} must be a text")
        found[_KEYS[key]] = value
    for key in ("name", "path"):
        if key not in found:
            raise ValueError(f"must be JSON objects with name and path: {key} is missing")
    return _checked(**found)


def _checked(name: str, path: str, base: str = "") -> LoraModule:
    if fault := adapter_name_fault(name):
        raise ValueError(f"{fault}, got {name!r:.80}")
    if not path:
        raise ValueError(f"must be NAME=PATH: {name!r:.80} has no path")
    return LoraModule(name, path, base)
