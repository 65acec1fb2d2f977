"""What the model manager's core wants done to processes and files; its actor carries it out."""

from __future__ import annotations

from typing import NamedTuple

from actorium.actors.model_manager.model_record import CatalogEntry


class ScanModels(NamedTuple):
    """Read the catalog again; answered by `set_catalog`."""


class PlanEngine(NamedTuple):
    """Compute what the engine takes; answered by `set_plan`."""

    entry: CatalogEntry


class StartEngine(NamedTuple):
    """Start the engine; answered by `set_progress`, `engine_ready` and `engine_ended`."""

    entry: CatalogEntry
    continues: bool = False
    """Requests of the engine before may be under way: its ledger is kept."""


class StopEngine(NamedTuple):
    """Let the engine drain and end; answered by `engine_ended`."""

    name: str


class PullOrder(NamedTuple):
    """Fetch a model; answered by `report_pull`."""

    client: bytes
    rid: str
    name: str


class NotLoaded(NamedTuple):
    """Log that a model with `load_on_start` is not loaded."""

    why: str


Order = ScanModels | PlanEngine | StartEngine | StopEngine | PullOrder | NotLoaded
