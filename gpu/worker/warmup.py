"""Warm-up: steps before the first request that check the model's first logits and run every kernel
in each form in which a request can need it.

Triton compiles a kernel anew, for a second or more, for each form of its arguments: constants that
follow from a step's shape, the dtypes, and what it assumes of integers and addresses. vLLM's and
SGLang's users know the stall as that of the first request of a kind. Arguments that vary from step
to step are marked as not to be specialised on (see `kernels.triton`), so that the forms are few;
`warm_up_kernels` covers these. `tests/gpu/worker/test_warmup_forms.py` compares them with those
that requests need.

Where Triton's cache on disk is cold, some hundred forms of kernels would be compiled one after the
other, so `compile_ahead` walks through the warm-up without the device first: no kernel is launched,
and what torch would compute is zeros (see `ZeroMode`), so that nothing is read or written that
should not be. Threads compile the forms that the walk asks for, as many at a time as there are
cores: Triton's compiler holds the GIL for little of its time. What the walk misses is compiled when
it is launched."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from actorium.actors.errors import BadModel
from actorium.actors.messages import Admit, RowMask, StepPlan
from actorium.actors.params import ResolvedParams, ResolvedPooling
from actorium.gpu.graphs.capture import ReportPhase
from actorium.gpu.models.decoder import Decoder, LoadedModel
from actorium.gpu.plan.non_cache_memory import StepSize
from actorium.gpu.step.draft_model import CATCH_UP
from actorium.gpu.step.runner import ModelRunner
from actorium.gpu.step.tables import SlotTables
from actorium.kernels.reference.torch_ops import TorchOps

STATE_BYTES = 64 << 20
"""Most of the state pool that the steps before the first request may touch on a CPU, where memory
is taken when it is first written."""
LONG = 8192
"""Tokens of the longest context that is run. From one or two thousand on keys are split among
programs (`kernels.triton.extend.splits_of`, `kernels.triton.work.rule_of`), however many."""
FEW = 64
"""Tokens of the longest prompt chunk behind that context."""

EVERY_ROW = ResolvedPooling("token_embed", every_row=True)
GREEDY = ResolvedParams(max_tokens=1 << 20, temperature=0.0)
LOG = logging.getLogger(__name__)
MOVES = {"copy_", "_to_copy", "_local_scalar_dense", "record_stream", "_pin_memory", "is_pinned"}
"""Operations that run as they are: the host's arrays go to the device and come back."""


def _params(**fields: Any) -> ResolvedParams:
    return ResolvedParams(max_tokens=1 << 20, **fields)


PARAMS = (
    _params(temperature=1.0),
    _params(temperature=1.0, top_k=2),
    _params(temperature=0.7, top_p=0.9),
    _params(temperature=0.7, min_p=0.1),
    _params(temperature=0.7, top_k=20, top_p=0.9, min_p=0.01),
    # What changes logits converts them to f32 first, so the sampling kernels see another dtype.
    _params(temperature=0.0, logit_bias={0: 1.0, 1: -1.0}),
    _params(temperature=1.0, logit_bias={0: 1.0, 1: -1.0}),
    _params(temperature=0.7, top_k=20, logit_bias={0: 1.0, 1: -1.0}),
    _params(temperature=1.0, eos_ids=(0, 1), min_tokens=1 << 19),
    _params(temperature=0.0, logprobs=0),
    _params(temperature=1.0, logprobs=3, prompt_logprobs=3),
    _params(temperature=0.0, logprobs=2, logprob_ids=(0, 1)),
    _params(temperature=1.0, masked=True),
    _params(temperature=0.0, masked=True, logit_bias={0: 1.0}),
    _params(temperature=0.0, presence_penalty=0.5, logit_bias={0: 1.0}),
)
"""Sampling parameters beside greedy that take other paths through the sampler."""
PENALTIES = (
    _params(temperature=0.0, repetition_penalty=1.1),
    _params(temperature=1.0, top_p=0.9, presence_penalty=0.5, frequency_penalty=0.5),
)
"""Penalties: their counts are updated when a window is committed, and each window is a form."""


def check_numbers(runner: ModelRunner, path: Path, most: int) -> None:
    """Runs a step over at most `most` tokens: raises `BadModel` where the logits of the model at
    `path` are nan or infinite, as its weights are then. Leaves the tables empty."""
    t, whole = runner.tables, runner.model.shape.bidirectional
    ids = np.arange(max(1, min(8, most, t.vocab, t.max_len - 1)), dtype=np.int32)
    pages = np.zeros(t.groups * -(-len(ids) // t.page_size), np.int32).tobytes()
    admit = Admit(1, ids.tobytes(), len(ids), 0, pages, ResolvedParams(max_tokens=1, logprobs=0), 1,
                  pooling=EVERY_ROW if whole else None)
    found = runner.run(StepPlan(0, 0, admit=[admit],
                                extend=np.array([[1, len(ids)]], np.int32).tobytes()))
    runner.run(StepPlan(0, 0, release=np.array([1], np.int32).tobytes()))
    numbers = [pooled.data for _, pooled in found.pooled] + [row.chosen for row in found.logprobs]
    if not all(np.isfinite(np.frombuffer(own, np.float32)).all() for own in numbers):
        raise BadModel(f"model: {path}: what it says to its first tokens is nan or infinite: its "
                       "weights are damaged", "model")


def dummy_run(runner: ModelRunner, tokens: int, rows: int = 1 << 16) -> StepSize:
    """Runs an extend step of `tokens` tokens in all and a decode step, over the sink page; returns
    the size of the larger one. Of a bidirectional model, which has no decodes, the first alone.

    As many sequences as there are slots, if there are enough tokens, but at most `rows`. Leaves the
    tables empty.
    """
    t, drafts = runner.tables, runner.tables.drafts.max_drafts
    whole = runner.model.shape.bidirectional
    rows = max(1, min(t.slots - 1, tokens, rows))
    each = np.full(rows, tokens // rows)
    each[:tokens % rows] += 1
    each = np.clip(each, 1, max(1, t.max_len - 1))
    params = ResolvedParams(max_tokens=2, temperature=1.0, top_k=2, top_p=0.9)
    slots = np.arange(1, rows + 1, dtype=np.int32)
    admits = [Admit(slot, np.zeros(n, np.int32).tobytes(), n, 0,
                    np.zeros(t.groups * -(-n // t.page_size), np.int32).tobytes(), params, slot,
                    pooling=EVERY_ROW if whole else None)
              for slot, n in zip(slots.tolist(), each.tolist(), strict=True)]
    extend = np.stack((slots, each.astype(np.int32)), axis=1).tobytes()
    runner.run(StepPlan(0, 0, admit=admits, extend=extend, drafts=drafts))
    if not whole:
        runner.run(StepPlan(0, 0, decode=slots.tobytes(), drafts=drafts))
    runner.run(StepPlan(0, 0, release=slots.tobytes()))
    rows *= 1 + drafts
    return StepSize(max(int(each.sum()), rows), rows)


class WarmupCase(NamedTuple):
    """Sequences that start in the same step."""

    rows: Sequence[tuple[int, int]]
    """(cached tokens, computed tokens) of each sequence."""
    drafts: Sequence[int] = ()
    """Drafts that each decode step makes, which the next one verifies. The first one verifies as
    many as there can be."""
    beside: int = 0
    """Tokens of a prompt that is computed beside each decode step."""
    params: ResolvedParams = GREEDY
    left: int = 0
    """Tokens of the prompts that are not computed."""


@torch.inference_mode()
def warm_up_kernels(runner: ModelRunner, budget: int, report: ReportPhase) -> None:
    """Runs steps of every form that requests can bring, over the sink page, and restores tables and
    states.

    budget: tokens of the largest step. Uses graphs and segments where there are some.
    """
    if runner.model.shape.bidirectional:
        for tokens in _powers(budget):
            report("warming", f"kernels of {tokens} tokens")
            dummy_run(runner, tokens)
        runner.served.clear()
        return
    plays = list(warmup_cases(runner.tables, budget))
    if "draft" in runner.proposers:
        plays += draft_model_cases(runner.tables)
    for number, each in enumerate(plays):
        report("warming", f"kernels {number}/{len(plays)}")
        run_case(runner, each)
    if runner.adapters is not None:
        runner.adapters.layers.warm_up()
    if runner.states is not None:
        _checkpoints(runner)
        runner.states.clear()
    runner.tables.clear()
    runner.served.clear()


def warmup_cases(t: SlotTables, budget: int) -> Iterator[WarmupCase]:
    """Returns the cases that `warm_up_kernels` runs."""
    most, slots, room = t.drafts.max_drafts, t.slots - 1, max(1, t.max_len - 1)
    each = [d for window in range(most + 1, 0, -1) for d in (window - 1, most)] if most else [0]
    ends = [0, most] if most else [0]
    # Tiles of products follow from the number of rows, which in the last layer, and in the product
    # with the head, are all only where the prompt's own tokens are weighed.
    for tokens in _powers(budget):
        yield WarmupCase(_split_tokens(tokens, room, slots), params=_params(prompt_logprobs=0))
    yield WarmupCase([(0, 1)] * min(slots, budget))
    yield WarmupCase(_split_tokens(min(budget, max(1, room - 1)), room, slots)[:1], left=1)
    for tokens in _powers(min(FEW, budget, room - 1)):
        yield WarmupCase([(min(LONG, room) - tokens, tokens)])
    for rows in _powers(min(slots, budget)):
        yield WarmupCase([(0, 1)] * rows, each)
    for context in {1, max(1, min(LONG, room - 1))}:
        yield WarmupCase([(context - 1, 1)], each)
        for tokens in {1, min(5, budget), min(FEW, budget)}:
            yield WarmupCase([(context - 1, 1)], each, min(tokens, room))
    # One row has other strides than several, and addresses after an odd row are odd as well.
    yield WarmupCase([(0, 1)] * min(2, slots, budget), each, 1)
    few = min(3, budget, room)
    for params in PARAMS:
        yield WarmupCase([(0, few)], ends, 0, params)
    for params in PENALTIES:
        yield WarmupCase([(0, few)], each, 0, params)


def draft_model_cases(t: SlotTables) -> Iterator[WarmupCase]:
    """Returns cases in which a draft model reads windows of every size: of what came while it
    drafted nothing."""
    most, room = t.drafts.max_drafts, max(1, t.max_len - 1)
    lags = [1 << i for i in range(1, CATCH_UP.bit_length())]
    for context in {1, max(1, min(LONG, room - 1))}:
        for rows in {1, min(2, t.slots - 1)}:
            yield WarmupCase([(context - 1, 1)] * rows,
                             [drafts for lag in lags for drafts in (*[0] * (lag - 1), most)])


def few_states(runner: ModelRunner) -> int:
    """Returns how many sequences a step may have before the first request on a CPU."""
    rows, states = runner.tables.slots - 1, runner.states
    if states is None:
        return max(1, rows)
    return max(1, min(rows, STATE_BYTES * (rows + 1 + states.checkpoints) // states.bytes))


def _powers(most: int) -> list[int]:
    """Returns 1, 2, 4, ... and `most`."""
    return sorted({1 << i for i in range(max(0, most).bit_length())} | {most}) if most > 0 else []


def _split_tokens(tokens: int, most: int, rows: int) -> list[tuple[int, int]]:
    """Splits so many tokens into as few prompts as possible, each of at most `most`."""
    rows = min(rows, -(-tokens // most))
    return [(0, min(most, (tokens + i) // rows)) for i in range(rows)]


def run_case(runner: ModelRunner, what: WarmupCase) -> None:
    """Runs a case over the sink page, the only one in blank page tables."""
    t, most = runner.tables, runner.tables.drafts.max_drafts
    slots = np.arange(1, len(what.rows) + 1, dtype=np.int32)
    counts = np.array([count for _, count in what.rows], np.int32)
    runner.run(StepPlan(0, 0, admit=[
        admitted(slot, cached + count + what.left, what.params)
        for slot, (cached, count) in zip(slots.tolist(), what.rows, strict=True)]))
    for slot, (cached, _) in zip(slots.tolist(), what.rows, strict=True):
        t.sequences[slot].done = cached  # as if earlier chunks had computed them
    ends = [] if what.left else slots.tolist()
    runner.run(StepPlan(0, 0, extend=np.stack((slots, counts), 1).tobytes(), drafts=most,
                        masks=_masks(t, what.params, ends, 1)))
    window, other = 1 + most, len(slots) + 1
    beside = what.beside if other < t.slots else 0
    for drafts in what.drafts:
        runner.run(StepPlan(
            0, 0, release=i4(*[other] * (other in t.sequences)),
            admit=[admitted(other, beside, what.params)] * bool(beside),
            extend=i4(other, beside) if beside else b"", decode=slots.tobytes(), drafts=drafts,
            masks=_masks(t, what.params, slots.tolist(), window)))
        window = 1 + drafts
    runner.run(StepPlan(0, 0, release=i4(*t.sequences)))


def _checkpoints(runner: ModelRunner) -> None:
    """Saves a state in the middle of a prompt and at its end, and starts another sequence with it.
    """
    states, t = runner.states, runner.tables
    if states is None or not states.checkpoints or t.max_len < 4:
        return
    saves = [(1, 1, 1), (1, min(2, states.checkpoints), 2)]
    runner.run(StepPlan(0, 0, admit=[admitted(1, 2, GREEDY)], extend=i4(1, 2),
                        checkpoints=i4(*saves[0], *saves[1])))
    begins = admitted(1, 3, GREEDY, cached=2, checkpoint=1)
    runner.run(StepPlan(0, 0, release=i4(1), admit=[begins], extend=i4(1, 1)))
    runner.run(StepPlan(0, 0, release=i4(1)))


def admitted(slot: int, tokens: int, params: ResolvedParams, cached: int = 0,
           checkpoint: int = 0) -> Admit:
    return Admit(slot, bytes(4 * tokens), tokens, cached, b"", params, slot, checkpoint)


def _masks(t: SlotTables, params: ResolvedParams, slots: Sequence[int],
           window: int) -> list[RowMask]:
    """Returns masks that allow everything, for every row, where the parameters want masks."""
    bits = b"\xff" * (4 * -(-t.vocab // 32))
    return [RowMask(slot, row, bits) for slot in slots for row in range(window) if params.masked]


def i4(*values: int) -> bytes:
    return np.array(values, np.int32).tobytes()


# --- Compiling ahead -----------------------------------------------------------------------------

def compile_ahead(runner: ModelRunner, budget: int, report: ReportPhase) -> int:
    """Fills Triton's cache for `warm_up_kernels`, where it lacks a kernel of a step of one token.
    Leaves tables and states empty. Returns how many kernels were compiled.

    budget: tokens of the largest step.
    """
    began, model = perf_counter(), runner.model
    assert isinstance(model, LoadedModel)
    if model.ops.name != "triton":
        return 0
    report("warming", "compiling")
    try:
        fewer = one_layer_per_kind(model) if isinstance(model, Decoder) else nullcontext()
        with model.group.alone(), fewer:
            with compiling_launches() as missed, ZeroMode():
                dummy_run(runner, 1)
            if not missed:
                return 0
            with compiling_launches() as others, ZeroMode():
                walk_warmup(runner, model.ops, budget)
    except Exception as error:  # the warm-up compiles them, and says what is wrong if it is
        LOG.warning("kernels are compiled one after the other: %s", error)
        runner.reset()
        return 0
    missed += others
    LOG.info("%d kernels compiled in %.1f s", len(missed), perf_counter() - began)
    return len(missed)


@torch.inference_mode()
def walk_warmup(runner: ModelRunner, ops: TorchOps, budget: int) -> None:
    """Asks for every kernel that a start launches behind this."""
    warm_up_kernels(runner, budget, lambda *_: None)
    ops.tune(runner.arrays.device, rehearsal=True)


@contextmanager
def one_layer_per_kind(model: Decoder) -> Iterator[None]:
    """Meanwhile the model has one layer of each kind, and its last one, whose end differs."""
    runs = model.runs
    kinds: dict[Any, Any] = {}
    for run, window in zip(runs[:-1], model.shape.windows, strict=False):
        kinds.setdefault((getattr(run.whole, "__func__", run.whole), window), run)
    model.runs = [*kinds.values(), runs[-1]]
    try:
        yield
    finally:
        model.runs = runs


@contextmanager
def compiling_launches(threads: int = 0) -> Iterator[list[str]]:
    """Meanwhile launches compile and do nothing else; at the end all are compiled. Yields the names
    of the kernels that the cache lacked. threads: 0 = one for each core."""
    from triton import AsyncCompileMode, knobs
    from triton.runtime.jit import JITFunction

    missed: list[str] = []
    launched: Any = JITFunction.run
    known, knobs.compilation.listener = knobs.compilation.listener, lambda *, src, cache_hit, **_: (
        None if cache_hit else missed.append(src.name))

    def run(this: Any, *args: Any, warmup: bool, **options: Any) -> Any:
        return launched(this, *args, warmup=True, **options)

    JITFunction.run = run  # type: ignore[method-assign]
    try:
        with _Compilers(threads or min(32, len(os.sched_getaffinity(0)))) as pool, \
                AsyncCompileMode(pool, ignore_errors=True):
            yield missed
    finally:
        JITFunction.run, knobs.compilation.listener = launched, known


class _Compilers(ThreadPoolExecutor):
    """Threads that compile kernels, each with what launches it: Triton 3.6 makes that in C."""

    def submit(self, work: Any, /, *args: Any, **options: Any) -> Any:
        """See `Executor.submit`. work: gives a kernel."""
        from triton.runtime import driver

        def compiled() -> Any:
            kernel = work(*args, **options)
            driver.active.launcher_cls(kernel.src, kernel.metadata)
            return kernel

        return super().submit(compiled)


class ZeroMode(TorchDispatchMode):
    """Meanwhile torch's results are zeros of the same shape, and nothing is changed in place."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, func._schema.name.partition("::")[2]
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if func.is_view or name in MOVES or not tensors and not name.startswith("rand"):
            out = func(*args, **kwargs)
            return out.zero_() if name.startswith("empty") else out
        if _composite(func):
            with self:
                return func.decompose(*args, **kwargs)
        if func._schema.is_mutable:
            return kwargs.get("out", args[0])
        device = tensors[0].device if tensors else kwargs.get("device", "cpu")
        on_meta = {"device": "meta", "generator": None}
        more = {name: on_meta[name] for name in kwargs if name in on_meta}
        try:
            out = func(*tree_map_only(Tensor, _shape, args),
                       **tree_map_only(Tensor, _shape, kwargs) | more)
        except NotImplementedError:  # the shape follows from the numbers
            return func(*args, **kwargs)
        return tree_map_only(Tensor, lambda x: torch.zeros(
            x.shape, dtype=x.dtype, device=device) if x.is_contiguous() else torch.empty_strided(
            x.shape, x.stride(), dtype=x.dtype, device=device).zero_(), out)


def _shape(x: Tensor) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


@cache
def _composite(func: Any) -> bool:
    """Whether an operation is made of others."""
    return bool(func.has_kernel_for_dispatch_key(
        torch._C.DispatchKey.CompositeImplicitAutograd))
