"""A cluster of several machines as a file, for `actorium cluster up`.

    name = "mine"
    listen = "tcp://10.0.0.1:7400"      # where nodes join
    keys = "mine-keys"                  # folder, beside this file; made where it is missing
    replicas = 0                        # on this machine

    [nodes.a]
    replicas = 2
    address = "10.0.0.2"                # for the hint that is printed

    [flags]                             # those of `actorium serve`
    model = "Qwen/Qwen3-0.6B"
    port = 8000
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from actorium.actors.errors import BadConfig
from actorium.actors.runtime.security import curve_keys

RESERVED = {"nodes": "[nodes]", "cluster_listen": "listen", "cluster_keys": "keys",
            "replicas": "replicas", "name": "name"}
"""Flags that the file says otherwise."""


class NodeEntry(Struct, frozen=True, forbid_unknown_fields=True):
    """A machine."""

    replicas: int = 1
    address: str = ""


class ClusterFile(Struct, frozen=True, forbid_unknown_fields=True):
    """See the module."""

    listen: str
    nodes: dict[str, NodeEntry]
    name: str = "default"
    keys: str = "keys"
    replicas: int = 0
    flags: dict[str, Any] = {}


def read_cluster_file(path: Path) -> ClusterFile:
    """Raises `BadConfig` naming the file and the field."""
    try:
        found = msgspec.convert(tomllib.loads(path.read_text()), ClusterFile)
    except (OSError, UnicodeDecodeError) as error:
        raise BadConfig(f"{path}: cannot be read: {error}", "FILE") from None
    except tomllib.TOMLDecodeError as error:
        raise BadConfig(f"{path}: no TOML: {error}", "FILE") from None
    except msgspec.ValidationError as error:
        raise BadConfig(f"{path}: {error}", "FILE") from None
    if not found.nodes:
        raise BadConfig(f"{path}: nodes: at least one is needed; one machine alone is "
                        "`actorium serve --replicas N`", "nodes")
    for flag in found.flags:
        if (field := flag.replace("-", "_")) in RESERVED:
            raise BadConfig(f"{path}: flags.{flag}: is said by {RESERVED[field]} of the file",
                            "flags")
    return found


def serve_words(file: ClusterFile, keys: Path) -> list[str]:
    """The words of `actorium serve`. keys: the folder of keys."""
    nodes = ",".join(f"{name}={node.replicas}" for name, node in file.nodes.items())
    words = ["--name", file.name, "--nodes", nodes, "--replicas", str(file.replicas),
             "--cluster-listen", file.listen, "--cluster-keys", str(keys)]
    for flag, value in file.flags.items():
        name = f"--{flag.replace('_', '-')}"
        if isinstance(value, bool):
            words += [name, "true" if value else "false"]
        elif isinstance(value, list):
            words += [name, ",".join(map(str, value))]
        elif isinstance(value, dict):
            words += [name, msgspec.json.encode(value).decode()]
        else:
            words += [name, str(value)]
    return words


def make_keys(folder: Path, nodes: list[str]) -> list[Path]:
    """Makes the keys that are missing: the head's pair, and a file for each node, which is let in.
    Returns the new ones of nodes. Raises `BadConfig`."""
    if not (folder / curve_keys.SERVER_KEY).exists():
        curve_keys.make_server(folder)
    known = curve_keys.clients(folder)
    made = []
    for node in nodes:
        path = folder / f"{node}.key"
        if node not in known:
            curve_keys.make_client(folder, node, path)
            made.append(path)
    return made


def hint(file: ClusterFile, folder: Path) -> str:
    """What is to be done on the nodes."""
    lines = ["each node needs its key file and the model at the same path (or --model PATH):"]
    for name, node in file.nodes.items():
        at = f" ({node.address})" if node.address else ""
        lines.append(f"  {name}{at}: actorium cluster join {file.listen} --name {file.name} "
                     f"--key {folder / name}.key")
    return "\n".join(lines)
