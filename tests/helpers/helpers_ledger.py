"""Records for a ledger: requests, batches of tokens, log-probabilities."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from actorium.actors.ledger.ledger import Ledger
from actorium.actors.ledger.records import ADMISSION, BATCH, AdmissionRecord, make_record
from actorium.actors.ledger.segments import DamagedRange, LedgerRecord, read_segment, segments
from actorium.actors.messages import RowLogprobs, SequenceEvent, Submit, TextParams, TokenBatch
from actorium.actors.params import ResolvedParams


def ints(*values: int) -> bytes:
    return np.array(values, np.int32).tobytes()


def submit(rid: str, n: int = 1, prompt: bytes = ints(1, 2, 3)) -> Submit:
    return Submit(rid, b"client", prompt, n, ResolvedParams(max_tokens=9), TextParams(), seed=7)


def batch(*rows: tuple[int, int, list[int]], events: list[SequenceEvent] | None = None,
          ) -> TokenBatch:
    """rows: (sid, start, tokens)"""
    return TokenBatch(1, np.array([r[0] for r in rows], np.int64).tobytes(),
                      ints(*(r[1] for r in rows)),
                      bytes(len(r[2]) for r in rows), ints(*(t for r in rows for t in r[2])),
                      events or [])


def admission(submit: Submit, sid: int) -> LedgerRecord:
    """The record of a request whose first sequence is `sid`."""
    return make_record(ADMISSION, AdmissionRecord(submit, sid))


def row(*values: float, k: int = 2) -> RowLogprobs:
    count = len(values)
    return RowLogprobs(0, 0, np.array(values, np.float32).tobytes(), ints(*range(count)),
                       ints(*range(k * count)), np.zeros(k * count, np.float32).tobytes())


def fill(ledger: Ledger, rids: str) -> None:
    for i, rid in enumerate(rids):
        ledger.append(ADMISSION, AdmissionRecord(submit(rid), 1 + i))
        ledger.append(BATCH, batch((1 + i, 0, [i, i])))
        ledger.commit()


def read_all(directory: Path) -> tuple[list[LedgerRecord], list[DamagedRange]]:
    """Every whole record of all segments, and the damaged ranges (see `read_segment`)."""
    records: list[LedgerRecord] = []
    damaged: list[DamagedRange] = []
    for path in segments(directory):
        records_read, bad = read_segment(path)
        records, damaged = records + records_read, damaged + bad
    return records, damaged
