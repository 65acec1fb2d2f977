"""Adapters of a cluster, loaded and unloaded while it runs: at all replicas, or at none."""

from __future__ import annotations

import shutil
import time
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from helpers_adapter_files import adapter_tensors, write_adapter
from helpers_cluster import ClusterBox, settings

from actorium.actors.cluster.cluster_control import ScaleCluster
from actorium.actors.config.adapter_settings import AdapterConfig
from actorium.actors.messages import AdapterCall, AdapterOrder
from actorium.actors.models.adapter_files import read_adapter
from actorium.actors.scheduler.request_state import choice_seed
from actorium.tools.null import null_worker

CLIENT = b"client"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("one", "two")):
        write_adapter(path / name, adapter_tensors(seed))
    shutil.copytree(path / "two", path / f"bad{null_worker.REFUSED}")
    return path


def cluster(replicas: int = 2, **scheduler: Any) -> ClusterBox:
    config = msgspec.structs.replace(settings(replicas, **scheduler),
                                     adapters=AdapterConfig(enable_lora=True))
    box = ClusterBox(config)
    turns(box, 10)
    return box


def turns(box: ClusterBox, count: int) -> None:
    for _ in range(count):
        box.turn()
        time.sleep(0.001)  # threads read files


def order(box: ClusterBox, what: str, name: str = "", path: Path | str = "", rid: str = "",
          replace: bool = False) -> str:
    rid = rid or f"{what}{box.now}"
    box.to_router.append(AdapterOrder(CLIENT, AdapterCall(
        rid, what, name, str(path), replace)))  # type: ignore[arg-type]
    return rid


def answer(box: ClusterBox, rid: str) -> dict[str, Any]:
    return box.answer(rid, partial(turns, box, 1))


def load(box: ClusterBox, name: str, path: Path, **more: Any) -> dict[str, Any]:
    return answer(box, order(box, "load", name, path, **more))


def held(box: ClusterBox) -> list[dict[str, str]]:
    """The names of each replica, with their folders."""
    turns(box, 60)
    return [{entry.adapter.name: Path(entry.adapter.path).name
             for entry in replica.bare.state.adapters.names.entries.values()}
            for replica in box.replicas if replica.bare.state.adapters is not None]


def right(box: ClusterBox, rid: str, path: Path) -> bool:
    """Whether a request has the tokens of an adapter."""
    submit, digest = box.submits[rid], read_adapter(path, 16).digest
    seed = null_worker.adapted_seed(choice_seed(submit.seed, 0), digest)
    first = len(submit.prompt) // 4
    return box.of(rid)[0].tokens == [
        null_worker.next_token(seed, first + at, null_worker.VOCAB)
        for at in range(submit.params.max_tokens)]


def test_an_adapter_is_loaded_at_all_replicas_and_requests_may_name_it(base: Path) -> None:
    box = cluster()
    (shown,) = load(box, "a", base / "one")["adapters"]
    assert (shown["name"], shown["path"]) == ("a", str(base / "one"))
    assert held(box) == [{"a": "one"}] * 2
    running = [box.submit([1 + i, 2], max_tokens=60, adapter="a") for i in range(4)]
    turns(box, 10)
    load(box, "a", base / "two", replace=True)
    later = box.submit([9, 2], adapter="a")
    assert [own["name"] for own in answer(box, order(box, "unload", "a"))["adapters"]] == []
    unknown = box.submit([9, 2], adapter="a")
    box.run()
    turns(box, 20)
    assert all(right(box, rid, base / "one") for rid in running), "they end as they began"
    assert right(box, later, base / "two") and held(box) == [{}] * 2
    end = box.of(unknown)[0].end
    assert end is not None and end.error_code == "unknown_adapter"
    for replica in box.replicas:
        assert not replica.bare.state.adapters._held  # type: ignore[union-attr]


def test_replicas_that_sleep_by_themselves_wake_to_load(base: Path) -> None:
    box = cluster(sleep_after=1.0)
    for _ in range(150):
        box.turn()
    assert [replica.bare.sleep.level for replica in box.replicas] == [1, 1]
    load(box, "a", base / "one")
    assert held(box) == [{"a": "one"}] * 2


def test_what_one_replica_cannot_serve_none_gets(base: Path, monkeypatch: pytest.MonkeyPatch
                                                 ) -> None:
    box = cluster()
    load(box, "a", base / "one")
    worker = box.replicas[1].worker
    on_adapter = worker._on_adapter

    def refuse(message: Any) -> None:
        if getattr(message, "adapter", None) and message.adapter.path.endswith("two"):
            message = msgspec.structs.replace(message, adapter=msgspec.structs.replace(
                message.adapter, path=f"two{null_worker.REFUSED}"))
        on_adapter(message)

    monkeypatch.setattr(worker, "_on_adapter", refuse)
    for name in ("a", "b"):
        refused = load(box, name, base / "two", replace=name == "a")
        assert refused["error"]["message"].startswith("replica 1: two")
        assert held(box) == [{"a": "one"}] * 2
    rids = [box.submit([1 + i, 2], adapter="a") for i in range(4)]
    box.run()
    assert all(right(box, rid, base / "one") for rid in rids)
    assert "is loaded already" in load(box, "a", base / "two")["error"]["message"]
    assert answer(box, order(box, "unload", "b"))["error"]["code"] == "unknown_adapter"


def test_later_replicas_and_routers_have_the_names(base: Path) -> None:
    box = cluster()
    load(box, "a", base / "one", rid="l")
    box.ask(ScaleCluster("s", 3))
    box.kill(0)
    assert held(box) == [{"a": "one"}] * 3
    box.replies.clear()
    box.new_router()
    assert [own["name"] for own in load(box, "a", base / "one", rid="l")["adapters"]] == ["a"]
    rids = [box.submit([1 + i, 2], adapter="a") for i in range(6)]
    box.run()
    assert all(right(box, rid, base / "one") for rid in rids)
    order(box, "load", "b", base / "two", rid="m")
    turns(box, 4)
    box.new_router()
    assert len(load(box, "b", base / "two", rid="m")["adapters"]) == 2
    assert held(box) == [{"a": "one", "b": "two"}] * 3


def test_a_replica_does_not_take_other_files_for_what_was_loaded(base: Path, tmp_path: Path
                                                                    ) -> None:
    """A replica that starts later is told once, and has no such name; the others go on."""
    shutil.copytree(base / "one", tmp_path / "a")
    box = cluster()
    load(box, "a", tmp_path / "a")
    shutil.rmtree(tmp_path / "a")
    shutil.copytree(base / "two", tmp_path / "a")
    box.kill(1)
    turns(box, 60)
    known = box.router._adapters._replicas[1]
    assert known.failed and not known.number, "it is tried once"
    rids = [box.submit([1 + i, 2], adapter="a") for i in range(2)]
    box.run()
    assert any(right(box, rid, base / "one") for rid in rids)
