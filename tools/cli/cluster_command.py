"""`actorium cluster`: replicas come, go and rest while the cluster serves, as its router is
asked."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable
from typing import Any

import msgspec
from msgspec import Struct

from actorium.actors.cluster.cluster_control import (
    AskCluster,
    AutoscaleCluster,
    ClusterAnswer,
    DrainReplica,
    ReplicaRow,
    ScaleCluster,
    UndrainReplica,
)
from actorium.actors.config import tree as configs
from actorium.actors.config.cluster_settings import MOST_REPLICAS, ROUTER_ROLE, clustered
from actorium.actors.config.tree import RuntimeConfig
from actorium.actors.errors import BadConfig, EngineUnavailable
from actorium.actors.runtime.security import private_paths
from actorium.tools.cli.command_line import parse
from actorium.tools.cli.status import ActorConnection, announced_wait, running_dir
from actorium.tools.output import aligned

ANSWER_SECONDS = 60.0
"""Seconds for an answer while the engine runs: a router that has died is back in one or two, on a
machine that has no processor to spare after many."""
AGAIN = 1.0
"""Seconds after which the question is asked again, for one that died with it; asking twice for the
same is no harm."""


class ClusterAsker(ActorConnection):
    def __init__(self, name: str, run_dir: str | None) -> None:
        """Raises `EngineUnavailable` if no such engine runs, `BadConfig` if it is no cluster."""
        self._runtime = RuntimeConfig(name=name, run_dir=run_dir)
        path = running_dir(self._runtime)
        if not clustered(configs.load(private_paths.read_file(path / "config.json")).cluster):
            raise BadConfig(f"name: {name!r} is an engine of one; start it with --replicas N "
                            "to make it a cluster", "name")
        super().__init__(path, ROUTER_ROLE, b"C")

    def ask(self, kind: type[msgspec.Struct], *args: Any) -> ClusterAnswer:
        """The answer to a message of `ToRouterFront`. Raises `EngineUnavailable` without one, and
        `BadConfig` with the reason where it was refused."""
        rid = uuid.uuid4().hex
        for _ in range(int(ANSWER_SECONDS / AGAIN)):
            running_dir(self._runtime)
            self.send(kind(rid, *args))
            for data in self.answers(AGAIN):
                answer = msgspec.msgpack.decode(data, type=ClusterAnswer)
                if answer.rid != rid:
                    continue
                if answer.error:
                    raise BadConfig(answer.error, "replicas")
                return answer
        raise EngineUnavailable("the cluster's router does not answer", "name")

    def __enter__(self) -> ClusterAsker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


LOOK_SECONDS = 0.2
OPERANDS = {"scale": ("N|MIN:MAX|auto",), "drain": ("REPLICA",), "undrain": ("REPLICA",)}
"""Words of a command after the cluster's name."""
AUTO = "auto"
"""In place of a number of replicas: as many as the load needs."""
ABOUT = {
    "status": "NAME: the replicas of a running cluster, and what each of them does",
    "scale": "NAME N: have so many replicas; no stream is lost, whichever goes. NAME MIN:MAX: as "
             "many as the load asks for; NAME auto: again within the bounds that there were",
    "drain": "NAME REPLICA: no more requests for a replica; those that run there go on elsewhere",
    "undrain": "NAME REPLICA: it gets requests again",
}
MACHINES = {
    "up": "FILE.toml [--ray]: serve with replicas on several machines; this one is the head",
    "join": "tcp://HEAD:PORT --key FILE: serve replicas of a cluster on this machine",
    "keys": "FOLDER NODE ...: make the keys with which head and nodes know each other",
}
COLUMNS = ("replica", "node", "phase", "sequences", "cached pages", "requests", "by prefix",
           "by load", "blind", "migrated in", "migrated out", "prompt tokens/s")


class ClusterOptions(Struct, frozen=True, kw_only=True):
    """Of the four commands."""

    json: bool = False
    """An object instead of a table."""
    drain_timeout: float = 0.0
    """Seconds that requests at a replica that drains or leaves get to end there; what still runs
    then goes on elsewhere. 0 = all of it goes at once."""
    wait: bool = True
    """Come back when it is done; off = when it is under way."""
    patience: float = 600.0
    """Seconds to wait."""


def run(_command: str, argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print("usage: actorium cluster COMMAND [FLAGS]\n")
        print("\n".join(f"  {name:<8} {about}" for name, about in (ABOUT | MACHINES).items()))
        return 0
    if argv[0] in MACHINES:
        from actorium.tools.cli import cluster_nodes

        command: Callable[[list[str]], int] = getattr(cluster_nodes, argv[0])
        return command(argv[1:])
    if argv[0] not in ABOUT:
        raise BadConfig(f"{argv[0]}: no such command of `actorium cluster` "
                        f"({', '.join(ABOUT | MACHINES)})", argv[0])
    return _ask(argv[0], argv[1:])


def _ask(command: str, argv: list[str]) -> int:
    words = ["NAME", *OPERANDS.get(command, ())]
    loose = [argv.pop(0) for _ in words if argv and not argv[0].startswith("-")]
    options, config, *_ = parse(f"actorium cluster {command} {' '.join(words)}", argv,
                                ClusterOptions, ABOUT[command], model=False)
    if len(loose) < len(words):
        raise BadConfig(f"{words[len(loose)]} is missing: actorium cluster {command} "
                        f"{' '.join(words)}", words[len(loose)])
    with ClusterAsker(loose[0], config.runtime.run_dir) as asker:
        answer = _order(asker, command, loose[1:], options)
        if command in ("scale", "drain") and options.wait and not _by_load(loose[1]):
            answer = _await(asker, options, command, int(loose[1]))
    if options.json:
        print(json.dumps(as_json(answer)))
    else:
        print(table(answer))
    return 0


def _order(asker: ClusterAsker, command: str, words: list[str], options: ClusterOptions
           ) -> ClusterAnswer:
    if command == "status":
        return asker.ask(AskCluster)
    if command == "scale" and _by_load(words[0]):
        if words[0] == AUTO:
            return asker.ask(AutoscaleCluster)
        least, most = (_number(word, "MIN:MAX") for word in words[0].split(":", 1))
        if not 1 <= least <= most <= MOST_REPLICAS:
            raise BadConfig(f"MIN:MAX: must be from 1 to {MOST_REPLICAS}, MIN not above MAX, got "
                            f"{words[0]}", "MIN:MAX")
        return asker.ask(AutoscaleCluster, least, most)
    count = _number(words[0], "N" if command == "scale" else "REPLICA")
    if command == "scale":
        if count < 1:
            raise BadConfig("N: a cluster has at least one replica; `actorium stop NAME` ends it",
                            "N")
        return asker.ask(ScaleCluster, count, options.drain_timeout)
    if command == "drain":
        return asker.ask(DrainReplica, count, options.drain_timeout)
    return asker.ask(UndrainReplica, count)


def _by_load(word: str) -> bool:
    """Whether `cluster scale` leaves the number to the policy."""
    return word == AUTO or ":" in word


def _number(word: str, name: str) -> int:
    if not (word.isascii() and word.isdecimal()):
        raise BadConfig(f"{name}: must be a whole number, got {word!r}", name)
    return int(word)


def is_done(command: str, operand: int, answer: ClusterAnswer) -> bool:
    """Whether what was asked for is so. Raises `EngineUnavailable` if it never will be by itself.
    """
    if command == "drain":
        phase = next((row.phase for row in answer.rows if row.replica == operand), "drained")
        if phase not in ("draining", "drained", "leaving"):
            raise EngineUnavailable(f"replica {operand} is {phase}: somebody has undrained it")
        return phase == "drained"
    if answer.target != operand:
        raise EngineUnavailable(f"{answer.target} replicas are wanted by now, not {operand}: "
                                "somebody else has scaled the cluster")
    if any(row.phase == "left out" for row in answer.rows):
        raise EngineUnavailable("; ".join(_reasons(answer)))
    return len(answer.rows) == operand and all(
        row.phase in ("ready", "drained") for row in answer.rows)


def _await(asker: ClusterAsker, options: ClusterOptions, command: str, operand: int
           ) -> ClusterAnswer:
    until = time.monotonic() + options.patience
    with announced_wait("the replicas to be as ordered", options.patience):
        while True:
            answer = asker.ask(AskCluster)
            if is_done(command, operand, answer):
                return answer
            if time.monotonic() > until:
                raise EngineUnavailable(f"patience: not done after {options.patience:g} s; it goes "
                                        "on")
            time.sleep(LOOK_SECONDS)


def as_json(answer: ClusterAnswer) -> dict[str, object]:
    return {"target": answer.target, "waiting": answer.waiting, "policy": answer.policy,
            "placement": answer.placement,
            "replicas": [msgspec.to_builtins(row) for row in answer.rows]}


def table(answer: ClusterAnswer) -> str:
    text = aligned([list(COLUMNS), *map(_cells, answer.rows)])
    text.append(f"{answer.target} replicas wanted, {answer.waiting} requests wait for one")
    return "\n".join([*text, *filter(None, (*_reasons(answer), answer.policy,
                                            answer.placement))])


def _reasons(answer: ClusterAnswer) -> list[str]:
    return [f"replica {row.replica} is {row.phase}: {row.why}" for row in answer.rows if row.why]


def _cells(row: ReplicaRow) -> list[str]:
    return [str(row.replica), row.node or "head", row.phase, *map(str, (
        row.sequences, row.cached_pages, row.requests, row.by_prefix, row.by_load, row.blind,
        row.migrated_in, row.migrated_out, row.prompt_rate))]
