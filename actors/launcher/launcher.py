"""The launcher: starts an engine's actors, waits for them, stops them, leaves nothing behind.

With `recovery.restart`, and once the engine has been ready, it kills and starts actors as the
watchdog orders. The watchdog itself it supervises on its own, by the same rules.

It waits in one poll on pidfds, its inbox and a wake-up pipe, and imports no event loop: the worker
must be on its way before anything heavy is loaded. Each actor leads its own process group and dies
with the launcher (parent-death signal). The replicas of a cluster (`replicas`) are launchers, too.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from actorium import __version__
from actorium.actors.cluster.cluster_control import AskReplicaSet, ReplicaSet
from actorium.actors.config import tree as configs
from actorium.actors.config.cluster_settings import came_later, clustered
from actorium.actors.config.models_settings import serves_models
from actorium.actors.config.tree import Config
from actorium.actors.config.validation import validate
from actorium.actors.errors import ActoriumError, BadConfig, BadModel, EngineUnavailable
from actorium.actors.launcher.children import ChildProcess, ChildProcesses, ForkedStarts
from actorium.actors.launcher.preflight import check_all, with_installed_plugins
from actorium.actors.launcher.replicas import CLUSTER_INBOX, LocalReplicas
from actorium.actors.launcher.service_manager import READY, STOPPING, ServiceManager
from actorium.actors.launcher.stopping import Drain, StopRequests, remove_finished_ledger
from actorium.actors.messages import (
    Beat,
    Children,
    Exited,
    Fatal,
    Kill,
    Recovered,
    Release,
    Restarted,
    Spawn,
    ToLauncher,
    Up,
    Upgrade,
)
from actorium.actors.runtime.console import print_notice
from actorium.actors.runtime.http.connection_store import ConnectionStore
from actorium.actors.runtime.process import (
    EXIT_BAD_CONFIG,
    EXIT_DRAINED,
    EXIT_FAULT,
    describe_exit,
    send_signal,
)
from actorium.actors.runtime.roles import (
    LAUNCHER,
    RELAY_ROLE,
    TLS_PASSWORD,
    WATCHDOG,
    is_gateway,
    mates,
    roles_of,
)
from actorium.actors.runtime.rundir import RunDir, address, sweep, write_private

if TYPE_CHECKING:
    from actorium.actors.launcher.handover import HandedOver
    from actorium.actors.launcher.upgrade_orders import UpgradeOrders
    from actorium.actors.launcher.watchdog_link import WatchdogLink
    from actorium.actors.runtime.mailbox import Inbox

FATAL_WAIT = 0.5
"""Seconds to wait for the `Fatal` of an actor that exited with an error code."""
NO_FATAL = Fatal("", 0, 0, "")


class Launcher:
    """One engine. `run` blocks until it is over; `stop` may be called from any thread."""

    def __init__(self, config: Config, roles: Mapping[str, str] | None = None,
                 started: Callable[[Path], None] | None = None,
                 ready: Callable[[], None] | None = None) -> None:
        """roles: role -> "module:function", replaces the engine's own; started: called with the
        run directory when all actors have been started; ready: called when they are ready for the
        first time."""
        self.config = config
        self.roles = dict(roles) if roles is not None else roles_of(config)
        self.failure: ActoriumError | None = None
        """Why the engine ended, if not by `stop`."""
        self.actor_killed = False
        """It ended because somebody killed an actor before the engine was ready."""
        self._started, self._ready = started, ready
        self._run_dir: RunDir | None = None
        self._poll = select.poll()
        self._forks = ForkedStarts()
        self._actors = ChildProcesses(Path(), {}, self._poll)
        self._fatals: dict[str, Fatal] = {}
        """The last of each role."""
        self._inbox: Inbox | None = None
        self._watchdog: WatchdogLink | None = None
        self._connections: ConnectionStore | None = None
        """Of the gateways' callers."""
        self._replicas: LocalReplicas | None = None
        """None = it is no cluster's."""
        self._restart_records: list[Restarted] = []
        """Of actors that ran before this launcher took over."""
        self._upgrades: UpgradeOrders | None = None
        self.report: int | None = None
        """Descriptor at which an `Engine` reads how its launcher fares."""
        self._up = False
        """The engine has been ready."""
        self._context: Any = None
        self._stops = StopRequests()
        self._drain = Drain(self._stops, self._wait_until)
        self._service = ServiceManager.of_this_process()
        self._code = EXIT_DRAINED

    def run(self) -> int:
        """Start, wait, stop. Returns the exit code: 0 drained, 1 fault, 2 bad configuration.

        The reason of 1 and 2 goes to stderr as one line (but see `tie_to`), and into `failure`.
        """
        self._stops.catch_signals(self._reload_tls)
        try:
            self._start()
            self._wait_until(lambda: self._stops.count > 0 or self.failure is not None)
            self._service.send(STOPPING)
            self._drain.run(self._actors, self.roles, self.config.runtime.drain_timeout,
                            lambda: self.failure is not None)
            if self._drain.loss:
                self._fail(EngineUnavailable(self._drain.loss), EXIT_FAULT)
            if self.failure is None:
                remove_finished_ledger(self.config)
        except ActoriumError as error:
            self._fail(error, EXIT_BAD_CONFIG)
        except OSError as error:
            self._fail(EngineUnavailable(f"cannot start: {error}"), EXIT_FAULT)
        finally:
            self._clean_up()
        if self.failure is not None and (self._up or self._stops.parent is None):
            self._say(self.failure.message)
        return self._code

    def stop(self) -> None:
        """Drain and end; a second call ends without draining. Safe in a signal handler."""
        self._stops.add()

    def tie_to(self, parent: int, pidfd: int | None = None) -> None:
        """Stop when the process `parent` ends, which reports itself why a start has failed; see
        `StopRequests.tie_to`."""
        self._stops.tie_to(parent, pidfd)

    # --- start ---

    def _start(self) -> None:
        runtime = validate(self.config).runtime
        if missing := sorted(roles_of(self.config).keys() - self.roles.keys()):
            raise BadConfig(f"roles: without {', '.join(missing)} no engine gets ready", "roles")
        check_all(self.config)
        self._run_dir = RunDir(runtime.name, runtime.run_dir)
        path = self._run_dir.path
        write_private(path / "config.json",
                      configs.dump(with_installed_plugins(self.config)))
        self._actors = ChildProcesses(path, self.roles, self._poll, self._forks)
        if (password := self.config.gateway.ssl_keyfile_password) is not None:
            os.environ[TLS_PASSWORD] = password  # so that it outlasts an upgrade
        if self.config.recovery.restart and any(map(is_gateway, self.roles)):
            self._connections = ConnectionStore(path, self._poll, self._actors.role_of)
        for role in self.roles:
            self._actors.spawn(role)
        self._write_facts(time.time())
        self._open_mailboxes(path)
        self._connect_watchdog()
        self._stops.register(self._poll)
        if self._started is not None:
            self._started(path)
        sweep(runtime.run_dir)

    def _write_facts(self, started: float) -> None:
        """Writes down what commands ask of an engine. started: Unix time."""
        from actorium.actors.launcher.handover import FORMATS_WRITTEN, model_stamp

        self._started_at = started
        write_private(self._actors.run_dir / "engine.json", msgspec.json.encode({
            "name": self.config.runtime.name, "pid": os.getpid(),
            "model": self.config.model.model, "started": started, "roles": list(self.roles),
            "version": __version__, "formats": FORMATS_WRITTEN,
            "files": model_stamp(self.config.model.model)}))

    def _open_mailboxes(self, path: Path) -> None:
        """Called after the start: importing zmq takes longer than starting all the actors."""
        import zmq

        from actorium.actors.launcher.upgrade_orders import UpgradeOrders
        from actorium.actors.launcher.watchdog_link import WatchdogLink
        from actorium.actors.runtime.mailbox import Inbox

        self._context = zmq.Context(io_threads=1)
        in_cluster = clustered(self.config.cluster)
        self._inbox = Inbox(self._context, address(path, "launcher.inbox"),
                            CLUSTER_INBOX if in_cluster else ToLauncher,
                            hwm=self.config.runtime.queue_messages)
        self._poll.register(self._inbox.fd, select.POLLIN)
        self._watchdog = WatchdogLink(self.config, path, self._context,
                                      self._restart_records)
        self._upgrades = UpgradeOrders(path, self._poll, self._why_no_upgrade, self._state,
                                       self._say)
        if in_cluster:
            self._replicas = LocalReplicas(self.config, self.roles, self._actors, self._watchdog,
                                           self._context, self._send_children, self._say)

    def _connect_watchdog(self) -> None:
        assert self._watchdog is not None
        children, exits = self._actors.children(), self._actors.exits()
        if self._replicas is not None:
            children, exits = self._replicas.without_leaving(children, exits)
        self._watchdog.connect(children, exits, self._up)

    # --- wait ---

    def _wait_until(self, over: Callable[[], bool], timeout: float | None = None) -> bool:
        """Handle events until `over()`; False on a timeout."""
        until = None if timeout is None else time.monotonic() + timeout
        self._read_inbox()
        while not over():
            left = None if until is None else until - time.monotonic()
            if left is not None and left <= 0:
                return False
            events = self._poll.poll(self._poll_timeout(left))
            self._read_inbox()
            for fd, _ in events:
                self._stops.on_readable(fd)
                if self._connections is not None:
                    self._connections.on_readable(fd)
                if fd in self._actors.running:
                    self._on_exit(fd)
                elif self._upgrades is not None:
                    self._upgrades.on_readable(fd)
            self._on_timer(time.monotonic())
        return True

    def _poll_timeout(self, timeout: float | None) -> float | None:
        """Milliseconds until a timer is due."""
        now = time.monotonic()
        dues = [timeout] if timeout is not None else []
        dues += [at - now for at in self._actors.kill_at.values()]
        if self._service.next_ping is not None:
            dues.append(self._service.next_ping - now)
        tick = self._watchdog.next_timer() if self._watchdog is not None and self._up else None
        if tick is not None:
            dues.append(tick - now)
        return max(0.0, min(dues)) * 1000 + 1 if dues else None

    def _on_timer(self, now: float) -> None:
        self._actors.kill_due(now)
        self._service.ping(now)
        if self._watchdog is not None and self._up:
            for order in self._watchdog.orders(now):
                self._on_message(order)

    def _read_inbox(self) -> None:
        if self._inbox is None:
            return
        while True:
            for message in self._inbox.receive(256):
                self._on_message(message)
            if not self._inbox.more:
                return

    def _on_message(self, message: Any) -> None:
        match message:
            case Fatal():
                self._fatals[message.role] = message
            case Up():
                self._on_up()
            case Recovered():
                self._drain.on_recovered(message.role, message.epoch)
            case Beat() if self._watchdog is not None:
                self._watchdog.on_beat(message)
            case Restarted() if self._watchdog is not None:
                self._watchdog.save_restarts(message)
            case Kill():
                self._on_kill(message)
            case Release():
                self._on_release(message)
            case Spawn():
                self._on_spawn(message)
            case Upgrade() if self._upgrades is not None:
                self._upgrades.on_order(message)
            case ReplicaSet() if self._replicas is not None:
                self._replicas.on_set(message, self._working)
            case AskReplicaSet() if self._replicas is not None:
                self._replicas.on_ask(message)

    def _on_up(self) -> None:
        self._up = True
        self._send_children()
        self._forks.on_up(self.config, self._actors.run_dir, self.roles)
        self._service.send(READY)
        if self._ready is not None:
            self._ready()

    def _on_kill(self, order: Kill) -> None:
        if order.role == LAUNCHER:
            if self._stops.count == 0:
                self._fail(EngineUnavailable(order.reason), EXIT_FAULT)
            return
        actor = self._actors.find(order.role, order.pid)
        if actor is not None and self._actors.kill_soon(actor, order.reason):
            self._say(f"{actor.role} (pid {actor.pid}) is killed: {order.reason}")

    def _on_release(self, order: Release) -> None:
        actor = self._actors.find(order.role, order.pid)
        if actor is not None and self._restarts(order.role) and self._actors.release(actor):
            self._say(f"{actor.role} (pid {actor.pid}) ends: the engine sleeps")

    def _on_spawn(self, order: Spawn) -> None:
        if not self._restarts(order.role):
            return
        slept = self._actors.released(order.role)
        spawned = [actor for role in mates(order.role, self.roles)
                   if (actor := self._actors.spawn(role, order.epoch)) is not None]
        for actor in spawned:
            self._drain.on_restarted(actor.role, actor.epoch)
            again = "starts: the engine wakes" if slept else "is started again"
            self._say(f"{actor.role} {again} (pid {actor.pid}, epoch {actor.epoch})")
        if order.role == WATCHDOG and spawned:
            self._connect_watchdog()
        elif spawned:
            self._send_children()

    def _send_children(self) -> None:
        if self._watchdog is not None:
            self._watchdog.send(Children(self._actors.children(), self._up))

    @property
    def _working(self) -> bool:
        """Whether the engine neither stops nor has failed."""
        return self._stops.count == 0 and self.failure is None

    def _restarts(self, role: str) -> bool:
        """Whether an actor of this role that dies now is started again."""
        return (self.config.recovery.restart and self._up and self.failure is None
                and self._drain.restarts(role))

    def _has_successor(self, role: str) -> bool:
        """Whether another one follows an actor that has just ended."""
        return self._restarts(role)

    def _on_exit(self, pidfd: int) -> None:
        actor, exited = self._actors.reap(pidfd)
        if self._replicas is not None and actor.role in self._replicas.leaving:
            self._replicas.on_leaving_exit(actor, self._working)
            return
        if exited.released:
            if self._watchdog is not None:
                self._watchdog.send(exited)
            return
        unexpected = self._working and not actor.killed_with_role
        if unexpected or self._restarts(actor.role) or exited.status != EXIT_DRAINED:
            self._actors.end_mates(actor)
        if unexpected and exited.status in (EXIT_FAULT, EXIT_BAD_CONFIG):
            self._await_fatal(actor)
        if unexpected and exited.status != EXIT_BAD_CONFIG:
            self._report_crash(exited)
        how = (f"goes with {actor.killed_with_role}" if actor.killed_with_role
               else describe_exit(exited.status))
        death = f"{actor.role} (pid {actor.pid}) {how}"
        if self._restarts(actor.role) and exited.status != EXIT_BAD_CONFIG:
            self._drain.on_restartable_death(actor.role, actor.epoch, death)
            why = self._fatal_of(actor).message
            self._say(f"{death}{why and ': ' + why}")
            if self._watchdog is not None:
                self._watchdog.on_exit(exited, why)
        elif unexpected and self.failure is None:
            self._on_fault(actor, exited.status, death)
        else:
            self._drain.on_final_death(actor.role, death, exited.status)
        if self._connections is not None and not self._has_successor(actor.role):
            self._connections.drop(actor.role)
        if self._watchdog is not None:
            self._watchdog.send(exited)

    def _fatal_of(self, actor: ChildProcess | Exited) -> Fatal:
        """What the actor reported before it died; if nothing, an empty one."""
        fatal = self._fatals.get(actor.role)
        return fatal if fatal is not None and fatal.pid == actor.pid else NO_FATAL

    def _report_crash(self, exited: Exited) -> None:
        if self.config.runtime.crash_reports:
            from actorium.actors.launcher.crash_reports import report

            report(self._actors.run_dir, exited, self._fatal_of(exited).message,
                   lambda path: self._say(f"crash report: {path}"))
        if self._replicas is not None:
            self._replicas.on_crash(exited)

    def _await_fatal(self, actor: ChildProcess) -> None:
        until = time.monotonic() + FATAL_WAIT
        while self._fatal_of(actor) is NO_FATAL and (left := until - time.monotonic()) > 0:
            assert self._inbox is not None
            poll = select.poll()
            poll.register(self._inbox.fd, select.POLLIN)
            poll.poll(left * 1000)
            self._read_inbox()

    def _on_fault(self, actor: ChildProcess, status: int, death: str) -> None:
        """An actor has died that is not started again: the engine fails, or goes on without a
        replica that came later."""
        fatal = self._fatal_of(actor)
        self.actor_killed = status == -signal.SIGKILL
        if (status == EXIT_BAD_CONFIG and self._replicas is not None
                and came_later(self.roles.get(actor.role, ""))):
            self._replicas.leave_out(actor, fatal.message or death)
            return
        if status == EXIT_BAD_CONFIG and fatal is not NO_FATAL:
            kind = BadConfig if fatal.code == BadConfig.code else BadModel
            self._fail(kind(fatal.message), EXIT_BAD_CONFIG)
            return
        why = fatal.message and f": {fatal.message}"
        self._fail(EngineUnavailable(f"{death}{why}"), EXIT_FAULT)

    def _fail(self, error: ActoriumError, code: int) -> None:
        if self.failure is None:
            self.failure, self._code = error, code

    # --- upgrade ---

    def _why_no_upgrade(self) -> str:
        """Returns why the engine cannot be upgraded now; empty = it can."""
        if not (self._up and self._working):
            return "the engine is not ready" if self._working else "the engine is stopping"
        if any(map(self._actors.released, self.roles)):
            return "the engine sleeps at level 2: wake it first"
        if self._drain.recovering:
            return f"being started again: {', '.join(self._drain.recovering)}"
        if self._replicas is not None or self.config.cluster.replica_of:
            return "a cluster is not upgraded as a whole: start another one beside it"
        if serves_models(self.config.models) or self.config.models.engine_of:
            return "a server of several models is not upgraded: stop it, and start it again"
        if not (self.config.recovery.restart and self.config.recovery.ledger):
            return "without a ledger and restarts its requests would be lost"
        if threading.current_thread() is not threading.main_thread():
            return "its launcher is a thread of another program"
        return ""

    def _state(self, order: Upgrade) -> HandedOver:
        """Returns what the other version's launcher gets."""
        from actorium.actors.launcher.handover import FORMATS_WRITTEN, HandedOver

        assert self._run_dir is not None and self._watchdog is not None
        usual = roles_of(self.config)
        return HandedOver(
            formats=FORMATS_WRITTEN, upgrade=order.id, wanted=msgspec.Raw(order.config),
            config=msgspec.Raw(configs.dump(self.config)),
            overrides={role: built for role, built in self.roles.items()
                       if usual.get(role) != built},
            run_dir=str(self._actors.run_dir), lock=self._run_dir.lock, parent=self._stops.parent,
            report=self.report, fork_servers=self._forks.pids,
            children=self._actors.children(), epochs=self._actors.epochs,
            restarts=self._watchdog.restarts(), started=self._started_at,
            store=None if self._connections is None else self._connections.state())

    # --- stop ---

    def _reload_tls(self) -> bool:
        """Has the relay read its certificate again; False = there is none."""
        if self.config.gateway.ssl_certfile is None:
            return False
        for actor in self._actors.running.values():
            if actor.role == RELAY_ROLE and self._up:
                send_signal(actor.pid, signal.SIGHUP)
        return True

    def _say(self, text: str) -> None:
        """Print a line for whoever runs the engine; of several beside each other it says which."""
        runtime = self.config.runtime
        name = f"{runtime.name}: " if self.config.models.engine_of else ""
        print_notice(f"{name}{text}", runtime, LAUNCHER)

    def _clean_up(self) -> None:
        self._actors.close()
        for box in (self._inbox, self._watchdog, self._replicas, self._connections,
                    self._upgrades):
            if box is not None:
                box.close()
        if self._context is not None:
            self._context.destroy(linger=0)
        if self._run_dir is not None:
            self._run_dir.close()
        self._stops.close()
