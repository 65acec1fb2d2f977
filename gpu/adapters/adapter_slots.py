"""Which adapters lie in the slots of a model's layers, and which sequence has which."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from actorium.actors.messages import StepPlan
from actorium.gpu.adapters.adapted_layers import AdaptedLayers
from actorium.gpu.adapters.adapter_reader import HostAdapter
from actorium.gpu.step.input_batch import InputBatch
from actorium.gpu.step.staging import DeviceArrays, HostArrays, Upload
from actorium.kernels.adapter_rows import AdapterRows, most_blocks, sorted_rows

NOTHING = -1


class HostRows(NamedTuple):
    """A step's `AdapterRows` on the host."""

    rows: NDArray[np.int32]
    blocks: NDArray[np.int32]


class StagedRows(NamedTuple):
    """Where a step's `AdapterRows` lie in its upload."""

    rows: int
    blocks: int
    number: int
    """Of blocks."""


class AdapterSlots:
    """Fills the slots as plans admit sequences; of adapters that no sequence has, the one that was
    used longest ago makes room."""

    def __init__(self, layers: AdaptedLayers, sequences: int,
                 arrays: HostArrays | DeviceArrays, window: int = 1) -> None:
        """sequences: slots of sequences, the sink included; window: rows of a decode, at most."""
        self.layers, self._arrays = layers, arrays
        self.known: dict[tuple[int, int], HostAdapter] = {}
        """What has been read, by the scheduler's epoch and number."""
        self._of = np.full(sequences, NOTHING, np.int32)
        """Slot of the adapter of each slot's sequence."""
        self._held: list[bytes] = [b""] * layers.slots
        """Digests of what the slots hold."""
        self._order = list(range(layers.slots))
        """Slots, the one used longest ago first."""
        rows = sequences * window
        self._rows, self._blocks = arrays.resident((rows,), (most_blocks(rows, layers.slots), 3))
        """What graphs read of a step."""

    def apply(self, plan: StepPlan) -> None:
        """Takes in a plan's releases and admissions. Raises `ValueError` on an adapter that was
        not loaded, or for which there is no slot."""
        self._of[np.frombuffer(plan.release, np.int32)] = NOTHING
        for own in plan.admit:
            self._of[own.slot] = NOTHING
            if own.adapter:
                self._of[own.slot] = self._slot(plan.epoch, own.adapter)

    def reset(self) -> None:
        """Forgets every sequence."""
        self._of[:] = NOTHING

    def rows_of(self, step: InputBatch) -> HostRows | None:
        """Which rows of the step have an adapter; None: none has."""
        slots = np.repeat(self._of[step.decode], step.q_len)
        if step.extends is not None:
            own, _, counts = np.array(step.extends.rows, np.int32).T
            slots = np.concatenate((np.repeat(self._of[own], counts), slots))
        if not len(slots) or slots.max() < 0:
            return None
        return HostRows(*sorted_rows(slots))

    def stage(self, own: HostRows, up: Upload) -> StagedRows:
        """Adds them to the upload."""
        return StagedRows(up.add(own.rows), up.add(own.blocks.reshape(-1)), len(own.blocks))

    def staged(self, staged: StagedRows, up: Upload) -> AdapterRows:
        """The same on the device; the upload has been sent."""
        tensor = self._arrays.tensor
        return AdapterRows(tensor(up[staged.rows]),
                           tensor(up[staged.blocks]).view(staged.number, 3))

    def write(self, own: HostRows, rows: int, up: Upload) -> None:
        """Writes them to where a graph of so many rows reads them."""
        blocks = np.zeros((most_blocks(rows, self.layers.slots), 3), np.int32)
        blocks[:len(own.blocks)] = own.blocks
        for table, values in ((self._rows, own.rows), (self._blocks, blocks.reshape(-1))):
            up.cells(table, np.arange(len(values), dtype=np.int32), values)

    def written(self, rows: int) -> AdapterRows:
        """What a graph of so many rows reads."""
        tensor = self._arrays.tensor
        return AdapterRows(tensor(self._rows)[:rows],
                           tensor(self._blocks)[:most_blocks(rows, self.layers.slots)])

    def _slot(self, epoch: int, number: int) -> int:
        adapter = self.known.get((epoch, number))
        if adapter is None:
            raise ValueError(f"admit: adapter {number} was not loaded")
        if adapter.digest in self._held:
            slot = self._held.index(adapter.digest)
        else:
            used = set(self._of.tolist())
            free = [own for own in self._order if own not in used]
            if not free:
                raise ValueError(f"admit: more than {self.layers.slots} adapters at once")
            slot = free[0]
            self._fill(slot, adapter)
        self._order.remove(slot)
        self._order.append(slot)
        return slot

    def _fill(self, slot: int, adapter: HostAdapter) -> None:
        self._held[slot] = b""
        for stack in self.layers.stacks:
            stack.clear(slot)
        for own in adapter.parts:
            self.layers.stacks[own.product].fill(slot, own.module, own.a, own.b, own.scale)
        self._held[slot] = adapter.digest
