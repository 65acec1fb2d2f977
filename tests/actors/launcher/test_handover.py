"""What one version's launcher leaves to the next one's."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

from actorium.actors.errors import BadConfig
from actorium.actors.launcher.handover import (
    FORMATS,
    FORMATS_WRITTEN,
    VERSION,
    GoingBack,
    HandedOver,
    memory_of,
    model_stamp,
    read_back,
    read_state,
    why_unreadable,
)

RECORDED: dict[int, dict[str, Any]] = {1: {
    "version": 1, "formats": {"handed-over state": 1, "ledger": 4, "records of connections": 1,
                              "messages to clients": 1},
    "release": "0.1.0", "python": "/v/bin/python", "upgrade": "8f", "config": {"runtime": {}},
    "wanted": {}, "overrides": {"worker-0": "tests:build"}, "run_dir": "/run/e", "lock": 3,
    "parent": 77, "report": 5, "fork_servers": [99],
    "children": [["scheduler", 12, 2]], "epochs": {"scheduler": 2},
    "restarts": [["Restarted", "worker-0", 1, 2.5, 9.0, [0.5], {"killed": 1}]],
    "store": {"listener": 7, "links": [[8, "gateway-0"]],
              "held": {"gateway-0": {"version": 1, "base": [9, 10], "connections": {"0": 11}}}},
    "started": 1700000000.5}}
"""States of all versions that are read. Keep that of a version when it is counted up."""


def memory(data: dict[str, Any]) -> int:
    fd = os.memfd_create("state", 0)
    os.write(fd, json.dumps(data).encode())
    return fd


@pytest.mark.parametrize("version", FORMATS["handed-over state"][1])
def test_a_state_of_each_version_is_read(version: int) -> None:
    state = read_state(memory(RECORDED[version]))
    assert (state.run_dir, state.lock, state.parent, state.python) == ("/run/e", 3, 77,
                                                                     "/v/bin/python")
    assert [(child.role, child.pid, child.epoch) for child in state.children] == [
        ("scheduler", 12, 2)]
    assert state.restarts[0].causes == {"killed": 1}
    assert state.descriptors == [3, 5, 7, 8, 9, 10, 11]
    assert bytes(state.config) == b'{"runtime": {}}'


def test_a_state_is_read_again() -> None:
    state = read_state(memory(RECORDED[VERSION]))
    assert isinstance(state, HandedOver)
    fd = memory_of(state)
    assert read_state(fd) == read_state(fd) == state


def test_another_version_is_refused() -> None:
    """Before anything else of it is looked at."""
    with pytest.raises(BadConfig, match="handed-over state has version 999; actorium .* reads 1"):
        read_state(memory({"version": 999, "whatever": True}))


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_a_format_that_is_not_read_is_named(name: str) -> None:
    assert why_unreadable(FORMATS_WRITTEN) == ""
    assert f"the running engine's {name} has version 99;" in why_unreadable(
        FORMATS_WRITTEN | {name: 99})
    with pytest.raises(BadConfig, match=f"{name} has version 99"):
        read_state(memory(RECORDED[VERSION] | {"formats": FORMATS_WRITTEN | {name: 99}}))


def test_going_back_never_changes() -> None:
    assert read_back(memory({"why": "it is broken", "epochs": {"scheduler": 3},
                             "descriptors": [4, 5], "stops": 1})) == GoingBack(
        "it is broken", {"scheduler": 3}, [4, 5], 1)


def test_other_files_of_a_model_are_noticed(tmp_path: Any) -> None:
    weights = tmp_path / "model.safetensors"
    (tmp_path / "config.json").write_text("{}")
    weights.write_bytes(b"a" * 300_000)
    before = model_stamp(str(tmp_path))
    os.utime(weights, ns=(1, 1))
    assert model_stamp(str(tmp_path)) == before != ""
    weights.write_bytes(b"a" * 299_999 + b"b")
    assert model_stamp(str(tmp_path)) != before
    assert model_stamp(str(tmp_path / "nowhere")) == ""
