"""HTTP probes, metrics and the periodic log line, around the watchdog's core."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from actorium import __version__
from actorium.actors.cluster.cluster_control import RetiredReplica
from actorium.actors.config.cluster_settings import clustered
from actorium.actors.config.tree import Config
from actorium.actors.core import Context, Core, CoreObserver, Health, Send
from actorium.actors.messages import Beat, Exited
from actorium.actors.watchdog import probe_server
from actorium.actors.watchdog.core import WatchdogCore
from actorium.actors.watchdog.probe_server import ProbeServer
from actorium.actors.watchdog.readiness import EngineCondition, EngineView, judge
from actorium.actors.watchdog.stats_line import StatsLine, StatsLogger

if TYPE_CHECKING:
    from actorium.actors.watchdog.metrics import MetricsInput

LOG = logging.getLogger("actorium.stats")


def observed(core: Core, ctx: Context) -> Core:
    """The core with its observers; the core itself if it is no `WatchdogCore`. Raises `BadConfig`
    if the probes cannot listen."""
    if not isinstance(core, WatchdogCore):
        return core
    return ObservedWatchdog(core, ctx.config, probe_server.build(ctx),
                            StatsLogger(ctx.config.runtime.log_interval), _log)


def _log(line: StatsLine) -> None:
    LOG.info("%s", line.text, extra={"fields": line.fields})


class ObservedWatchdog(CoreObserver):
    """A `WatchdogCore` that answers probes, gives metrics, and logs a line now and then."""

    _core: WatchdogCore

    def __init__(self, core: WatchdogCore, config: Config, server: ProbeServer | None,
                 stats: StatsLogger, write: Callable[[StatsLine], None]) -> None:
        """server: None = no probes; write: takes the lines of `stats`."""
        super().__init__(core)
        self._config, self._server = config, server
        self._stats, self._write = stats, write
        self._retired: dict[str, int] = {}
        """Epochs of replicas that have left the cluster."""
        if clustered(config.cluster):
            self.inbox = core.inbox | RetiredReplica

    def on_start(self, post: Callable[..., None]) -> None:
        super().on_start(post)
        if self._server is not None:
            self._server.start(post, self)

    def on_message(self, message: Any, now: float) -> None:
        """A replica that has gone as it was told to is not missed, and whatever it has still said
        is not heard."""
        core = self._core
        if isinstance(message, RetiredReplica):
            self._retired[message.role] = message.epoch
            core.expected -= {message.role}
            core.actors.pop(message.role, None)
        elif not (isinstance(message, Beat | Exited)
                  and message.epoch <= self._retired.get(message.role, 0)):
            core.on_message(message, now)

    def on_wake(self, now: float) -> Sequence[Send]:
        sends = self._core.on_wake(now)
        line = self._stats.tick(self._core.actors, now)
        if line is not None:
            self._write(line)
        return sends

    def next_timer(self) -> float | None:
        timers = (self._core.next_timer(), self._stats.next_timer())
        return min((at for at in timers if at is not None), default=None)

    def drain(self, now: float) -> None:
        if self._server is not None and not self._core.draining:
            self._server.stop()
        self._core.drain(now)

    def health(self) -> Health:
        port = self._server.where if self._server is not None else None
        health = self._core.health()
        return health if port is None else health._replace(detail=f"probes: {port.url}")

    # --- for the probes ---

    def condition(self, now: float) -> EngineCondition:
        """The engine's condition at `now`."""
        core = self._core
        view = EngineView(core.actors, core.expected, core.error, core.draining, core.was_ready)
        return judge(view, self._config, now)

    def metrics_input(self, now: float) -> MetricsInput:
        """What the metrics are made of, as far as the core knows it."""
        from actorium.actors.watchdog.metrics import MetricsInput

        core = self._core
        restarts = core.supervisor.counts if core.supervisor is not None else {}
        return MetricsInput(core.actors, restarts, {}, self.condition(now).ready, self._config,
                            probe_server.served_name(self._config), __version__, now)
