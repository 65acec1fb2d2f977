"""The watchdog actor: the core with HTTP probes, metrics and a periodic log line around it. In a
cluster replicas that have left as ordered are not missed.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from actorium import __version__
from actorium.actors.cluster.cluster_control import RetiredReplica
from actorium.actors.config.cluster_settings import clustered
from actorium.actors.core import Context, CoreObserver, Health, Send
from actorium.actors.messages import Beat, Exited
from actorium.actors.models.model_dir import served_name
from actorium.actors.runtime.process import activity_seen_by_watcher
from actorium.actors.watchdog import probe_server
from actorium.actors.watchdog.core import WatchdogCore
from actorium.actors.watchdog.readiness import EngineCondition, judge
from actorium.actors.watchdog.stats_line import StatsLogger

if TYPE_CHECKING:
    from actorium.actors.watchdog.metrics import MetricsInput

LOG = logging.getLogger("actorium.stats")


def build(context: Context) -> WatchdogActor:
    """The actor of the role "watchdog". Raises `BadConfig` if the probes cannot listen."""
    config = context.config
    runtime = config.runtime
    core = WatchdogCore(runtime.name, context.epoch, os.getpid(), runtime.start_timeout,
                        config.recovery, runtime.heartbeat, context.entropy,
                        activity_seen_by_watcher)
    return WatchdogActor(core, context)


class WatchdogActor(CoreObserver):
    """A watchdog's core, and the steps around it; see the module."""

    _core: WatchdogCore

    def __init__(self, core: WatchdogCore, context: Context) -> None:
        super().__init__(core)
        self._config = context.config
        self._server = probe_server.build(context)
        self._stats = StatsLogger(context.config.runtime.log_interval)
        self._retired: dict[str, int] = {}
        """Epochs of replicas that have left the cluster."""
        if clustered(context.config.cluster):
            self.inbox = core.inbox | RetiredReplica

    def on_start(self, post: Callable[..., None]) -> None:
        self._server.start(post, self)

    def on_message(self, message: Any, now: float) -> None:
        core = self._core
        if isinstance(message, RetiredReplica):
            self._retired[message.role] = message.epoch
            core.expected -= {message.role}
            core.actors.pop(message.role, None)
        elif not (isinstance(message, Beat | Exited)
                  and message.epoch <= self._retired.get(message.role, 0)):
            core.on_message(message, now)  # else the last words of a replica that has left

    def on_wake(self, now: float) -> Sequence[Send]:
        sends = self._core.on_wake(now)
        line = self._stats.tick(self._core.actors, now)
        if line is not None:
            LOG.info("%s", line.text, extra={"fields": line.fields})
        return sends

    def next_timer(self) -> float | None:
        timers = (self._core.next_timer(), self._stats.next_timer())
        return min((at for at in timers if at is not None), default=None)

    def drain(self, now: float) -> None:
        if not self._core.draining:
            self._server.stop()
        self._core.drain(now)

    def health(self) -> Health:
        health, port = self._core.health(), self._server.where
        return health if port is None else health._replace(detail=f"probes: {port.url}")

    # --- for the probes ---

    def condition(self, now: float) -> EngineCondition:
        """The engine's condition at `now`."""
        return judge(self._core, self._config, now)

    def metrics_input(self, now: float) -> MetricsInput:
        """What the metrics are made of, as far as the core knows it."""
        from actorium.actors.watchdog.metrics import MetricsInput

        core = self._core
        restarts = core.supervisor.counts if core.supervisor is not None else {}
        return MetricsInput(core.actors, restarts, {}, self.condition(now).ready, self._config,
                            served_name(self._config), __version__, now)
