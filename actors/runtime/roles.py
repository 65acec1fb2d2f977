"""Which module runs which role. Roles are started by name, so nothing here imports them."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec

from actorium.actors.config.tree import Config

ROLES: Mapping[str, str] = {
    "worker-0": "actorium.gpu.worker.core:build",
    "tokenizer": "actorium.actors.tokenizer.core:build",
    "scheduler": "actorium.actors.scheduler.core:build",
    "detokenizer": "actorium.actors.detokenizer.core:build",
    "watchdog": "actorium.actors.watchdog.core:build",
}
"""Role -> "module:function" of its `build(ctx: Context) -> Core`, in the order of starting: the
worker first, since it imports torch."""
WATCHDOG = "watchdog"
LAUNCHER = "launcher"
GATEWAY = "actorium.actors.gateway.actor:build"
NULL_WORKER = "actorium.tools.null.null_worker:build"
REFUSING = ("tokenizer", "gateway")
"""Roles (by prefix) that refuse new work, with an answer, while the others drain."""
DRAINING = (*REFUSING, "detokenizer")
"""Roles (by prefix) that hear at once that the engine stops; the others when it is their turn. The
detokenizer gives up clients that are gone."""
STREAMING = ("scheduler", "detokenizer")
"""Roles (by prefix) that stop when they have nothing more to tell, and have no successor then."""
STOP_ORDER = (("scheduler",), ("tokenizer", "worker", "detokenizer"), ("gateway",), ("watchdog",))
"""How an engine drains: each group (of role prefixes) stops when the groups before it have."""


def roles_of(config: Config) -> dict[str, str]:
    """The roles that an engine of this configuration runs, with what builds each."""
    roles = dict(ROLES)
    if config.device.null_worker:
        roles["worker-0"] = NULL_WORKER
    if config.gateway.port is not None:
        roles |= {f"gateway-{i}": GATEWAY for i in range(config.gateway.gateways)}
    return roles


def refuses(role: str) -> bool:
    """Whether the role refuses new work while the others drain."""
    return role.split("-")[0] in REFUSING


def hears_of_drain(role: str) -> bool:
    """Whether the role is told as soon as the engine is to stop."""
    return role.split("-")[0] in DRAINING


def drains(role: str) -> bool:
    """Whether streams that are under way when the engine stops end with the role, if it dies."""
    return role.split("-")[0] in STREAMING


def stop_rank(role: str) -> int:
    """Index of the group of `STOP_ORDER` in which the role stops; unknown roles stop first."""
    prefix = role.split("-")[0]
    return next((i for i, group in enumerate(STOP_ORDER) if prefix in group), 0)


def missing_packages(config: Config) -> list[str]:
    """Packages of `actorium[engine]` that the engine needs and that are not installed.

    Told before anything starts: the base install is the client alone.
    """
    needed = ["uvloop", "numpy"]
    if not config.model.skip_tokenizer:
        needed += ["tokenizers", "jinja2"]
    if not config.device.null_worker:
        needed += ["torch", "safetensors"]
    if config.probes.probe_port is not None or config.gateway.port is not None:
        needed += ["uvicorn", "httptools", "prometheus_client"]
    if config.gateway.port is not None:
        needed += ["starlette"]
    return [name for name in needed if find_spec(name) is None]
