"""The names under which clients find the model."""

from __future__ import annotations

from pathlib import PurePath

from actorium.actors.config.tree import Config

DEFAULT = "default"
"""What clients of engines with one model write where a name must stand."""


class ModelNames:
    """Those of one engine."""

    def __init__(self, config: Config, model: str) -> None:
        """model: the name that answers show."""
        started_with = config.model.model.rstrip("/")
        self.served = config.model.served_model_name or (model,)
        """The names that `/v1/models` lists, the one that answers show first."""
        self._known = set(self.served)
        if not config.gateway.strict_model_name:
            self._known |= {started_with, PurePath(started_with).name, DEFAULT}

    def known(self, asked: str | None) -> bool:
        """Whether who asks for this model is served. No name, or an empty one, asks for any."""
        return not asked or asked.rstrip("/") in self._known
