"""Ledgers that earlier versions have written (`tests/data`), of an engine that was killed: one
request had ended, one was under way, one waited."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from helpers_runtime import short_dir

from actorium.actors.launcher.engine import Engine
from actorium.actors.ledger.ledger import Ledger
from actorium.actors.ledger.segments import OLDER, VERSION
from actorium.actors.scheduler.request_state import choice_seed
from actorium.tools.null.null_worker import VOCAB, next_token

DATA = Path(__file__).parents[2] / "data"
RECORDED = (4, 7, 8)
"""Versions of which there is one. Record one before the version is counted up: the older ones of
`OLDER` are read by tests that write them."""


def copied(version: int, folder: Path) -> Path:
    """A copy, as no other user may write it."""
    ledger = folder / "ledger"
    shutil.copytree(DATA / f"ledger-{version}", ledger)
    ledger.chmod(0o700)
    for file in ledger.iterdir():
        file.chmod(0o600)
    return ledger


def test_the_last_committed_version_is_recorded() -> None:
    assert {VERSION, *OLDER} - set(RECORDED) <= {1, 2}


@pytest.mark.parametrize("version", RECORDED)
def test_its_requests_are_read(version: int) -> None:
    with short_dir() as base:
        ledger = Ledger(copied(version, base))
        entries = list(ledger.history.entries.values())
        ledger.close()
    assert not ledger.damaged and not ledger.history.unreadable
    assert [entry.finished for entry in entries] == [True, False, False]
    counts = [len(entry.choices[0].tokens) // 4 for entry in entries]
    assert counts[0] == 20 and counts[1] > 50 and counts[2] == 0
    for seed, (entry, count) in enumerate(zip(entries, counts, strict=True)):
        tokens = memoryview(bytes(entry.choices[0].tokens)).cast("i").tolist()
        assert tokens == [next_token(choice_seed(seed, 0), 3 + at, VOCAB) for at in range(count)]


@pytest.mark.parametrize("version", RECORDED)
@pytest.mark.slow
def test_an_engine_goes_on_with_it(version: int) -> None:
    with short_dir() as base:
        path = copied(version, base)
        with Engine("", null_worker=True, skip_tokenizer=True, device="cpu", ledger_dir=str(path),
                    run_dir=str(base / "run")) as engine:
            [scheduler] = [each for each in engine.client.status().actors
                           if each.role == "scheduler"]
            assert scheduler.gauges["resumed_sequences"] == 2
