"""A cluster of several machines as a file, for `actorium cluster up`.

    name = "mine"
    listen = "tcp://10.0.0.1:7400"      # where nodes join
    keys = "mine-keys"                  # folder, beside this file; made where it is missing
    replicas = 0                        # on this machine

    [nodes.a]
    replicas = 2
    address = "10.0.0.2"                # for the hint that is printed

    [ray]                               # nodes that Ray places, one replica each
    replicas = 2
    most = 8                            # that `actorium cluster scale` may ask for

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

from actorium.actors.config.cluster_settings import MOST_REPLICAS, RAY_NODE, on_ray
from actorium.actors.config.sources import why_unsafe
from actorium.actors.errors import BadConfig
from actorium.actors.runtime.security import curve_keys

RAY_MOST = 8
"""Replicas on Ray that there is room for where the file does not say."""
RAY_LISTEN = "tcp://0.0.0.0:7400"
RESERVED = {"nodes": "[nodes]", "cluster_listen": "listen", "cluster_keys": "keys",
            "replicas": "replicas", "name": "name", "ray_address": "[ray]",
            "ray_replicas": "[ray]", "ray_cpus": "[ray]"}
"""Flags that the file says otherwise."""


class NodeEntry(Struct, frozen=True, forbid_unknown_fields=True):
    """A machine."""

    replicas: int = 1
    address: str = ""


class RayEntry(Struct, frozen=True, forbid_unknown_fields=True):
    """Nodes that Ray places."""

    address: str = "auto"
    """As `--ray-address`."""
    replicas: int = 1
    """To begin with."""
    most: int = 0
    """0 = `RAY_MOST`, or as many as there are to begin with."""
    cpus: float = 0.0
    """As `--ray-cpus`."""


class ClusterFile(Struct, frozen=True, forbid_unknown_fields=True):
    """See the module."""

    listen: str = ""
    nodes: dict[str, NodeEntry] = {}
    ray: RayEntry | None = None
    name: str = "default"
    keys: str = "keys"
    replicas: int = 0
    flags: dict[str, Any] = {}


def read_cluster_file(path: Path, ray: bool = False, ray_address: str = "") -> ClusterFile:
    """The file as if it said these about Ray, too. ray: Ray places nodes even if the file does not
    say so; ray_address: replaces the file's. Raises `BadConfig` naming the file and the field."""
    try:
        found = msgspec.convert(tomllib.loads(path.read_text()), ClusterFile)
    except (OSError, UnicodeDecodeError) as error:
        raise BadConfig(f"{path}: cannot be read: {error}", "FILE") from None
    except tomllib.TOMLDecodeError as error:
        raise BadConfig(f"{path}: no TOML: {error}", "FILE") from None
    except msgspec.ValidationError as error:
        raise BadConfig(f"{path}: {error}", "FILE") from None
    if why := why_unsafe(path, found.flags):
        raise BadConfig(f"{path}: flags: {why}", "FILE")
    if ray or ray_address or found.ray is not None:
        found = _with_ray(path, found, ray_address)
    if not found.nodes:
        raise BadConfig(f"{path}: nodes: at least one is needed, or --ray; one machine alone is "
                        "`actorium serve --replicas N`", "nodes")
    if not found.listen:
        raise BadConfig(f"{path}: listen: is missing: tcp://HOST:PORT where nodes join", "listen")
    for flag in found.flags:
        if (field := flag.replace("-", "_")) in RESERVED:
            raise BadConfig(f"{path}: flags.{flag}: is said by {RESERVED[field]} of the file",
                            "flags")
    return found


def _with_ray(path: Path, file: ClusterFile, address: str) -> ClusterFile:
    """With the nodes that Ray places."""
    replace = msgspec.structs.replace
    ray = file.ray or RayEntry()
    ray = replace(ray, address=address or ray.address,
                  most=ray.most or max(RAY_MOST, ray.replicas))
    if not 1 <= ray.replicas <= ray.most:
        raise BadConfig(f"{path}: ray.replicas: must be between 1 and ray.most ({ray.most}), got "
                        f"{ray.replicas}", "ray")
    if ray.most > MOST_REPLICAS:
        raise BadConfig(f"{path}: ray.most: must be at most {MOST_REPLICAS}, got {ray.most}", "ray")
    if own := [name for name in file.nodes if on_ray(name)]:
        raise BadConfig(f"{path}: nodes.{own[0]}: such names are those of the nodes that Ray "
                        "places", "nodes")
    placed = {f"{RAY_NODE}{i}": NodeEntry() for i in range(ray.most)}
    return replace(file, ray=ray, nodes=file.nodes | placed, listen=file.listen or RAY_LISTEN)


def serve_words(file: ClusterFile, keys: Path) -> list[str]:
    """The words of `actorium serve`. keys: the folder of keys."""
    nodes = ",".join(f"{name}={node.replicas}" for name, node in file.nodes.items())
    words = ["--name", file.name, "--nodes", nodes, "--replicas", str(file.replicas),
             "--cluster-listen", file.listen, "--cluster-keys", str(keys)]
    if file.ray is not None:
        words += ["--ray-address", file.ray.address, "--ray-replicas", str(file.ray.replicas),
                  "--ray-cpus", str(file.ray.cpus)]
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
    own = {name: node for name, node in file.nodes.items() if file.ray is None or not on_ray(name)}
    if not own:
        return "Ray places the nodes; their machines need the model at the same path"
    lines = ["each node needs its key file and the model at the same path (or --model PATH):"]
    for name, node in own.items():
        at = f" ({node.address})" if node.address else ""
        lines.append(f"  {name}{at}: actorium cluster join {file.listen} --name {file.name} "
                     f"--key {folder / name}.key")
    return "\n".join(lines)
