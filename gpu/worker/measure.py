"""Measures at the start: the bytes that the worker holds, to compare with the memory plan, and the
means of keys that `SageAttention` takes off.

On CUDA torch counts what it allocates. A CPU has no such books, so there the process is asked for
its resident pages; those of the caches, which take their memory when they are first written, are
asked for apart and taken off."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from time import perf_counter

import numpy as np
import torch
from torch import Tensor

from actorium.actors.messages import Admit, StepPlan
from actorium.actors.params import ResolvedParams
from actorium.gpu.attention.attention_backend import SageAttention, TorchAttention
from actorium.gpu.attention.backend_choice import StepAttention
from actorium.gpu.models.decoder import LoadedModel
from actorium.gpu.plan.non_cache_memory import StepSize
from actorium.gpu.step.runner import ModelRunner
from actorium.gpu.step.tables import SlotTables
from actorium.gpu.step.text_proposer import TextProposer
from actorium.gpu.worker.warmup import FEW, WarmupCase

PROFILE_SECONDS = 0.1
"""What the next step of the profile at start-up may take on a CPU. It comes on top of the time to
the first token; what is left of the largest step is measured when requests bring it."""
LONGEST_TOKENS = 1 << 22
"""Of prefixes of decodes at start, together: admitting takes the host's memory and time."""
GROWTH = 1.5
"""A step is measured when it is so many times larger than all before it."""
LOG = logging.getLogger("actorium.attention")
TOKENS = 256
GOLDEN = 0x9E3779B1
"""2**32 / the golden ratio: its multiples spread evenly."""


class Footprint:
    """Bytes by name (weights, tables, states, pages, workspace): measured beside planned."""

    def __init__(self, planned: Mapping[str, int], measured: Mapping[str, int],
                 step: StepSize = StepSize(0, 0)) -> None:
        """step: the largest that `workspace` was measured at; 0 = none."""
        self.planned, self.measured, self.step = dict(planned), dict(measured), step
        self.capture_seconds: float | None = None
        """What it took to capture graphs or programs at the start; None = none were."""
        self.formats: dict[str, int] = {}
        """Bytes of the weights by how they are held, see `bytes_by_format`."""

    def gauges(self) -> dict[str, float]:
        """For the heartbeat: `<name>_bytes`, `<name>_bytes_planned`, the tokens and rows of the
        step that the workspace was measured at, `weight_format_<words>`, in bytes, and
        `graph_capture_seconds`."""
        gauges: dict[str, float] = {f"{name}_bytes": n for name, n in self.measured.items()}
        gauges |= {f"{name}_bytes_planned": n for name, n in self.planned.items()}
        gauges |= {"workspace_tokens": self.step.tokens, "workspace_rows": self.step.rows}
        gauges |= {f"weight_format_{name}": n for name, n in self.formats.items()}
        if self.capture_seconds is not None:
            gauges["graph_capture_seconds"] = self.capture_seconds
        return {name: float(value) for name, value in gauges.items()}


class WorkspaceMeter:
    """Follows the temporaries of steps on a CPU: the most that the process has held beyond what it
    held when the meter was made, less the growth of the caches.

    Made when one small step has been run, so that the code that every step needs is in memory.
    """

    def __init__(self, footprint: Footprint, caches: Iterable[Tensor]) -> None:
        self.footprint = footprint
        self._caches = list(caches)
        self._peak = "VmHWM" if _reset_peak() else "VmRSS"
        self._base = _status("VmRSS") - resident_bytes(self._caches)

    def leave_out(self, memory: Iterable[Tensor]) -> None:
        """What is counted apart as well, of which nothing has been written yet."""
        self._caches += memory

    def measure_if_larger(self, plan: StepPlan, window: int = 1) -> bool:
        """A step has been run: measure if it was larger than all before; True if so. window: rows
        of each of its decodes."""
        step = size_of(plan, window)
        seen = self.footprint.step
        if step.tokens < GROWTH * seen.tokens and step.rows < GROWTH * seen.rows:
            return False
        self.measure(step)
        return True

    def measure(self, step: StepSize) -> None:
        """Measure after a step of this size."""
        held = _status(self._peak) - resident_bytes(self._caches) - self._base
        footprint, seen = self.footprint, self.footprint.step
        footprint.measured["workspace"] = max(footprint.measured.get("workspace", 0), held)
        footprint.step = StepSize(max(seen.tokens, step.tokens), max(seen.rows, step.rows))


def size_of(plan: StepPlan, window: int = 1) -> StepSize:
    """Tokens and rows of a step; rows: at most, since not every extend ends its prompt."""
    extend = np.frombuffer(plan.extend, np.int32).reshape(-1, 2)
    decodes = len(plan.decode) // 4 * window
    return StepSize(int(extend[:, 1].sum()) + decodes, len(extend) + decodes)


def profile(meter: WorkspaceMeter, largest: int, run: Callable[[int], StepSize],
            agreed: Callable[[float], float] = float) -> None:
    """Run ever larger steps up to `largest` tokens, as long as the next one is quick.

    run(tokens): runs a step of so many tokens and returns its size. agreed: of a number that each
    rank has of its own, the one that all go by.
    """
    tokens = min(8, largest)
    while True:
        began = perf_counter()
        meter.measure(run(tokens))
        spent = agreed(perf_counter() - began)
        if tokens == largest or 4 * spent > PROFILE_SECONDS:
            return
        tokens = min(4 * tokens, largest)


def longest_cases(t: SlotTables, budget: int) -> list[WarmupCase]:
    """Returns prompts with which temporaries are largest: one that takes the largest step alone,
    one whose last chunk does, behind the longest prefix there can be, and a question behind it, all
    with log-probabilities of their tokens; then decodes behind such prefixes, which leave parts
    for a merge, as the question does, where they are few."""
    longest = t.max_len - 1
    most, params = max(1, min(budget, longest)), ResolvedParams(max_tokens=1, prompt_logprobs=0)
    parts = {(0, most), (longest - most, most), (longest - min(FEW, most), min(FEW, most))}
    rows = max(1, min(t.slots - 1, most, LONGEST_TOKENS // t.max_len))
    return [*(WarmupCase([part], params=params) for part in sorted(parts)),
            WarmupCase([(max(0, longest - 2), 1)] * rows, [0])]


# --- bytes ---------------------------------------------------------------------------------------

def held_bytes(runner: ModelRunner) -> dict[str, int]:
    """Bytes that the runner's tables, states and pages were allocated with, the slots of adapters,
    and what is kept of images."""
    held = {"tables": tables_bytes(runner.tables),
            "states": runner.states.bytes if runner.states else 0,
            "pages": sum(pool.bytes for pool in runner.all_pools)}
    if runner.adapters is not None:
        held["adapters"] = runner.adapters.layers.nbytes
    suffix = runner.proposers.get("suffix")
    if isinstance(suffix, TextProposer) and suffix.earlier is not None:
        held["earlier_answers"] = suffix.earlier.nbytes
    images = runner.tables.images
    return held if images is None else {**held, "encoder_cache": images.kept.nbytes}


def tables_bytes(tables: SlotTables) -> int:
    """Bytes of the resident tables, without what rare parameters add to them."""
    drafts = (tables.drafts.tokens, tables.drafts.accepted) if tables.drafts.max_drafts else ()
    history = () if tables.history is None else (tables.history,)
    return sum(array.nbytes for array in (tables.last_token, tables.seq_len, tables.ended,
                                          tables.record, tables.eos, *tables.pages, *drafts,
                                          *history))


def cache_tensors(runner: ModelRunner) -> list[Tensor]:
    """Every tensor of pages and states, of adapters' slots, and of what is kept of images."""
    found = [own for pool in runner.all_pools for own in pool.tensors]
    if runner.tables.images is not None:
        found.append(runner.tables.images.kept)
    if runner.adapters is not None:
        found += [own for stack in runner.adapters.layers.stacks for own in (stack.a, stack.b)]
    if runner.states is not None:
        found += [part for layer in runner.states.layers for part in layer]
    return found


def taken(device: torch.device) -> int:
    """Bytes that the process has taken on the device: torch's on CUDA, else those of memory that no
    file lies behind, without what was freed and is kept for later."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    return _status("RssAnon")


def resident_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of CPU tensors that lie in memory; those never touched do not."""
    mincore = getattr(ctypes.CDLL(None), "mincore", None)
    if mincore is None:
        return 0
    mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    page, total = mmap.PAGESIZE, 0
    for tensor in tensors:
        first = tensor.data_ptr() // page * page
        pages = -(-(tensor.data_ptr() + tensor.nbytes - first) // page)
        there = np.zeros(pages, np.uint8)
        if mincore(first, pages * page, there.ctypes.data) == 0:
            total += page * int((there & 1).sum())
    return total


def _status(field: str) -> int:
    """Bytes of a field of this process's status; 0 where there is none."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(f"{field}:"):
                return 1024 * int(line.split()[1])
    return 0


def _reset_peak() -> bool:
    """Let the highest resident size be that of now. False where the system does not let us."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


# --- Means of keys -------------------------------------------------------------------------------

def measured_tokens(vocab: int, count: int) -> np.ndarray:
    """i32[count]: tokens spread evenly over a vocabulary, in no order."""
    spread = (np.arange(1, count + 1, dtype=np.uint64) * GOLDEN) & 0xFFFFFFFF
    return (spread * vocab >> 32).astype(np.int32)


@torch.inference_mode()
def measure_key_means(runner: ModelRunner, most: int) -> None:
    """Gives `SageAttention` the means of keys that it takes off, unless its pages hold codes.
    Leaves nothing else behind. No page may be in use, and the tables must be empty. most: tokens of
    a step.

    Keys of many models carry a bias, of their projection or of what the layer before always gives,
    that is larger than what tells them apart. It is measured as the mean of the keys of one prompt,
    of tokens from all over the vocabulary, by the reference's attention. So it follows from the
    model alone: the same for every rank, request, restart and order of requests. Pages hold keys as
    they are and outlive it; any other mean would do as well, only coarser.
    """
    model, t = runner.model, runner.tables
    assert isinstance(model, LoadedModel)
    backends = {id(own): own for own in model.attention if isinstance(own, SageAttention)}
    room = min(pool.pages for pool in runner.pools) - 1
    count = min(TOKENS, most, t.max_len - 1, room * t.page_size)
    if not backends or count < 1 or runner.pools[0].layers[0].dtype is torch.int8:
        return
    table = np.arange(1, 1 + -(-count // t.page_size), dtype=np.int32)
    ids, asked = measured_tokens(t.vocab, count), model.attention
    model.attention = StepAttention(TorchAttention(), TorchAttention(), model.attention.pages)
    try:
        runner.run(StepPlan(0, 0, admit=[Admit(
            1, ids.tobytes(), count, 0, np.tile(table, t.groups).tobytes(),
            ResolvedParams(max_tokens=1), 1)], extend=np.array([[1, count]], np.int32).tobytes()))
    finally:
        model.attention = asked
    runner.run(StepPlan(0, 0, release=np.array([1], np.int32).tobytes()))
    for pool in runner.pools:
        for layer in pool.layers:
            rows = layer[t.page_size:t.page_size + count, :layer.shape[1] // 2]
            for own in backends.values():
                own.means.store(layer, rows.double().mean(0))
    LOG.info("means of keys: of %d tokens", count)
