"""The process that speaks to Ray: placement groups, and an actor in each (`ray_agent`).

    python -m actorium.actors.cluster.ray.ray_driver RUN_DIR PARENT_PID ADDRESS

It is a child of the actor "ray" (`ray_actor`), since Ray ends the processes of its users when it is
away for a while. Groups and actors are detached: they outlive this process, and the next one finds
them by their names. Ray serialises actors and what they are called with by its own cloudpickle: it
gets a class by its name, texts and numbers from us, and sends the same back.
"""

from __future__ import annotations

import hashlib
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

import ray
import zmq
from msgspec import Struct
from ray.util.placement_group import (
    get_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from actorium import __version__
from actorium.actors.cluster.ray.ray_actor import (
    DRIVER_ROLE,
    ENDED,
    RUNNING,
    STARTING,
    WAITING,
    AskGroup,
    DropGroup,
    GroupOrders,
    GroupRow,
    RayFault,
    RayReport,
)
from actorium.actors.cluster.ray.ray_agent import RayAgent
from actorium.actors.config import tree as configs
from actorium.actors.config.cluster_settings import RAY_ROLE
from actorium.actors.config.tree import Config
from actorium.actors.runtime.mailbox import Inbox, Outbox
from actorium.actors.runtime.process import die_with_parent
from actorium.actors.runtime.rundir import address as socket_address
from actorium.actors.runtime.security import curve_keys, endpoints, private_paths

PAUSE = 0.5
"""Seconds between two looks at Ray."""
MACHINES = 2.0
"""Seconds between two looks at who lives there."""
REPEAT = 4.0
"""Seconds after which a report is sent though nothing has changed."""
PATIENCE = 2.0
"""Seconds that Ray's head gets to take a connection."""
GIVE_UP = 300.0
"""Seconds without our head after which an agent ends."""
AUTO, LOCAL = "auto", "local"


class HeldGroup(Struct):
    """A placement group as Ray knows it."""

    node: str
    generation: int
    group: Any
    cpus: float
    gpus: int
    phase: str = WAITING
    at: str = ""
    why: str = ""
    actor: Any = None
    call: Any = None
    """What the actor is asked at the moment: to start, then to watch."""
    going: bool = False
    """It is being ended, by `call`."""


class RayDriver:
    """See the module."""

    def __init__(self, run_dir: Path, config: Config, ray_address: str) -> None:
        """ray_address: HOST:PORT, or how the configuration names it."""
        self._config, self._asked = config, ray_address
        self._name = config.runtime.name
        public = curve_keys.read_server(Path(str(config.cluster.cluster_keys))).public
        self._tag = hashlib.sha256(public.encode()).hexdigest()[:8]
        """Tells clusters of the same name apart that one Ray places."""
        self._prefix = f"actorium/{self._name}-{self._tag}/"
        self._context: zmq.Context[Any] = zmq.Context(io_threads=1)
        hwm = config.runtime.queue_messages
        self._inbox = Inbox(self._context, socket_address(run_dir, f"{DRIVER_ROLE}.inbox"),
                            GroupOrders, hwm=hwm)
        self._outbox = Outbox(self._context, socket_address(run_dir, f"{RAY_ROLE}.inbox"), hwm=hwm,
                              lossy=True)
        self._address = ""
        """Of Ray's head, HOST:PORT."""
        self._local = False
        self._held: dict[tuple[str, int], HeldGroup] = {}
        self._seen, self._over = 0, False
        self._machines: dict[str, str] = {}
        """Ray's name of a machine that lives -> its address."""
        self._gpus = 0.0
        self._machines_at = self._report_at = 0.0
        self._last: Any = None

    def run(self) -> int:
        """Runs until it is ordered to end, or Ray has died; returns an exit code."""
        try:
            why = self._connect()
            if not why:
                self._find()
            while not why and not self._over:
                self._turn()
            if self._over:
                ray.shutdown()
        except Exception as error:  # whatever Ray fails of: the next driver tries again
            why = f"{type(error).__name__}: {error}".partition("\n")[0]
        if why:
            self._outbox.send(RayFault(why[:400]))
        for box in (self._inbox, self._outbox):
            box.close()
        self._context.term()
        return int(bool(why))

    def _turn(self) -> None:
        self._inbox.socket.poll(int(PAUSE * 1000))
        if not self._local and (why := unreachable(self._address)):
            self._outbox.send(RayFault(why))
            return
        for message in self._inbox.receive(256):
            self._obey(message)
        self._look()
        self._report()

    # --- Ray ---

    def _connect(self) -> str:
        """Returns why that was not possible."""
        common: dict[str, Any] = {"namespace": f"actorium-{self._name}-{self._tag}",
                                  "log_to_driver": False, "logging_level": "warning"}
        if self._asked not in (AUTO, LOCAL) and (why := unreachable(self._asked)):
            return why
        try:
            if self._asked == LOCAL:
                raise ConnectionError
            ray.init(address=self._asked, **common)
        except (ConnectionError, RuntimeError, ValueError) as error:
            if self._asked not in (AUTO, LOCAL) or os.environ.get("RAY_ADDRESS"):
                return f"no Ray at {self._asked}: {error}".partition("\n")[0]
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # it is ours: it calls nobody
            ray.init(address=LOCAL, include_dashboard=False, **common)
            self._local = True
        self._address = ray.get_runtime_context().gcs_address
        return ""

    def _find(self) -> None:
        """The groups that an earlier driver has left."""
        for row in placement_group_table().values():
            name = row["name"]
            if name.startswith(self._prefix) and row["state"] != "REMOVED":
                node, generation = name.removeprefix(self._prefix).split("/")
                bundle = next(iter(row["bundles"].values()))
                self._held[node, int(generation)] = HeldGroup(
                    node, int(generation), get_placement_group(name), bundle.get("CPU", 0.0),
                    int(bundle.get("GPU", 0)))

    def _obey(self, orders: GroupOrders) -> None:
        for order in orders.orders:
            if isinstance(order, AskGroup):
                self._ask(order)
            else:
                self._drop(order)
        self._seen, self._over = orders.number, orders.end

    def _ask(self, order: AskGroup) -> None:
        bundle = {"CPU": order.cpus} | ({"GPU": float(order.gpus)} if order.gpus else {})
        if order.home:
            bundle[f"node:{order.home}"] = 0.001
        group = placement_group([bundle], strategy="STRICT_PACK", lifetime="detached",
                                name=self._named(order.node, order.generation))
        self._held[order.node, order.generation] = HeldGroup(
            order.node, order.generation, group, order.cpus, order.gpus)

    def _drop(self, order: DropGroup) -> None:
        held = self._held.get((order.node, order.generation))
        if held is None or held.going:
            return
        held.going = True
        held.call = None
        if held.actor is not None and held.phase != ENDED:
            held.call = held.actor.end.remote(self._config.runtime.drain_timeout)
        self._let_go(held)

    def _let_go(self, held: HeldGroup) -> None:
        """Give a group back once its agent has ended."""
        if held.call is not None and not ray.wait([held.call], timeout=0)[0]:
            return
        if held.actor is not None:
            ray.kill(held.actor)
        remove_placement_group(held.group)
        del self._held[held.node, held.generation]

    def _look(self) -> None:
        if time.monotonic() >= self._machines_at:
            self._look_at_machines()
        states = placement_group_table() if self._held else {}
        for held in [*self._held.values()]:
            if held.going:
                self._let_go(held)
            elif held.phase != ENDED:
                self._follow(held, states.get(held.group.id.hex()))

    def _look_at_machines(self) -> None:
        self._machines_at = time.monotonic() + MACHINES
        nodes = [node for node in ray.nodes() if node["Alive"]]
        self._machines = {node["NodeID"]: node["NodeManagerAddress"] for node in nodes}
        self._gpus = sum(node["Resources"].get("GPU", 0.0) for node in nodes)

    def _follow(self, held: HeldGroup, row: dict[str, Any] | None) -> None:
        """What has become of a group."""
        state = row["state"] if row is not None else "REMOVED"
        if state == "REMOVED":
            held.phase, held.why = ENDED, "Ray has removed its placement group"
        elif held.phase == WAITING and state == "CREATED" and row is not None:
            machine = next(iter(row["bundles_to_node_id"].values()))
            if machine not in self._machines:  # it has just come
                self._look_at_machines()
            held.at = self._machines.get(machine, "")
            held.phase = STARTING
            self._start(held)
        elif held.phase != WAITING and state != "CREATED":
            held.phase, held.why = ENDED, f"its machine {held.at} is gone"
        elif held.call is not None and ray.wait([held.call], timeout=0)[0]:
            self._answered(held)

    def _start(self, held: HeldGroup) -> None:
        held.actor = ray.remote(RayAgent).options(
            name=self._named(held.node, held.generation), lifetime="detached", get_if_exists=True,
            num_cpus=held.cpus, num_gpus=held.gpus, max_restarts=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                placement_group=held.group, placement_group_bundle_index=0),
        ).remote(held.node, self._name, self._tag)
        cluster = self._config.cluster
        key = private_paths.read_file(Path(str(cluster.cluster_keys)) / f"{held.node}.key")
        words = [self._head(), "--name", self._name, "--node", held.node, "--processors",
                 str(max(1, int(held.cpus))), "--generation", str(held.generation), "--give-up",
                 f"{GIVE_UP:g}"]
        held.call = held.actor.start.remote(__version__, words, key.decode())

    def _answered(self, held: HeldGroup) -> None:
        try:
            end = ray.get(held.call, timeout=PATIENCE)
        except Exception as error:  # whatever Ray, the machine or the agent failed of
            held.phase, held.why = ENDED, str(error).strip().rpartition("\n")[2][:400]
            return
        if held.phase == STARTING:
            held.phase, held.call = RUNNING, held.actor.watch.remote()
        else:
            held.phase, held.why = ENDED, str(end)

    def _head(self) -> str:
        """Where agents find our head: this machine, as Ray knows it, if it listens anywhere."""
        at = endpoints.parse(str(self._config.cluster.cluster_listen))
        if at.host not in ("*", "0.0.0.0", "[::]"):
            return str(at)
        host = ray.util.get_node_ip_address()
        return f"tcp://{f'[{host}]' if ':' in host else host}:{at.port}"

    def _named(self, node: str, generation: int) -> str:
        return f"{self._prefix}{node}/{generation}"

    # --- the actor ---

    def _report(self) -> None:
        groups = [GroupRow(held.node, held.generation, held.phase,  # type: ignore[arg-type]
                           held.at, held.why) for held in self._held.values()]
        report = RayReport(os.getpid(), self._seen, self._local_or_address(),
                           sorted(set(self._machines.values())), self._gpus, groups)
        now = time.monotonic()
        if report != self._last or now >= self._report_at:
            self._last, self._report_at = report, now + REPEAT
            self._outbox.send(report)

    def _local_or_address(self) -> str:
        return LOCAL if self._local else self._address


def unreachable(ray_address: str) -> str:
    """Why Ray's head cannot be reached; empty if it takes connections."""
    host, _, port = ray_address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), PATIENCE).close()
    except (OSError, ValueError) as error:
        return f"its head at {ray_address} does not answer: {error}"
    return ""


def main(argv: list[str]) -> int:
    """Entry of the process."""
    die_with_parent(int(argv[1]))
    run_dir = Path(argv[0])
    config = configs.load(private_paths.read_file(run_dir / "config.json"))
    return RayDriver(run_dir, config, argv[2]).run()


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(code)  # no thread of Ray's delays it
