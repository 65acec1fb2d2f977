"""The actor that has Ray place a cluster's nodes, by placement groups: role "ray".

Each such node is one replica and one placement group. The router says which nodes have replicas;
the driver (`ray_driver`) says which groups there are. What is missing is asked for, what is not
wanted any more is given back, and what ended is given back and asked for again. Ray is needed for
nothing else: when it is away, what runs goes on, and this says so. Each report of the driver is the
whole state, so that a new actor or driver has nothing to remember.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from actorium.actors.cluster.cluster_control import PlacementReport, ReplicaSet, SetRequest
from actorium.actors.config.cluster_settings import MOST_REPLICAS, RAY_ROLE, ROUTER_ROLE, on_ray
from actorium.actors.core import Context, Core, CoreObserver, Health, Send
from actorium.actors.launcher.children import start
from actorium.actors.messages import Count, Epoch, Message, Seconds, Short, StepNo
from actorium.actors.runtime.process import describe_exit, python

DRIVER_ROLE = "ray-driver"
"""Whose inbox orders go to; it is no actor, but a child of one."""
WAITING, STARTING, RUNNING, ENDED = "waiting", "starting", "running", "ended"


class AskGroup(Message, frozen=True):
    """Ask Ray for a placement group, and start a node's agent there."""

    node: Short
    """The agent's name in our cluster; one group each."""
    generation: StepNo
    """Higher than in any group before that this node had."""
    cpus: Seconds
    gpus: Count
    home: Short
    """Address of the machine where it is to run; empty = wherever there is room."""


class DropGroup(Message, frozen=True):
    """End the agent there and give the group back."""

    node: Short
    generation: StepNo


class GroupOrders(Message, frozen=True):
    """actor -> driver."""

    number: StepNo
    orders: Annotated[list[AskGroup | DropGroup], Meta(max_length=4 * MOST_REPLICAS)]
    end: bool = False
    """The driver is to end, and with it Ray, where that was started for us."""


class GroupRow(Struct, frozen=True, array_like=True, gc=False):
    """A placement group."""

    node: Short
    generation: StepNo
    phase: Literal["waiting", "starting", "running", "ended"]
    """Ray has no room yet; the agent is being started; it runs; group, machine or agent ended."""
    at: Short = ""
    """Address of its machine; empty while it waits."""
    why: Short = ""
    """It ended."""


class RayReport(Message, frozen=True):
    """driver -> actor: how things are at Ray."""

    driver: Epoch
    """Process id of the driver: another one has not seen the orders of the one before."""
    seen: StepNo
    """The last orders that are carried out."""
    address: Short
    """Of Ray's head, HOST:PORT; local = Ray was started for us, on this machine."""
    machines: list[Short]
    """Addresses of those that live."""
    gpus: Seconds
    """Of all of them together."""
    groups: list[GroupRow]


class RayFault(Message, frozen=True):
    """driver -> actor: Ray cannot be reached, or not used."""

    why: Short


SILENT = 10.0
"""Seconds without a report after which Ray counts as away."""
LOOK = 2.0
"""Seconds between two looks at who is silent."""
HOME = 15.0
"""Seconds for which a group waits for the machine where its agent ran before: there the agent may
still run, with its model loaded."""
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0
"""Seconds before a group that ended is asked for again: doubled each time."""
STEADY = 60.0
"""Seconds that an agent must run before pauses start from the first one again."""
AGAIN = 10.0
"""Seconds after which the report to the router is repeated, in case a new one has started."""
LEAVING = 15.0
"""Seconds that groups get to be given back when the cluster ends."""
DRIVER = "actorium.actors.cluster.ray.ray_driver"


class WantedGroup(Struct):
    """A node that is to have a placement group."""

    node: str
    generation: int = 0
    """Of the group that there is or was; 0 = none so far."""
    home: str = ""
    """Where its agent ran last."""
    asked_at: float = 0.0
    at_home: bool = False
    """Asked for at `home` alone."""
    ask_at: float = 0.0
    """Not before this is it asked for."""
    pauses: int = 0
    running_since: float | None = None


class RayCore(Core):
    """See the module. Times are CLOCK_MONOTONIC seconds."""

    inbox: Any = ReplicaSet | RayReport | RayFault

    def __init__(self, cpus: float, gpus: int, auto: bool, born: int) -> None:
        """cpus, gpus: of a replica; auto: GPUs only where Ray has any at all; born: seconds since
        1970, from which generations are counted."""
        self._cpus, self._gpus, self._auto = cpus, gpus, auto
        self._generation = born
        self.wanted: dict[str, WantedGroup] | None = None
        """By node; None = the router has not said yet."""
        self._set_number = 0
        """Of what it said."""
        self.report: RayReport | None = None
        """The last one of a driver that lives."""
        self.fault = ""
        self.address = ""
        """Where Ray was: the next driver goes there, not to whichever it finds."""
        self._last_report_at = 0.0
        self._sent = 0
        self._driver = 0
        """Whose report the last orders followed."""
        self.start_driver = True
        """The shell is to start the driver, and takes this back."""
        self._start_at: float | None = None
        self._starts = 0
        self._out: list[Send] = [Send(ROUTER_ROLE, SetRequest(RAY_ROLE))]
        self._reported_text, self._say_at = "", 0.0
        self._draining_since: float | None = None
        self._end_sent = self._ended = False
        """The driver, when all was given back."""
        self._now = self._look_at = 0.0
        self._steps = 0

    # --- what comes in ---

    def on_message(self, message: Any, now: float) -> None:
        self._steps += 1
        if isinstance(message, ReplicaSet):
            if message.number < self._set_number:
                return  # of an earlier router
            self._set_number = message.number
            names = [state.node for state in message.replicas if on_ray(state.node)]
            before = self.wanted or {}
            self.wanted = {name: before.get(name) or WantedGroup(name) for name in names}
        elif isinstance(message, RayFault):
            self.fault = message.why
        else:
            self.report, self._last_report_at, self.fault = message, now, ""
            self.address = message.address
            self._starts = 0

    def driver_ended(self, how: str, now: float) -> None:
        """Its process has ended: another one is started, after pauses that grow while Ray is away.
        """
        self.report = None
        if self._draining_since is not None:
            self._ended = True
            return
        self.fault = self.fault or f"its driver {how}"
        self._start_at = now + min(LONGEST_PAUSE / 2, FIRST_PAUSE * 2.0 ** self._starts)
        self._starts = min(self._starts + 1, 16)

    # --- what is done ---

    def on_wake(self, now: float) -> Sequence[Send]:
        self._now, self._look_at = now, now + LOOK
        if self._start_at is not None and now >= self._start_at:
            self._start_at, self.start_driver = None, True
        if not self._last_report_at:
            self._last_report_at = now
        orders = self._orders(now)
        ends = self._draining_since is not None and not self._end_sent \
            and self.report is not None and not self.report.groups
        if (orders or ends) and self.report is not None:
            self._sent, self._driver = self._sent + 1, self.report.driver
            self._end_sent = ends
            self._out.append(Send(DRIVER_ROLE, GroupOrders(self._sent, orders, ends)))
        text = self.news(now)
        if self.wanted is not None and (text != self._reported_text or now >= self._say_at):
            self._reported_text, self._say_at = text, now + AGAIN
            self._out.append(Send(ROUTER_ROLE, PlacementReport(text)))
        out, self._out = self._out, []
        return out

    def _orders(self, now: float) -> list[AskGroup | DropGroup]:
        """None at all while orders are under way: what is reported may be from before them."""
        report = self.report
        if report is None or self.wanted is None or (
                report.driver == self._driver and report.seen < self._sent):
            return []
        orders: list[AskGroup | DropGroup] = []
        nodes_seen: set[str] = set()
        wanted = {} if self._draining_since is not None else self.wanted
        for row in sorted(report.groups, key=lambda row: -row.generation):
            group = wanted.get(row.node)
            if group is not None and row.node not in nodes_seen and self._keeps(group, row, now):
                nodes_seen.add(row.node)
            else:
                orders.append(DropGroup(row.node, row.generation))
        for node, group in wanted.items():
            if node not in nodes_seen and now >= group.ask_at:
                orders.append(self._ask(group, report, now))
        return orders

    def _keeps(self, group: WantedGroup, row: GroupRow, now: float) -> bool:
        """Whether a group stays; what is remembered of it, and when the next is asked for."""
        if not group.generation and row.phase != ENDED:
            group.generation = row.generation  # of an actor before this one
            self._generation = max(self._generation, row.generation)
        if row.generation != group.generation:
            return False
        if row.phase == ENDED:
            group.running_since = None
            group.ask_at = now + min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** group.pauses)
            group.pauses = min(group.pauses + 1, 16)
            return False
        if row.phase == WAITING and group.at_home and now - group.asked_at > HOME:
            group.home, group.ask_at = "", now
            return False
        if row.phase == RUNNING:
            group.home = row.at
            group.running_since = now if group.running_since is None else group.running_since
            if now - group.running_since > STEADY:
                group.pauses = 0
        return True

    def _ask(self, group: WantedGroup, report: RayReport, now: float) -> AskGroup:
        self._generation += 1
        home = group.home if group.home in report.machines else ""
        group.generation, group.asked_at, group.at_home = self._generation, now, bool(home)
        group.running_since = None
        return AskGroup(group.node, group.generation, self._cpus, self._gpus_of(report), home)

    def _gpus_of(self, report: RayReport) -> int:
        return 0 if self._auto and not report.gpus else self._gpus

    # --- what goes out ---

    def _away(self, now: float) -> str:
        """Why Ray does not answer; empty if it does."""
        if self.fault:
            return self.fault
        if now - self._last_report_at > SILENT:
            return f"no word for {SILENT:g} s"
        return ""

    def news(self, now: float) -> str:
        """One line for people."""
        if self._ended:
            return "ray: all placement groups are given back"
        if away := self._away(now):
            return (f"ray is away ({away}): what runs goes on, nothing is placed until it is back")
        if self.report is None or self.wanted is None:
            return "ray: not heard of yet"
        rows = {row.node: row for row in self.report.groups}
        groups = {name: rows.get(name) for name in self.wanted}
        running = [f"{name} at {row.at}" for name, row in groups.items()
                   if row is not None and row.phase == RUNNING]
        parts = [f"ray: {len(running)} of {len(groups)} placement groups run"]
        parts[0] += f" ({', '.join(running)})" if running else ""
        need = f"{self._cpus:g} CPUs"
        if gpus := self._gpus_of(self.report):
            need = f"{gpus} GPUs, {need}"
        waiting = [name for name, row in groups.items() if row is None or row.phase == WAITING]
        parts += [f"{', '.join(waiting)} wait for room ({need})"] if waiting else []
        parts += [f"{row.node} ended: {row.why}" for row in groups.values()
                  if row is not None and row.phase == ENDED]
        return "; ".join(parts)

    def next_timer(self) -> float | None:
        dues = [group.ask_at for group in (self.wanted or {}).values()]
        if self._start_at is not None:
            dues.append(self._start_at)
        return min([self._look_at, *(due for due in dues if due > self._now)])

    def drain(self, now: float) -> None:
        """The cluster ends: all groups are given back, if Ray is there to take them."""
        self._draining_since = now

    @property
    def done(self) -> bool:
        since = self._draining_since
        return since is not None and (self._ended or self._now - since > LEAVING
                                      or bool(self._away(self._now)))

    def health(self) -> Health:
        phase = "draining" if self._draining_since is not None else "ready"
        groups = self.report.groups if self.report is not None else []
        return Health(phase, self._steps, 60.0, {
            "ray_groups": float(len(self.wanted or {})),
            "ray_groups_running": float(sum(row.phase == RUNNING for row in groups)),
            "ray_away": float(bool(self._away(self._now)))}, self._reported_text)


def build(context: Context) -> RayActor:
    """The role's entry."""
    cluster, device = context.config.cluster, context.config.device
    ranks = device.tensor_parallel_size
    core = RayCore(cluster.ray_cpus or float(ranks), 0 if device.device == "cpu" else ranks,
                   device.device == "auto", int(time.time()))
    return RayActor(core, context)


class RayActor(CoreObserver):
    """The core with the process that speaks to Ray."""

    _core: RayCore

    def __init__(self, core: RayCore, context: Context) -> None:
        super().__init__(core)
        self._context = context
        self._post: Callable[..., None] = lambda call=None: None

    def on_start(self, post: Callable[..., None]) -> None:
        self._post = post

    def on_wake(self, now: float) -> Sequence[Send]:
        sends = self._core.on_wake(now)
        if self._core.start_driver:
            self._core.start_driver = False
            self._start()
        return sends

    def _start(self) -> None:
        """The driver dies with this thread."""
        where = self._context.run_dir
        (where / f"{DRIVER_ROLE}.inbox").unlink(missing_ok=True)
        process: Any = start(python(DRIVER, str(where), str(os.getpid()),
                                    self._core.address or str(
                                        self._context.config.cluster.ray_address)))

        def wait() -> None:
            how = describe_exit(process.wait())
            self._post(lambda: self._core.driver_ended(how, time.monotonic()))

        threading.Thread(target=wait, name="ray-driver", daemon=True).start()
