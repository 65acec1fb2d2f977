"""`actorium cluster up`, `keys` and `join`: clusters of several machines, as a file says.

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

import logging
import os
import sys
import tomllib
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from actorium.actors.config.cluster_settings import MOST_REPLICAS, RAY_NODE, on_ray
from actorium.actors.config.sources import why_unsafe
from actorium.actors.errors import BadConfig
from actorium.actors.runtime.security import curve_keys, endpoints
from actorium.tools.cli.command_line import parse

RAY_MOST = 8
"""Replicas on Ray that there is room for where the file does not say."""
RAY_LISTEN = "tcp://0.0.0.0:7400"
RESERVED = {"nodes": "[nodes]", "cluster_listen": "listen", "cluster_keys": "keys",
            "replicas": "replicas", "name": "name", "ray_address": "[ray]",
            "ray_replicas": "[ray]", "ray_cpus": "[ray]"}
"""Flags that the file says otherwise."""


class NodeEntry(Struct, frozen=True, forbid_unknown_fields=True):
    replicas: int = 1
    address: str = ""


class RayEntry(Struct, frozen=True, forbid_unknown_fields=True):
    address: str = "auto"
    """As `--ray-address`."""
    replicas: int = 1
    """Replicas to begin with."""
    most: int = 0
    """0 = `RAY_MOST`, or as many as there are to begin with."""
    cpus: float = 0.0
    """As `--ray-cpus`."""


class ClusterFile(Struct, frozen=True, forbid_unknown_fields=True):
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
    own = {name: node for name, node in file.nodes.items() if file.ray is None or not on_ray(name)}
    if not own:
        return "Ray places the nodes; their machines need the model at the same path"
    lines = ["each node needs its key file and the model at the same path (or --model PATH):"]
    for name, node in own.items():
        at = f" ({node.address})" if node.address else ""
        lines.append(f"  {name}{at}: actorium cluster join {file.listen} --name {file.name} "
                     f"--key {folder / name}.key")
    return "\n".join(lines)


JOIN = """Serve replicas of a cluster on this machine, as its head orders, until SIGTERM or Ctrl-C:
then what runs here goes on elsewhere. The head says how replicas are configured; flags here are the
name of the cluster, its key, --run-dir and --model."""
ALLOWED = {"name", "run_dir", "model"}


UP = """Serve with replicas on several machines, as a file says: this one is the head. The file says
everything; flags here are about Ray alone."""


class UpOptions(Struct, frozen=True, kw_only=True):
    """What may be said beside the file."""

    ray: bool = False
    """Have Ray place nodes, one replica each, as [ray] of the file says; where none runs, one is
    started."""
    ray_address: str = ""
    """Ray's head, HOST:PORT; auto (the default) = the Ray of this machine. Goes without --ray."""


class JoinOptions(Struct, frozen=True, kw_only=True):
    """How to join."""

    key: str = ""
    """The file of this node's key, which the head has made (`actorium cluster keys`)."""
    node: str = ""
    """This node's name in the cluster, which the key was made for; default: that of the file."""
    processors: int = 0
    """Processors that the replicas here share; 0 = all of the machine."""
    generation: int = 0
    """An agent takes the place of one with the same name and a lower generation, which then ends;
    one of the same is refused as long as the other is there."""
    give_up: float = 0.0
    """Seconds without a head after which the agent ends; 0 = never."""


def up(argv: list[str]) -> int:
    words = list(argv)
    name = words.pop(0) if words and not words[0].startswith("-") else ""
    options, _, written, *_ = parse("actorium cluster up FILE.toml", words, UpOptions, UP,
                                   model=False)
    if others := sorted(set(written) - set(UpOptions.__struct_fields__)):
        raise BadConfig(f"{written[others[0]]}: is for the file to say, in [flags]", others[0])
    if not name:
        raise BadConfig("FILE is missing: actorium cluster up FILE.toml", "FILE")
    path = Path(name)
    file = read_cluster_file(path, options.ray, options.ray_address)
    folder = path.absolute().parent / Path(file.keys).expanduser()
    make_keys(folder, list(file.nodes))
    print(hint(file, folder), file=sys.stderr)
    from actorium.tools.cli import serve_command

    return serve_command.run("serve", serve_words(file, folder))


def keys(argv: list[str]) -> int:
    if len(argv) < 2 or any(word.startswith("-") for word in argv):
        raise BadConfig("usage: actorium cluster keys FOLDER NODE ...", "FOLDER")
    for path in make_keys(Path(argv[0]).expanduser().absolute(), argv[1:]):
        print(path)
    return 0


def join(argv: list[str]) -> int:
    words = list(argv)
    head = words.pop(0) if words and not words[0].startswith("-") else ""
    parsed = parse("actorium cluster join tcp://HEAD:PORT", words, JoinOptions, JOIN, model=False)
    options, config, written = parsed.options, parsed.config, parsed.written
    own = set(JoinOptions.__struct_fields__)
    if others := sorted(set(written) - ALLOWED - own):
        raise BadConfig(f"{written[others[0]]}: is the head's to say", others[0])
    if not head:
        raise BadConfig("HEAD is missing: actorium cluster join tcp://HEAD:PORT --key FILE", "HEAD")
    try:
        at = endpoints.parse(head if "://" in head else f"tcp://{head}")
    except ValueError as error:
        raise BadConfig(f"HEAD: {error}", "HEAD") from None
    if not options.key:
        raise BadConfig("--key is missing: the file that the head has made for this node", "key")
    if min(options.processors, options.generation, options.give_up) < 0:
        raise BadConfig("--processors, --generation and --give-up must not be negative", "give_up")
    node = options.node or Path(options.key).stem
    try:
        curve_keys.check_name(node)
    except BadConfig as error:
        raise BadConfig(f"--node: {error}", "node") from None
    pair = curve_keys.read_pair(options.key)
    if not pair.server:
        raise BadConfig(f"key: {options.key} is the head's own: a node has one of its own", "key")
    from actorium.actors.cluster.nodes.node_agent import NodeAgent

    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="actorium: %(message)s")
    os.umask(0o077)
    return NodeAgent(at, pair, node, config.runtime.name, config.runtime.run_dir,
                     config.model.model, options.processors, options.generation,
                     options.give_up).run()
