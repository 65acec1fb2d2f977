"""One group of rows, in a process of its own."""

from __future__ import annotations

import faulthandler
import importlib
import os
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import monotonic, sleep
from typing import Any

import torch

from .machine import CaptureFailed, Cuda, Double, broken
from .plan import SLOWER, Group, Row
from .record import BROKEN_CODE, LEFT_OUT, RIGHT, SLOW, WRONG, Record, one_line
from .report import too_slow

ENDING = 5.0
"""Seconds that a process keeps to end in."""


class Bench:
    """Rows of a group: each is tried, within its limits, and costs none but itself."""

    def __init__(self, record: Record, group: Group, machine: Cuda, seconds: float,
                 limit: float = 0.0, faults: Sequence[str] = ()) -> None:
        """seconds: that it has; limit: of every row, instead of its own; faults: "row=raise",
        hang, capture, exit or wrong, to see what that costs."""
        self.record, self.group, self.machine = record, group, machine
        self.toy, self.device = machine.toy, machine.device
        self._until, self._limit = monotonic() + seconds, limit
        self._rows = {row.name: row for row in group.rows}
        self.free_gib = machine.free_gib()
        """When the process began: what a row needs holds the model that others have opened."""
        there = record.group()
        self._done = {row["name"] for row in there["rows"]} | {
            each["name"] for each in there["skipped"]}
        self._faults = dict(fault.rsplit("=", 1) for fault in faults)
        self._watch()

    @property
    def left(self) -> float:
        return self._until - monotonic()

    def size(self, full: int, toy: int) -> int:
        return toy if self.toy else full

    def wants(self, *names: str) -> bool:
        """Whether any of these rows (of all) is still to be measured and fits: what they need is
        worth being made."""
        wanted = [self._rows[name] for name in names or self._rows]
        return any(row.name not in self._done and self._fits(row) for row in wanted)

    @contextmanager
    def row(self, name: str) -> Iterator[bool]:
        """A row, which may fail without the others. False: it is there, or does not fit into time
        or memory, which has been said."""
        row, again = self._rows[name], name in self._done
        self._done.add(name)
        if again or not self._has_room(row):
            yield False
            return
        with self.trying(name, row.limit):
            self._inject(name)
            yield True
            self.judge(name)

    @contextmanager
    def trying(self, name: str, limit: float = 60.0) -> Iterator[None]:
        """Something that may fail. What takes longer ends the process, with all stacks in the
        log."""
        limit = min(self._limit or limit * (SLOWER if self.toy else 1), max(1.0, self.left))
        self.record.begin(name, limit)
        faulthandler.dump_traceback_later(limit, exit=True)
        try:
            yield
        except torch.OutOfMemoryError as error:
            self.record.skip(name, f"out of memory: {one_line(error)}")
        except CaptureFailed as error:
            traceback.print_exc()
            self.record.skip(name, one_line(error))
            raise
        except Exception as error:
            traceback.print_exc()
            self.record.skip(name, one_line(error))
            if broken(error):
                raise CaptureFailed("the device's context is lost") from error
        finally:
            self.record.end()
            self._watch()
            self.machine.release()

    def spoils(self, name: str) -> bool:
        return self._faults.get(name) == "wrong"

    def compared(self, name: str, error: float, tolerance: float, **more: Any) -> bool:
        """Whether a result is near enough to its reference, which the row says as well."""
        right = error <= tolerance
        self.record.add(name, verdict=RIGHT if right else WRONG, error=error, tolerance=tolerance,
                        **more)
        if not right:
            self.record.skip(name, f"an error of {error:.3g}, {tolerance:.3g} is allowed", WRONG)
        return right

    def same(self, name: str, got: Any, want: Any) -> bool:
        """Whether tokens, arrays of one shape, are those of their reference."""
        got = got + 1 if self.spoils(name) else got
        return self.compared(name, float((got != want).mean()), 0.0, compared=got.size,
                             distinct=len({*want.flatten().tolist()}))

    def judge(self, name: str) -> None:
        """A row that is there and not wrong is slow or right."""
        row = self.record.row(name)
        if row and row.get("verdict") != WRONG:
            why = too_slow(self.group.name, row)
            self.record.add(name, False, verdict=SLOW if why else RIGHT, **({"why": why} if why
                                                                            else {}))

    def _watch(self) -> None:
        """Outside of rows: the group's own time."""
        faulthandler.dump_traceback_later(max(1.0, self.left), exit=True)

    def _fits(self, row: Row) -> bool:
        return self.free_gib >= row.gib

    def _has_room(self, row: Row) -> bool:
        if not self._fits(row):
            self.record.skip(row.name, f"it needs {row.gib:.0f} GiB, {self.free_gib:.0f} are "
                             "free", LEFT_OUT)
            return False
        if self.left < row.needs + ENDING and not self.toy:
            self.record.skip(row.name, f"{max(0, self.left):.0f} s are left", LEFT_OUT)
            return False
        return True

    def _inject(self, name: str) -> None:
        fault = self._faults.get(name)
        if fault == "raise":
            raise RuntimeError("a fault, as was asked for")
        if fault == "capture":
            raise CaptureFailed("as was asked for")
        if fault == "exit":
            os._exit(7)
        if fault == "hang":
            sleep(3600)


def run(record: Record, group: Group, seconds: float, toy: bool, options: Any) -> int:
    """All of a group's rows that are still missing; the exit code. options: of the command."""
    faulthandler.enable(all_threads=True)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    machine = Double(options.memory or 1e9) if toy else Cuda()
    torch.manual_seed(0)
    try:
        bench = Bench(record, group, machine, seconds, options.row_limit, options.fault)
        bench.record.change(lambda own: (own["facts"].pop("error", None),
                                         own["facts"].update(free_gib=bench.free_gib)))
        bench.record.change_all(lambda all_: all_["facts"].update(machine.facts()))
        if bench.wants():
            module, _, function = group.runs.partition(".")
            getattr(importlib.import_module(f".{module}", __package__), function)(
                bench, **group.options)
        for row in group.rows:  # those that do not fit, where nothing did
            if not bench.wants(row.name):
                with bench.row(row.name):
                    pass
    except CaptureFailed:
        return BROKEN_CODE
    except Exception as error:
        traceback.print_exc()
        why = one_line(error)
        record.change(lambda own: own["facts"].update(error=why))
        return BROKEN_CODE if broken(error) else 1
    finally:
        faulthandler.cancel_dump_traceback_later()
        sys.stdout.flush()
    return 0

