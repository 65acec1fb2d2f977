"""Copies of pages beside the steps: what is where, whichever stream is ahead; how many operations
they are; and what is left of them when a scheduler is gone."""

from __future__ import annotations

import random
import zlib
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from helpers_streams import ToyStreams
from torch import Tensor

from actorium.gpu.step.host_pages import COPY_KIND, LANDINGS, HostPages, PageStaging
from actorium.gpu.step.pools import stacked
from actorium.kernels.cpu.native_library import library

THINGS, SLOTS = 24, 60
KINDS = [[(3, (4, 2, 8), torch.bfloat16), (3, (4, 6), torch.bfloat16)],
         [(5, (4, 2, 8), torch.bfloat16)],
         [(2, (3, 5, 4), torch.float32), (2, (6, 2), torch.bfloat16)]]
"""[(layers, of a thing, dtype)] of each tensor: pages with scales, those of a group with more
layers, checkpoints."""
Rows = list[tuple[int, int, int]]


def rows_of(rows: Rows) -> bytes:
    return np.array(rows, np.int32).tobytes()


def make_kinds(device: torch.device, things: int = THINGS) -> list[list[Tensor]]:
    """The last kind's rows are not the first ones of their tensors, as those of checkpoints."""
    kinds = [[stacked(layers, (things + 2, *size), dtype, device)
              for layers, size, dtype in own] for own in KINDS]
    return [*([own[:, :things] for own in tensors] for tensors in kinds[:-1]),
            [own[:, 2:] for own in kinds[-1]]]


@dataclass
class Step:
    """One that is not over."""

    lost: Callable[[], bytes]
    stored: list[tuple[int, int, list[int]]] = field(default_factory=list)
    """(kind, tag, slots)"""
    fetched: list[tuple[int, int, list[int], int]] = field(default_factory=list)
    """(kind, tag, slots, number)"""


class Play:
    """Steps as a scheduler may plan them, two under way, and what has to be where. A thing that was
    written with a tag holds bytes that no other has."""

    def __init__(self, seed: int, streams: Any, device: torch.device, room: int = 4000) -> None:
        self.dice, self.streams, self.device = random.Random(seed), streams, device
        self.host = HostPages(make_kinds(device), 0, [SLOTS // 3] * 3)
        self.staging = PageStaging(self.host, max(room, *self.host.totals), streams)
        self.bases = [[torch.randint(256, (len(own), 1, own.shape[2]), dtype=torch.uint8)
                       for own in stacks] for stacks in self.host.stacks]
        self.there = [[base.to(device) for base in own] for own in self.bases]
        self.tags = 0
        self.pages: list[dict[int, int]] = [{}, {}, {}]
        """The tag of each thing in use, by number."""
        self.content: dict[tuple[int, int], int] = {}
        """By kind and number, of all that were ever written: 0 = zeros."""
        self.kept: list[tuple[int, int, list[int]]] = []
        """What is on the host."""
        self.corrupt: set[int] = set()
        """Slots."""
        self.busy: set[int] = set()
        self.free_slots = list(range(self.host.slots))
        self.steps: deque[Step] = deque()
        self.seen: list[tuple[bytes, list[Tensor]]] = []
        """What pages should have held, and copies that the stream of the steps has made."""
        self.found_corrupt = self.fetched = 0

    def bytes_of(self, kind: int, tag: int) -> bytes:
        if not tag:
            return bytes(self.host.totals[kind])
        return b"".join((base + tag).numpy().tobytes() for base in self.bases[kind])

    def write(self, kind: int, number: int) -> None:
        """What a step's forward pass does."""
        self.tags += 1
        tag = 1 + self.tags % 255
        for stack, base in zip(self.host.stacks[kind], self.there[kind], strict=True):
            torch.add(base[:, 0], tag, out=stack[:, number])
        self.pages[kind][number] = self.content[kind, number] = tag

    def look(self, kind: int, number: int) -> None:
        """What the stream of the steps sees there now."""
        copies = [torch.empty(len(own), own.shape[2], dtype=torch.uint8, device=self.device)
                  for own in self.host.stacks[kind]]
        for copy, stack in zip(copies, self.host.stacks[kind], strict=True):
            copy.copy_(stack[:, number])
        self.seen.append((self.bytes_of(kind, self.content.get((kind, number), 0)), copies))

    def step(self) -> None:
        store, load = Rows(), Rows()
        step = Step(bytes)
        for kind in range(3):  # evicted where no slot can be had, or ended without being kept
            for number in [n for n in self.pages[kind] if self.dice.random() < 0.1]:
                del self.pages[kind][number]
        for kind in self.dice.choices(range(3), k=self.dice.choice((0, 0, 4, 12))):
            parts = self.host.parts[kind]
            if self.pages[kind] and len(self.free_slots) >= parts:
                number = self.dice.choice(list(self.pages[kind]))
                slots = [self.free_slots.pop(self.dice.randrange(len(self.free_slots)))
                         for _ in range(parts)]
                step.stored.append((kind, self.pages[kind].pop(number), slots))
                store += [(kind * COPY_KIND + part, number, slot)
                          for part, slot in enumerate(slots)]
        self.kept += step.stored
        targets = set[tuple[int, int]]()
        for kind, tag, slots in self.dice.sample(self.kept, self.dice.randrange(len(self.kept) + 1)
                                                 ) if self.kept else []:
            free = [n for n in range(THINGS) if n not in self.pages[kind]
                    and (kind, n) not in targets | self.under_way()]
            if free:
                number = self.dice.choice(free)
                targets.add((kind, number))
                step.fetched.append((kind, tag, slots, number))
                load += [(kind * COPY_KIND + part, number, slot)
                         for part, slot in enumerate(slots)]
        step.lost = self.staging.begin(rows_of(store), rows_of(load))
        self.busy |= {slot for *_, slots in step.stored for slot in slots}
        for kind in range(3):  # what was evicted is written, too
            free = [n for n in range(THINGS) if n not in self.pages[kind]
                    and (kind, n) not in targets | self.under_way()]
            for number in self.dice.sample(free, min(len(free), self.dice.randrange(8))):
                self.write(kind, number)
        self.steps.append(step)

    def under_way(self) -> set[tuple[int, int]]:
        return {(kind, number) for step in self.steps for kind, _, _, number in step.fetched}

    def harvest(self) -> None:
        step = self.steps.popleft()
        lost = set(np.frombuffer(step.lost(), np.int32).tolist())
        read = {slot for _, _, slots, _ in step.fetched for slot in slots}
        assert lost == self.corrupt & read
        self.found_corrupt += len(lost)
        for kind, tag, slots in step.stored:
            found = self.host.rows[slots].tobytes()
            assert found[:self.host.totals[kind]] == self.bytes_of(kind, tag)
            assert not any(found[self.host.totals[kind]:])
            assert self.host.sums[slots].tolist() == [zlib.crc32(self.host.rows[slot])
                                                      for slot in slots]
            self.busy -= set(slots)
        for kind, tag, slots, number in step.fetched:
            if not lost & set(slots):
                self.pages[kind][number] = self.content[kind, number] = tag
                self.fetched += 1
            self.look(kind, number)  # of one that is lost: what was there
        reading = {slot for own in self.steps for _, _, slots, _ in own.fetched for slot in slots}
        for own in list(self.kept):
            slots = own[2]
            if not (self.busy | reading) & set(slots):
                if self.corrupt & set(slots) or self.dice.random() < 0.3:
                    self.kept.remove(own)
                    self.free_slots += slots
                    self.corrupt -= set(slots)
                elif self.dice.random() < 0.1:
                    slot = self.dice.choice(slots)
                    self.host.rows[slot, self.dice.randrange(self.host.width)] ^= 1
                    self.corrupt.add(slot)

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.step()
            if len(self.steps) > 1:
                self.harvest()
        while self.steps:
            self.harvest()
        for kind in range(3):
            for number in range(THINGS):
                self.look(kind, number)
        if isinstance(self.streams, ToyStreams):
            self.streams.run()
        else:
            torch.cuda.synchronize()
        for wanted, copies in self.seen:
            assert b"".join(own.cpu().numpy().tobytes() for own in copies) == wanted
        self.seen.clear()


def play(seed: int, deaf: str = "") -> Play:
    torch.manual_seed(seed)
    streams = ToyStreams(seed, deaf)
    with streams:
        own = Play(seed, streams, torch.device("cpu"))
        own.run(25)
    return own


def test_everything_is_where_it_should_be_whichever_stream_is_ahead() -> None:
    """Evicted and filled again in one step, stored and read in one step or with two under way, of
    several rounds, and with slots that are corrupt."""
    if library() is None:
        pytest.skip("no C kernels here")
    fetched = corrupt = 0
    for seed in range(8):
        own = play(seed)
        fetched, corrupt = fetched + own.fetched, corrupt + own.found_corrupt
    assert fetched > 400 and corrupt > 20


@pytest.mark.parametrize("deaf", ["main", "1", "2", "host of 1", "host of 2"])
def test_no_wait_can_be_left_out(deaf: str) -> None:
    if library() is None:
        pytest.skip("no C kernels here")
    with pytest.raises(AssertionError):
        for seed in range(20):
            play(seed, deaf)


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[
    pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")])])
def test_a_step_that_is_late_with_all_its_streams(device: str, native: bool) -> None:
    """On a device that is far behind; on a CPU other streams than the steps' are."""
    own = Play(7, ToyStreams(None) if device == "cpu" else torch.cuda, torch.device(device))
    own.host.native &= native
    size = 4096 if device == "cuda" else 4
    with torch.inference_mode():
        busy = torch.randn(size, size, device=device)
        for _ in range(20):
            for _ in range(20):
                busy = (busy @ busy).clamp_(-1, 1)
            own.run(5)
    assert own.fetched > 200


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[
    pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")])])
def test_512_pages_of_32_layers_are_a_few_operations(device: str) -> None:
    """Where every page of every layer was one."""
    counted = ToyStreams(1)
    stack = stacked(32, (520, 16, 2, 8), torch.bfloat16, torch.device(device))
    scales = stacked(32, (520, 16, 2), torch.bfloat16, torch.device(device))
    host = HostPages([[stack, scales]], 0, [520])
    staging = PageStaging(host, 512 * host.width, counted if device == "cpu" else torch.cuda)
    everything = [(0, 8 + i, i) for i in range(512)]
    profile = nullcontext() if device == "cpu" else torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CUDA])
    with torch.inference_mode(), profile, counted if device == "cpu" else nullcontext():
        stack[:, 8:].copy_(torch.randn(32, 512, 16, 2, 8))
        before = len(counted.operations)
        staging.begin(rows_of(everything), b"")()
        stack[:, 8:].copy_(torch.zeros(()))
        assert staging.begin(b"", rows_of(everything))() == b""
        counted.run()
    if device == "cpu":
        found = counted.operations[before:]
        assert found == ["aten.index_select.out", "aten.index_select.out", "aten.copy_.default",
                         "aten.copy_.default",  # the test's own
                         "aten.copy_.default", "aten.index_copy_.default",
                         "aten.index_copy_.default"]
    else:
        assert len([own for own in profile.events() if own.device_type.name == "CUDA"]) <= 20
    assert stack[:, 8:].float().std() > 0.9 and not stack[:, :8].any()


def test_more_than_has_room_goes_in_rounds_and_no_round_is_forgotten() -> None:
    """Ten rounds of one step, of which four can wait for its result."""
    streams = ToyStreams(None)
    stack = stacked(2, (60, 64), torch.uint8, torch.device("cpu"))
    stack[:] = torch.randint(256, stack.shape, dtype=torch.uint8)
    before = stack.clone()
    host = HostPages([[stack]], 0, [50])
    staging = PageStaging(host, 5 * host.width + 8, streams)
    assert staging.nbytes == 2 * (5 * 128 + 8)
    lost = staging.begin(rows_of([(0, 9 + i, i) for i in range(50)]), b"")
    assert len(staging._free) == 0 and len(staging._pending) == LANDINGS + 1
    assert lost() == b"" and len(staging._free) == LANDINGS
    stack[:] = 0
    assert staging.begin(b"", rows_of([(0, 9 + i, i) for i in range(50)]))() == b""
    assert torch.equal(stack[:, 9:59], before[:, 9:59]) and not stack[:, :9].any()


def test_copies_of_a_replaced_scheduler_touch_nothing() -> None:
    own = Play(3, ToyStreams(None), torch.device("cpu"))
    for number in range(4):
        own.write(0, number)
    before = own.host.begin  # of a CPU: at once
    before(rows_of([(0, 1, 5)]), b"")
    own.host.rows[9] = 7
    lost = own.staging.begin(rows_of([(0, 2, 9)]), rows_of([(0, 3, 5)]))
    own.staging.drop()
    assert lost() == b"" and (own.host.rows[9] == 7).all()
    own.look(0, 3)
    assert own.staging.begin(rows_of([(0, 2, 9)]), b"")() == b""  # another's, in order
    assert own.host.rows[9].tobytes() == own.bytes_of(0, own.content[0, 2])
    own.run(10)


def test_a_checkpoint_without_all_of_its_parts_is_refused() -> None:
    own = Play(3, ToyStreams(None), torch.device("cpu"))
    assert own.host.parts[1] == 2
    own.staging.begin(rows_of([(COPY_KIND, 1, 5), (COPY_KIND + 1, 1, 6)]), b"")()
    with pytest.raises(ValueError, match="parts"):
        own.staging.begin(b"", rows_of([(COPY_KIND, 1, 5)]))()

