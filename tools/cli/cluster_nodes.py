"""`actorium cluster up`, `keys` and `join`: clusters of several machines."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

from msgspec import Struct

from actorium.actors.errors import BadConfig
from actorium.actors.runtime.security import curve_keys, endpoints
from actorium.tools.cli.cluster_file import hint, make_keys, read_cluster_file, serve_words
from actorium.tools.cli.command_line import parse

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
    """`actorium cluster up FILE`: the head."""
    words = list(argv)
    name = words.pop(0) if words and not words[0].startswith("-") else ""
    options, _, written, _ = parse("actorium cluster up FILE.toml", words, UpOptions, UP,
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
    """`actorium cluster keys FOLDER NODE ...`"""
    if len(argv) < 2 or any(word.startswith("-") for word in argv):
        raise BadConfig("usage: actorium cluster keys FOLDER NODE ...", "FOLDER")
    for path in make_keys(Path(argv[0]).expanduser().absolute(), argv[1:]):
        print(path)
    return 0


def join(argv: list[str]) -> int:
    """`actorium cluster join HEAD --key FILE`: a node."""
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
