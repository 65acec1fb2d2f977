"""actorium: an LLM inference engine made of small actors.

The public names below are loaded when first used, so that `import actorium` stays cheap.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from actorium.actors.client.async_client import AsyncClient as AsyncClient
    from actorium.actors.client.client import Client as Client
    from actorium.actors.client.client import Completion as Completion
    from actorium.actors.client.media import Image as Image
    from actorium.actors.client.media import Video as Video
    from actorium.actors.errors import ActoriumError as ActoriumError
    from actorium.actors.launcher.engine import Engine as Engine
    from actorium.actors.params import PoolingParams as PoolingParams
    from actorium.actors.params import SamplingParams as SamplingParams
    from actorium.actors.params import Structured as Structured

_WHERE = {
    "Client": "actorium.actors.client.client",
    "AsyncClient": "actorium.actors.client.async_client",
    "Completion": "actorium.actors.client.client",
    "Engine": "actorium.actors.launcher.engine",
    "Image": "actorium.actors.client.media",
    "Video": "actorium.actors.client.media",
    "PoolingParams": "actorium.actors.params",
    "SamplingParams": "actorium.actors.params",
    "Structured": "actorium.actors.params",
}
_ERRORS = ("ActoriumError", "InvalidRequest", "ContextOverflow", "QueueFull", "DeadlineExceeded",
           "Aborted", "Quarantined", "UnknownRequest", "EngineUnavailable", "EngineFailed",
           "BadModel", "BadConfig", "MediaExpired")
_WHERE |= dict.fromkeys(_ERRORS, "actorium.actors.errors")

__all__ = ["__version__", *sorted(_WHERE)]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'actorium' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_WHERE[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
