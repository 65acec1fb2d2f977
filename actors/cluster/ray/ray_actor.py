"""The actor of a cluster's head that has Ray place its nodes: role "ray"."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from actorium.actors.cluster.ray.ray_core import RayCore
from actorium.actors.cluster.ray.ray_messages import DRIVER_ROLE
from actorium.actors.core import Context, CoreObserver, Send
from actorium.actors.launcher.children import start
from actorium.actors.runtime.process import describe_exit, python

DRIVER = "actorium.actors.cluster.ray.ray_driver"


def build(context: Context) -> RayWithDriver:
    """The role's entry."""
    cluster, device = context.config.cluster, context.config.device
    ranks = device.tensor_parallel_size
    core = RayCore(cluster.ray_cpus or float(ranks), 0 if device.device == "cpu" else ranks,
                   device.device == "auto", int(time.time()))
    return RayWithDriver(core, context)


class RayWithDriver(CoreObserver):
    """The core with the process that speaks to Ray."""

    def __init__(self, core: RayCore, context: Context) -> None:
        super().__init__(core)
        self._ray, self._context = core, context
        self._post: Callable[..., None] = lambda call=None: None

    def on_start(self, post: Callable[..., None]) -> None:
        self._post = post

    def on_wake(self, now: float) -> Sequence[Send]:
        sends = self._ray.on_wake(now)
        if self._ray.start_driver:
            self._ray.start_driver = False
            self._start()
        return sends

    def _start(self) -> None:
        """The driver dies with this thread."""
        where = self._context.run_dir
        (where / f"{DRIVER_ROLE}.inbox").unlink(missing_ok=True)
        process: Any = start(python(DRIVER, str(where), str(os.getpid()),
                                    self._ray.address or str(
                                        self._context.config.cluster.ray_address)))

        def wait() -> None:
            how = describe_exit(process.wait())
            self._post(lambda: self._ray.driver_ended(how, time.monotonic()))

        threading.Thread(target=wait, name="ray-driver", daemon=True).start()
