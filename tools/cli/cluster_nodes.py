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


class JoinOptions(Struct, frozen=True, kw_only=True):
    """How to join."""

    key: str = ""
    """The file of this node's key, which the head has made (`actorium cluster keys`)."""
    node: str = ""
    """This node's name in the cluster; default: that of the key file."""


def up(argv: list[str]) -> int:
    """`actorium cluster up FILE`: the head."""
    if len(argv) != 1 or argv[0].startswith("-"):
        raise BadConfig("usage: actorium cluster up FILE.toml", "FILE")
    path = Path(argv[0])
    file = read_cluster_file(path)
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
    own = {"key", "node"}
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
    pair = curve_keys.read_pair(options.key)
    if not pair.server:
        raise BadConfig(f"key: {options.key} is the head's own: a node has one of its own", "key")
    from actorium.actors.cluster.node_agent import NodeAgent

    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="actorium: %(message)s")
    os.umask(0o077)
    return NodeAgent(at, pair, options.node or Path(options.key).stem, config.runtime.name,
                     config.runtime.run_dir, config.model.model).run()
