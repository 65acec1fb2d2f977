"""Which module runs which role. Roles are started by name, so nothing here imports them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib import import_module

from actorium.actors.config.cluster_settings import ROUTER, cluster_roles
from actorium.actors.config.models_settings import serves_models
from actorium.actors.config.tree import Config, GatewayConfig
from actorium.actors.models.model_dir import takes_media

ROLES: Mapping[str, str] = {
    "worker-0": "actorium.gpu.worker.core:build",
    "tokenizer": "actorium.actors.tokenizer.core:build",
    "scheduler": "actorium.actors.scheduler.scheduler_actor:build",
    "detokenizer": "actorium.actors.detokenizer.core:build",
    "watchdog": "actorium.actors.watchdog.watchdog_actor:build",
}
"""Role -> "module:function" of its `build(ctx: Context) -> Core`, in the order of starting: the
worker first, since it imports torch."""
WATCHDOG, LAUNCHER, SCHEDULER = "watchdog", "launcher", "scheduler"
WORKER = "worker-0"
"""Rank 0 of the worker, and the name of its group: a message to it goes to every rank."""
GATEWAY = "actorium.actors.gateway.actor:build"
RELAY, RELAY_ROLE = "actorium.actors.gateway.relay:build", "relay"
TLS_PASSWORD = "ACTORIUM_SSL_KEYFILE_PASSWORD"
"""The variable in which the relay gets the key's password, and nobody else."""
MEDIA = "actorium.actors.media.media_actor:build"
TRACER, TRACER_ROLE = "actorium.actors.tracing.tracer_actor:build", "tracer"
MANAGER, MANAGER_ROLE = "actorium.actors.model_manager.manager_actor:build", "manager"
NULL_WORKER = "actorium.tools.null.null_worker:build"
WITHOUT_TORCH = "actorium.actors.runtime.roles:preload"
PRELOADS = dict.fromkeys((*ROLES.values(), GATEWAY, MEDIA, TRACER, ROUTER), WITHOUT_TORCH) | {
    ROLES["worker-0"]: "actorium.gpu.worker.preload:preload"}
"""What builds a role -> "module:function" that imports what it needs (`runtime/fork_server.py`)."""
SERVES_HTTP = ("actorium.actors.gateway.app", "actorium.actors.runtime.http.http_server")
"""What a gateway imports after its start."""
REFUSING = ("tokenizer", "gateway", "media")
"""Roles (by prefix) that refuse new work, with an answer, while the others drain."""
DRAINING = (*REFUSING, "detokenizer")
"""Roles (by prefix) that drain as soon as the engine stops; the others when it is their turn. The
detokenizer gives up lost clients."""
STREAMING = ("scheduler", "detokenizer")
"""Roles (by prefix) that stop when they have no more tokens to send; streams end with them."""
STOP_ORDER = (("scheduler",), ("tokenizer", "worker", "detokenizer", "media", "replica", "nodes",
              "ray"), ("gateway",), ("relay", "tracer", "manager"), ("watchdog",))
"""How an engine drains: each group (of role prefixes) stops when the groups before it have."""


def roles_of(config: Config) -> dict[str, str]:
    """The roles that an engine of this configuration runs, with what builds each."""
    if serves_models(config.models):  # each model has an engine with the other roles
        roles = {MANAGER_ROLE: MANAGER, WATCHDOG: ROLES[WATCHDOG]}
    else:
        worker = NULL_WORKER if config.device.null_worker else ROLES[WORKER]
        roles = dict.fromkeys(worker_roles(config), worker) | {
            role: built for role, built in ROLES.items() if role != WORKER}
        if takes_media(config):
            roles["media"] = MEDIA
    if config.runtime.otlp_traces_endpoint is not None:
        roles[TRACER_ROLE] = TRACER
    if serves_http(config.gateway):
        roles |= {f"gateway-{i}": GATEWAY for i in range(config.gateway.gateways)}
    if has_relay(config.gateway):
        roles[RELAY_ROLE] = RELAY
    return cluster_roles(config.cluster, roles)


def preload(config: Config) -> None:
    """Imports what the actors of an engine need, but workers."""
    needed = {built for built in roles_of(config).values() if PRELOADS.get(built) == WITHOUT_TORCH}
    modules = {built.partition(":")[0] for built in needed}
    for name in ("actorium.actors.runtime.shell", *sorted(modules),
                 *(SERVES_HTTP if GATEWAY in needed else ())):
        import_module(name)


def serves_http(gateway: GatewayConfig) -> bool:
    """Whether there are gateways."""
    return gateway.port is not None or gateway.uds is not None


def has_relay(gateway: GatewayConfig) -> bool:
    """Whether callers reach the gateways through the relay."""
    return gateway.uds is not None or (gateway.port is not None
                                       and gateway.ssl_certfile is not None)


def worker_roles(config: Config) -> tuple[str, ...]:
    """The ranks of the worker, in order."""
    return tuple(f"worker-{rank}" for rank in range(config.device.tensor_parallel_size))


def rank_of(role: str) -> int:
    """The rank of a worker's role; 0 of any other."""
    return int(role.removeprefix("worker-")) if role.startswith("worker-") else 0


def group_of(role: str) -> str:
    """What the role lives and dies with: ranks with rank 0, any other with itself."""
    return WORKER if role.startswith("worker-") else role


def mates(role: str, roles: Iterable[str]) -> list[str]:
    """Those of `roles` that live and die with `role`, itself among them."""
    return [other for other in roles if group_of(other) == group_of(role)]


def is_gateway(role: str) -> bool:
    """Whether the role serves HTTP."""
    return role.split("-")[0] == "gateway"


def reads_formats(role: str) -> bool:
    """Whether the role needs to know the formats of tool calls and reasoning."""
    return role.split("-")[0] in ("gateway", "tokenizer", "scheduler")


def refuses_work(role: str) -> bool:
    """Whether the role refuses new work while the others drain."""
    return role.split("-")[0] in REFUSING


def drains_at_once(role: str) -> bool:
    """Whether the role drains as soon as the engine stops."""
    return role.split("-")[0] in DRAINING


def ends_streams(role: str) -> bool:
    """Whether streams that still run when the engine stops are lost if the role dies."""
    return role.split("-")[0] in STREAMING


def finishes_work(role: str) -> bool:
    """Whether the role has requests to finish when the engine stops."""
    return drains_at_once(role) or ends_streams(role)


def stop_rank(role: str) -> int:
    """Index of the group of `STOP_ORDER` in which the role stops; unknown roles stop first."""
    prefix = role.split("-")[0]
    return next((i for i, group in enumerate(STOP_ORDER) if prefix in group), 0)
