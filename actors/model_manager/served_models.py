"""The served models by their names. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from actorium.actors.model_manager.model_record import CatalogEntry, ModelRecord

NAMES_SHOWN = 8
"""In an error."""
LATEST = ":latest"


class ServedModels:
    """The models of the catalog, in its order, then those that have left it and still run."""

    def __init__(self) -> None:
        self._models: dict[str, ModelRecord] = {}
        """By first name."""
        self._names: dict[str, ModelRecord] = {}
        """By all names."""

    def __iter__(self) -> Iterator[ModelRecord]:
        return iter(self._models.values())

    def __len__(self) -> int:
        return len(self._models)

    def get(self, name: str) -> ModelRecord | None:
        """The model of a first name."""
        return self._models.get(name)

    def update(self, entries: Iterable[CatalogEntry], kept: Iterable[ModelRecord]) -> None:
        """The catalog was read again. kept: models that stay even if it does not have them."""
        before, self._models = self._models, {}
        for entry in entries:
            model = before.pop(entry.name, None)
            if model is None:
                model = ModelRecord(entry)
            else:
                model.update(entry)
            self._models[entry.name] = model
        kept = list(kept)
        for name, model in before.items():
            model.listed = False
            if model.running or model in kept:
                self._models[name] = model
        self._index()

    def add_unlisted(self, entry: CatalogEntry) -> ModelRecord:
        """A model that runs, and that the catalog does not have."""
        model = self._models[entry.name] = ModelRecord(entry)
        model.listed = False
        self._index()
        return model

    def remove(self, model: ModelRecord) -> None:
        del self._models[model.name]
        self._index()

    def _index(self) -> None:
        self._names = {}
        for model in self:
            for name in model.entry.names:
                self._names.setdefault(name, model)

    def find(self, name: str) -> ModelRecord | None:
        """The model of a name; of an empty one the default, or the only one there is."""
        if name:
            model = self._names.get(name)
            return self._names.get(name.removesuffix(LATEST)) if model is None else model
        listed = [model for model in self if model.listed]
        chosen = [model for model in listed if model.entry.default]
        return chosen[0] if chosen else listed[0] if len(listed) == 1 else None

    def some_names(self) -> str:
        """For an error."""
        names = [model.name for model in self if model.listed]
        more = [f"{len(names) - NAMES_SHOWN} more"] if len(names) > NAMES_SHOWN else []
        return ", ".join(names[:NAMES_SHOWN] + more) or "none"

    def unknown_name(self, name: str) -> str:
        """The error for a name that is not served."""
        return f"model: {name[:200]!r} is not served here; these are: {self.some_names()}"
