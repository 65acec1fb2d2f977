"""Graphs without a CUDA device: what work does is recorded, an operation at a time, and done again.

As with a real graph a replay knows nothing of Python: the same operations on the same tensors,
which stay where they are, with the same host numbers. Between replays all that nobody was promised
is poisoned, as if others had used the memory.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from unittest.mock import patch

import torch
from helpers_kinds import write_kind
from helpers_untouched import Untouched
from helpers_windows import Driver
from helpers_worker import CPU, Output, Ring, make_runner
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from actorium.actors.config.tree import Config, ModelConfig, SpeculationConfig
from actorium.actors.params import ResolvedParams
from actorium.gpu.graphs.decode_graphs import DecodeGraphRunner
from actorium.gpu.graphs.piecewise_graphs import PiecewiseGraphRunner
from actorium.gpu.models.registry import load_model
from actorium.gpu.plan.graph_memory import GraphShape
from actorium.gpu.step.runner import ModelRunner
from actorium.gpu.step.staging import DeviceArrays
from actorium.kernels.reference.experts import StackedExperts
from actorium.kernels.reference.torch_ops import TorchOps

T = TypeVar("T")
HOST_READS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::unique", "aten::masked_select",
              "aten::item", "aten::is_nonzero", "aten::equal", "aten::bincount")
"""Operations that wait for a device, or whose shapes depend on what is there."""
INT32_MAX = 2**31 - 1
HOST_DATA = ("aten::lift_fresh", "aten::lift", "aten::lift_fresh_copy")
"""Tensors made of Python numbers: a copy to a device that no graph can hold."""


@dataclass
class Operation:
    """One recorded operation and its result."""

    call: Any
    args: tuple[Any, ...]
    options: dict[str, Any]
    fresh: list[tuple[int, Tensor]]
    """(place among the results, result) of those in memory of their own."""


def _start(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _tensors(tree: Any) -> list[Tensor]:
    """Those in lists, tuples and dictionaries. It is asked about every operation."""
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, list | tuple):
        return []
    return [tensor for part in tree for tensor in _tensors(part)]


class _Recording(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Operation] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, options = func._schema.name, kwargs or {}
        if name in HOST_READS:
            raise AssertionError(f"{name} waits for the device")
        if name in HOST_DATA and args[0].ndim:  # a single number is part of a launch
            raise AssertionError(f"{name} brings host data into a graph")
        if name.startswith("aten::index") and any(t.dtype is torch.bool for t in _tensors(
                args[1:2])):
            raise AssertionError(f"{name} with a mask waits for the device")
        given = {_start(t) for t in _tensors((args, options))}
        out = func(*args, **options)
        fresh = [(i, t) for i, t in enumerate(_tensors(out)) if _start(t) not in given]
        self.operations.append(Operation(func, args, options, fresh))
        return out


class Own(NamedTuple):
    """A result that is not in memory of others."""

    tensor: Tensor
    start: int
    """Of its memory."""
    wrong: Tensor
    """Numbers that are not its own."""

    @classmethod
    def of(cls, tensor: Tensor) -> Own:
        number = math.nan if tensor.dtype.is_floating_point else INT32_MAX // 3
        wrong = torch.tensor(number).to(tensor.dtype)
        return cls(tensor, _start(tensor), wrong.expand(tensor.shape))


@dataclass(eq=False)
class Recorded:
    """Work that was recorded."""

    owner: RecordingCapturer
    operations: list[Operation]
    first: bool
    """It takes nothing of what others recorded: a step begins."""
    own: list[Own] = field(default_factory=list)
    promised: set[int] = field(default_factory=set)
    """Memory that Python holds: it stays until the next step begins."""
    given_up: dict[int, int] = field(default_factory=dict)
    """Memory that Python held, and how much had been recorded when it was borrowed: only what is
    recorded later can use it."""
    read_by: dict[int, int] = field(default_factory=dict)
    """Memory to the number of the last work recorded that takes it."""

    def replay(self) -> None:
        """All of it again."""
        self.owner.replayed(self)
        untouched = [each.before() for each in self.owner.watching]
        for each in self.operations:
            out = each.call(*each.args, **each.options)
            made = _tensors(out) if each.fresh else []
            for i, was in each.fresh:
                assert made[i].shape == was.shape, f"{each.call}: a shape that depends on data"
                was.copy_(made[i])
        for check in untouched:
            check()


class RecordingCapturer:
    """See `graphs.Capturer`."""

    def __init__(self) -> None:
        self.recorded: list[Recorded] = []
        self.watching: list[Untouched] = []
        self.replays = 0
        self._rubbish: dict[int, Rubbish] = {}
        """By the number of the work that is replayed, since something was recorded or borrowed."""

    def capture(self, run: Callable[[], T]) -> tuple[Recorded, T]:
        """See `graphs.Capturer`."""
        run()  # what a device does first
        with _Recording() as recording:
            out = run()
        own = [Own.of(t) for each in recording.operations for _, t in each.fresh]
        before = {each.start for other in self.recorded for each in other.own}
        read = {_start(t) for each in recording.operations
                for t in _tensors((each.args, each.options))}
        done = Recorded(self, recording.operations, not before & read, own)
        for other in self.recorded:
            for start in read & {each.start for each in other.own}:
                other.read_by[start] = len(self.recorded)
        self.recorded.append(done)
        self._rubbish.clear()
        done.promised |= {_start(t) for t in _tensors(_flat(out))}
        done.replay()
        return done, out

    def borrow(self, tensor: Tensor) -> Tensor:
        """See `graphs.Capturer`."""
        start = _start(tensor)
        self._rubbish.clear()
        for other in self.recorded:
            if start in other.promised:
                other.promised.discard(start)
                other.given_up[start] = len(self.recorded)
        return tensor

    def replayed(self, now: Recorded) -> None:
        """What is in nobody's hands when this is replayed is rubbish: all of it when a step begins,
        else what had been borrowed when this was recorded, and what this and later work does not
        take."""
        self.replays += 1
        at = self.recorded.index(now)
        if at not in self._rubbish:
            self._rubbish[at] = Rubbish([
                each for other in self.recorded for each in other.own
                if now.first or (each.start not in other.promised
                                 and other.given_up.get(each.start, 0) <= at
                                 and other.read_by.get(each.start, -1) < at)])
        self._rubbish[at].poison()

    def holds(self, tensor: Tensor) -> bool:
        """Whether this is memory of something recorded that was not borrowed: no later capture can
        use it, as long as somebody has the tensor."""
        return any(_start(tensor) in other.promised for other in self.recorded)


def tensors_of(out: Any) -> list[Tensor]:
    """In lists, tuples and dataclasses alike."""
    return _tensors(_flat(out))


def _flat(out: Any) -> Any:
    """Tensors in lists, tuples and dataclasses alike."""
    if hasattr(out, "__dataclass_fields__"):
        return [_flat(getattr(out, name)) for name in out.__dataclass_fields__]
    if isinstance(out, list | tuple):
        return [_flat(part) for part in out]
    return out if isinstance(out, Tensor) else None


class Rubbish:
    """Memory that others may have used."""

    def __init__(self, results: Sequence[Own]) -> None:
        numbers = [each for each in results if each.tensor.dtype is not torch.bool]
        self._flags = [each.tensor for each in results if each.tensor.dtype is torch.bool]
        self._numbers = [each.tensor for each in numbers]
        self._wrong = [each.wrong for each in numbers]

    def poison(self) -> None:
        """Wrong numbers into all of it."""
        if self._numbers:
            torch._foreach_copy_(self._numbers, self._wrong)
        for flags in self._flags:
            flags.logical_not_()


def shapes(sizes: list[int], windows: Iterable[int] = (1,)) -> list[GraphShape]:
    """The largest first."""
    every = [GraphShape(rows, q_len) for rows in sizes for q_len in windows]
    return sorted(every, reverse=True)


def with_graphs(runner: ModelRunner, sizes: list[int],
                windows: Iterable[int] = (1,)) -> DecodeGraphRunner:
    """Capture a runner's decode steps, by recording."""
    graphs = runner.decode_graphs(RecordingCapturer(), shapes(sizes, windows))
    graphs.capture(lambda phase, detail: None)
    runner.graphs = graphs
    watched(runner, graphs._capturer)
    return graphs


def watched(runner: ModelRunner, capturer: Any) -> None:
    """From here on no replay may touch what is nobody's."""
    if not capturer.watching:
        capturer.watching.append(Untouched(runner))


@contextmanager
def experts_on_the_device() -> Iterator[None]:
    """Models that are loaded meanwhile have experts that ask the host nothing, as on CUDA."""
    with (patch.object(TorchOps, "groups_experts", True),
          patch.object(TorchOps, "experts", lambda _, *weights: StackedExperts(*weights))):
        yield


def with_segments(runner: ModelRunner, sizes: list[int]) -> PiecewiseGraphRunner:
    """Capture segments of a runner's steps, by recording, in one memory with its graphs."""
    graphs = runner.graphs
    capturer = graphs._capturer if graphs is not None else RecordingCapturer()
    segments = PiecewiseGraphRunner(runner.model, runner.pools, capturer,
                                    sorted(sizes, reverse=True))
    segments.capture(lambda phase, detail: None)
    runner.segments = segments
    watched(runner, capturer)
    return segments


def model_of_kind(path: Path, kind: str, length: int = 96) -> Any:
    """See `write_kind`; the hybrid one drafts. length: of the longest sequence."""
    write_kind(path, kind)
    fields = json.loads((path / "config.json").read_text())
    fields["max_position_embeddings"] = max(length, fields["max_position_embeddings"])
    (path / "config.json").write_text(json.dumps(fields))
    drafts = "auto" if kind == "hybrid" else "off"
    config = Config(model=ModelConfig(max_model_len=length),
                    speculation=SpeculationConfig(speculative=drafts))
    with experts_on_the_device():
        return load_model(path, config, CPU, lambda *_: None)


def played(runner: ModelRunner, prompts: list[list[int]], params: list[ResolvedParams], number: int,
           cancel: tuple[int, ...] = (), **ring: Any) -> tuple[Ring, list[Output]]:
    """So many requests, of which the later ones come while the first ones run."""
    run = Ring(runner, **ring)
    for i in range(number):
        run.submit(prompts[i % len(prompts)], params[i % len(params)], i + 1)
        for _ in range(i % 3):
            run.step()
        if i in cancel:
            run.cancel(i - 1)
    return run, run.run()


def told(outputs: list[Output]) -> list[tuple[Any, ...]]:
    return [(o.tokens, o.finish, [(p.ranks, p.top_ids) for p in o.logprobs],
             [p.top_ids for p in o.prompt_logprobs]) for o in outputs]


def check_padding(model: Any, prompts: list[list[int]], new: int,
                  capture: Callable[[ModelRunner], T]) -> T:
    """Whatever is not a sequence's own is NaN, and stays so but for the sink, with what `capture`
    gives (which is returned) as without."""
    outputs = []
    for captures in (False, True):
        runner = make_runner(model, 120, 8, slots=8, arrays=DeviceArrays(CPU))
        if captures:
            captured = capture(runner)
        driver = Driver(runner, 60)
        for prompt in prompts:
            driver.admit(prompt, ResolvedParams(max_tokens=new, temperature=0.0))
        driver.run()
        outputs.append([s.output for s in driver.running])
        for pool, free in zip(runner.pools, driver.free, strict=True):
            places = torch.tensor(free)[:, None] * 8 + torch.arange(8)
            untouched = [page for page in places if pool.layers[0][page].isnan().all()]
            assert len(untouched) >= len(free) - len(prompts) * 6, "pages nobody was given"
        assert not any(math.isnan(x) for x in runner.tables.seq_len.double().tolist())
    assert outputs[0] == outputs[1]
    return captured


def check_freed_pages(model: Any, prompts: list[list[int]],
                      capture: Callable[[ModelRunner], Any]) -> Any:
    """Sequences that are aborted leave their slots as they are on the device. What is replayed
    then, with more rows than the step has, writes to none of their pages. Returns what `capture`
    gave."""
    runner = make_runner(model, 120, 8, slots=8, arrays=DeviceArrays(CPU))
    captured = capture(runner)
    driver = Driver(runner, 60)
    captured._capturer.watching[0].more = lambda: driver.free
    first, *others = [driver.admit(prompt, ResolvedParams(max_tokens=60, temperature=0.0))
                      for prompt in prompts]
    driver.step([(s, s.prompt) for s in (first, *others)], [])
    for _ in range(5):
        driver.step([], [first, *others])
    freed = {page for s in others for page in s.pages[0].values()}
    for s in others:
        driver.abort(s)
    for _ in range(12):
        driver.step([], [first])
    assert len(freed & set(driver.free[0])) > 2, "not all were given to the one that is left"
    for pool, free in zip(runner.pools, driver.free, strict=True):
        for page in free:
            assert all(layer[8 * page:8 * page + 8].isnan().all() for layer in pool.layers), (
                "a page of nobody was written")
    assert len(first.output) == 1 + 5 + 12
    return captured
