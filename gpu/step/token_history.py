"""The tokens of sequences with logits processors, on the device."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from actorium.gpu.step.staging import Array, DeviceArrays, HostArrays, Upload

I32 = NDArray[np.int32]


class TokenHistory:
    """A row of tokens for each of these sequences. Rows are made when the first request asks."""

    def __init__(self, arrays: HostArrays | DeviceArrays, slots: int, width: int) -> None:
        """width: tokens of the longest sequence."""
        self._arrays, self._slots, self.width = arrays, slots, width
        self.tokens: Array = None
        """i32[rows, width]; row 0 is the sink."""
        self._rows: dict[int, int] = {}
        """By slot."""
        self._free: list[int] = []

    def rows_of(self, slots: I32) -> I32:
        """The row of each slot; 0 where it has none."""
        return np.array([self._rows.get(slot, 0) for slot in slots.tolist()], np.int32)

    def admit(self, sequences: dict[int, I32], up: Upload) -> None:
        """New sequences, by slot, with their tokens so far."""
        for slot in sequences:
            if not self._free:
                self._grow()
            self._rows[slot] = self._free.pop()
        for slot, tokens in sequences.items():
            up.rows(self.tokens[self._rows[slot]], np.arange(len(tokens), dtype=np.int32), tokens)

    def forget(self, slot: int) -> None:
        """Frees the slot's row, if it has one."""
        row = self._rows.pop(slot, None)
        if row is not None:
            self._free.append(row)

    def clear(self) -> None:
        """Gives back the memory; no sequence is left."""
        self.tokens, self._free = None, []

    def _grow(self) -> None:
        """Twice as many rows."""
        old = 1 if self.tokens is None else self.tokens.shape[0]
        new = min(max(4, 2 * old), self._slots)
        wider = self._arrays.full((new, self.width), 0, "int32")
        if self.tokens is not None:
            wider[:old] = self.tokens
        self.tokens = wider
        self._free = list(range(new - 1, old - 1, -1))
