"""Messages between the model manager and its clients, the gateways.

A client *uses* a model: it sends `UseModel`, gets `UseProgress` each few seconds while the model's
engine starts, then `UseReady` with the engine's run directory, or `UseRefused`. The engine stays
while anybody uses it, and for `keep_alive` seconds after the last `ReleaseModel`.

The manager's client endpoint is `address(run_dir, "manager.front")`, where `run_dir` is the
server's. Uses are leases. While a client has any, granted or waiting, it sends all of them in a
`KeepUses` every `KEEP_USES_SECONDS`. The manager forgets those of a client that is silent for
`LEASE_SECONDS`, and those that the list does not have. A manager that was started again learns from
that list which uses there are: it grants those it does not know as if they were new, and answers
them again.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from actorium.actors.messages import Message, Rid, Seconds, Short, Tenant

KEEP_USES_SECONDS = 2.0
LEASE_SECONDS = 10.0
MAX_USES = 1 << 16
MAX_MODELS = 1 << 14

ModelName = Annotated[str, Meta(max_length=1024)]
KeepAlive = Annotated[float, Meta(ge=-1, le=1e9)]
"""Seconds for which an engine stays after its last use; -1 = for good."""
Bytes = Annotated[int, Meta(ge=0, le=2**62)]
ModelState = Literal["unloaded", "waiting", "loading", "ready", "sleeping", "stopping", "failed"]
"""waiting: for memory, or for one engine fewer; failed: its last start failed, the next use tries
again."""
RefusalCode = Literal["model_not_found", "model_required", "model_failed", "does_not_fit",
                      "queue_full", "deadline", "engine_failed", "unavailable"]
"""model_not_found: no model of that name; model_required: no name, and no default model;
model_failed: its engine does not start; does_not_fit: it needs more than --models-memory, or than
the pinned models leave; queue_full: too many uses wait; deadline: it waited for `UseModel.wait`;
engine_failed: a granted use has ended, as the engine has; unavailable: the server is stopping."""


class ModelUse(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """One use of a model."""

    id: Rid
    """Chosen by the client, and unique among its uses."""
    name: ModelName
    """A served name, with or without `:latest`; empty = the default model."""
    keep_alive: KeepAlive | None = None
    """Replaces the model's; None = it stays what it was."""
    tenant: Tenant = ""
    """Whose request it is: where the queue is full, each tenant has a share of it."""


# --- client -> manager (front) -------------------------------------------------------------------

class UseModel(Message, frozen=True):
    """Asks for an engine that serves a model. Answered by `UseProgress`, then by `UseReady` or
    `UseRefused`."""

    use: ModelUse
    wait: Seconds | None = None
    """Seconds that it may wait; None = as --models-wait says."""


class ReleaseModel(Message, frozen=True):
    """A use has ended, or is no longer wanted. Not answered."""

    id: Rid


class KeepUses(Message, frozen=True):
    """All uses that the client has, granted or waiting."""

    uses: Annotated[list[ModelUse], Meta(max_length=MAX_USES)]


class ListModels(Message, frozen=True):
    """Asks for a `ModelList`."""

    rid: Rid


class UnloadModel(Message, frozen=True):
    """Ends a model's engine once its last use has; a use that comes before keeps it. Answered by
    `ModelUnloaded` at once, or by `UseRefused`."""

    rid: Rid
    name: ModelName


class PullModel(Message, frozen=True):
    """Fetches a model by its name (ORG/NAME[:QUANTISATION][@REVISION]) and serves it. Answered by
    `PullProgress`, the last with `done`."""

    rid: Rid
    name: ModelName


ToManagerFront = UseModel | ReleaseModel | KeepUses | ListModels | UnloadModel | PullModel


# --- manager -> client ---------------------------------------------------------------------------

class UseProgress(Message, frozen=True):
    """A use waits. Sent at each change, and every `KEEP_USES_SECONDS`."""

    id: Rid
    model: ModelName
    """The model's first name."""
    state: ModelState
    detail: Short = ""
    """For people: "loading 3/5 shards", "waits for 2.1 GiB, which qwen uses"."""


class UseReady(Message, frozen=True):
    """A use is granted: the engine in this run directory serves the model."""

    id: Rid
    model: ModelName
    run_dir: Short


class UseRefused(Message, frozen=True):
    """A use is refused, or, as `engine_failed`, has ended."""

    id: Rid
    code: RefusalCode
    message: Short
    """One line for people; it lists served names (a few) where there is no such model."""


class ServedModelInfo(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True,
                      gc=False):
    """A model as `ModelList` shows it. Times are Unix seconds."""

    name: ModelName
    names: list[ModelName]
    """All names under which it is served, `name` first."""
    model: Short
    """What its engine is started with: a path or a name."""
    state: ModelState
    reason: Short = ""
    """Of one that has failed: the launcher's error. Of one that loads or waits: how far it is."""
    default: bool = False
    """It serves requests that name no model."""
    pinned: bool = False
    size: Bytes = 0
    """Of its files; 0 = not fetched yet."""
    modified: Seconds = 0.0
    """Of the newest of its files."""
    digest: Short = ""
    """Hexadecimal SHA-256 of its files' names, sizes and times."""
    memory: Bytes = 0
    """What its engine takes by `actorium plan`; 0 = not planned yet."""
    architecture: Short = ""
    """Class in its config.json; empty = not known yet."""
    family: Short = ""
    """`model_type` of its config.json, or GGUF's general.architecture."""
    format: Short = ""
    """gguf | safetensors; empty = not known yet."""
    quantization: Short = ""
    """As its files say: Q4_K_M, fp8, bfloat16."""
    parameters: Bytes = 0
    """0 = not known."""
    context_length: Bytes = 0
    """0 = not known."""
    run_dir: Short = ""
    """Of its engine; empty = none runs."""
    in_use: int = 0
    """Uses that are granted."""
    waiting: int = 0
    keep_alive: KeepAlive = 0.0
    """After the last use."""
    expires_at: Seconds | None = None
    """When its engine ends if nobody uses it; None = none runs, it is in use, or it stays."""
    tasks: tuple[Short, ...] = ()
    """What it does: "generate", names of `params.PoolingTask`; () = not known yet."""


class ModelList(Message, frozen=True):
    """The served models, in the order of the file, then of their names."""

    rid: Rid
    models: Annotated[list[ServedModelInfo], Meta(max_length=MAX_MODELS)]
    memory: Bytes = 0
    """Sum of what the running engines take, as planned."""
    memory_limit: Bytes = 0
    """--models-memory; 0 = none."""
    max_engines: int = 0
    """--models-max; 0 = no limit."""


class ModelUnloaded(Message, frozen=True):
    """The answer to `UnloadModel`."""

    rid: Rid
    model: ModelName
    state: ModelState
    """unloaded | stopping, or as it was: it ends with its last use."""


class PullProgress(Message, frozen=True):
    """How a `PullModel` gets on."""

    rid: Rid
    status: Short
    completed: Bytes = 0
    total: Bytes = 0
    """Bytes; 0 = not known."""
    done: bool = False
    error: Short = ""
    """Why it has failed, with `done`."""


FromManagerFront = (UseProgress | UseReady | UseRefused | ModelList | ModelUnloaded
                    | PullProgress)
