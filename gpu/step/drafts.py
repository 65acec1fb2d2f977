"""Draft tokens of every slot: the tokens on the device, and the host's bounds on how many count."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from actorium.actors.messages import RowDrafts
from actorium.gpu.step.staging import Array, DeviceArrays, HostArrays, Upload

I32 = NDArray[np.int32]


class DraftTables:
    """Arrays are device arrays of `arrays` unless named host."""

    def __init__(self, arrays: HostArrays | DeviceArrays, slots: int, max_drafts: int) -> None:
        """max_drafts: drafts that a sequence can have in a step; 0 = nothing is ever drafted."""
        self.max_drafts = max_drafts
        self.tokens = arrays.full((slots, max_drafts), 0, "int64")
        """i64[slots, max_drafts]: the first `made` guess what follows the last token."""
        self.accepted = arrays.full((slots,), 0, "int64")
        """Of the drafts that the last step verified; 0 after an admission, and where a sequence had
        ended before."""
        self.held = np.zeros(slots, np.int32)
        """Host: drafts that were planned for each slot."""
        self.made = np.zeros(slots, np.int32)
        """Host: drafts that each slot has: fewer than planned where what makes them found none, and
        the host knows."""
        self._counted = isinstance(arrays, HostArrays)
        """Whether rows can have different numbers of drafts."""
        self._serial = np.zeros(slots, np.int64)
        self._known: deque[tuple[I32, NDArray[np.int64], I32, I32]] = deque()

    def clear(self) -> None:
        """Forget all drafts, and results that were not settled."""
        self.tokens[...] = 0
        self.accepted[...] = 0
        self.held[:] = self.made[:] = 0
        self._known.clear()

    def admit(self, slots: I32, up: Upload) -> None:
        """New sequences have none."""
        self.held[slots] = self.made[slots] = 0
        self._serial[slots] += 1
        up.rows(self.accepted, slots, np.zeros(len(slots), np.int32))

    def window(self, decode: I32) -> tuple[int, I32 | None]:
        """The most drafts that any of these slots has, and how many each has, unless as many as
        were planned. Raises `ValueError` where different numbers were planned."""
        if not len(decode):
            return 0, None
        held, made = self.held[decode], self.made[decode]
        drafts = int(held[0])
        if (held != drafts).any():
            other = int(np.flatnonzero(held != drafts)[0])
            raise ValueError(f"decode: slot {decode[0]} has {drafts} drafts and slot "
                             f"{decode[other]} {held[other]}: the plans did not take both along")
        return int(made.max()), None if made.tobytes() == held.tobytes() else made

    def force(self, forced: Sequence[RowDrafts], decode: I32, up: Upload) -> None:
        """Put the scheduler's drafts in the place of those that these slots have; decode: all that
        a step decodes, which have as many as the longest then, filled up with 0. Raises
        `ValueError` on drafts that do not fit."""
        slots = np.array([own.slot for own in forced], np.int32)
        rows = np.zeros((len(forced), self.max_drafts), np.int32)
        counts = np.array([len(own.tokens) // 4 for own in forced], np.int32)
        if not np.isin(slots, decode).all() or int(counts.max()) > self.max_drafts:
            raise ValueError(f"forced: {counts.max()} drafts for the slots {slots.tolist()} of "
                             f"{decode.tolist()}; {self.max_drafts} can be made")
        for row, own, count in zip(rows, forced, counts.tolist(), strict=True):
            row[:count] = np.frombuffer(own.tokens, np.int32)
        held = self.held[decode]
        planned = max(int(held.max()), int(counts.max()))
        others = decode[~np.isin(decode, slots)]
        filled = np.arange(planned) >= self.made[others][:, None]
        places = (others[:, None] * self.max_drafts + np.arange(planned))[filled]
        if len(places):
            up.cells(self.tokens, places.astype(np.int32), np.zeros(len(places), np.int32))
        up.rows(self.tokens, slots, rows)
        self.held[decode] = planned
        if self._counted:
            self.made[slots] = counts
        else:
            self.made[decode] = planned

    def plan(self, slots: I32, drafts: int) -> None:
        """So many are made for these slots now."""
        self.held[slots] = self.made[slots] = drafts

    def reported(self, slots: I32, slots_d: Array, drafts: int) -> Array:
        """i64[n, drafts]: the tokens drafted for these slots; -1 behind the last of each."""
        tokens, made = self.tokens[slots_d, :drafts], self.made[slots]
        if (made < drafts).any():  # only where the host makes them, with numpy
            tokens[np.arange(drafts) >= made[:, None]] = -1
        return tokens

    # --- what the host learns from a finished step -----------------------------------------------

    def serials(self, slots: I32) -> NDArray[np.int64]:
        """Names of the sequences in these slots now."""
        return self._serial[slots]

    def learn(self, slots: I32, serials: NDArray[np.int64], raised: I32, emitted: I32) -> None:
        """Sequences of a step emitted so many tokens each; the bounds of their lengths had been
        raised by `raised` and by 1. From any thread."""
        self._known.append((slots, serials, raised - emitted, emitted - 1))

    def settle(self, high: I32, low: I32) -> None:
        """Make bounds of lengths (host, by slot) exact, as far as steps are known. Sequences that
        have left are skipped."""
        while self._known:
            slots, serials, surplus, gain = self._known.popleft()
            here = self._serial[slots] == serials
            high[slots[here]] -= surplus[here]
            low[slots[here]] += gain[here]
