"""Models that clients have fetched, from a hub on loopback."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from helpers_hub import FakeHub, hub, model_files

from actorium.actors.config import sources
from actorium.actors.config.tree import ModelConfig
from actorium.actors.model_manager.manager_messages import PullProgress
from actorium.actors.model_manager.model_catalog import ModelCatalog
from actorium.actors.model_manager.model_pull import ModelPulls

__all__ = ["hub"]


def pulled(run_dir: Path, name: str) -> list[PullProgress]:
    sent: list[PullProgress] = []

    async def pull() -> None:
        await ModelPulls(run_dir, ModelConfig()).fetch("r", name, sent.append)

    asyncio.run(pull())
    return sent


def test_a_model_is_fetched_and_then_served(hub: FakeHub, tmp_path: Path) -> None:
    hub.add("org/name", model_files())
    first, *_, last = pulled(tmp_path, "org/name")
    assert first.status.startswith("fetching org/name (5 files)") and not first.done
    assert last == PullProgress("r", "success", done=True)
    (tmp_path / "models").mkdir()
    catalog = ModelCatalog(sources.from_kwargs(models_dir=str(tmp_path / "models")), "")
    assert catalog.scan() == []
    [entry] = catalog.scan(ModelPulls(tmp_path, ModelConfig()).names)
    assert entry.name == entry.config.model.model == "org/name"
    assert entry.digest and entry.facts.size > 0


@pytest.mark.parametrize(("name", "why"), [
    ("org/missing", "org/missing"), ("../etc", "is not the name of a model"),
    ("/etc", "is not the name of a model"), ("", "is not the name of a model")])
def test_what_cannot_be_fetched_is_refused_in_one_line(hub: FakeHub, tmp_path: Path, name: str,
                                                       why: str) -> None:
    [*_, last] = pulled(tmp_path, name)
    assert last.done and why in last.error and "\n" not in last.error
    assert ModelPulls(tmp_path, ModelConfig()).names == []
