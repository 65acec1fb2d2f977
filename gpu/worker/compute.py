"""The thread that owns the device and runs the steps; on CUDA a second one waits for results.

torch is imported by the compute thread while the other actors start: nothing heavy is imported
here."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from collections import deque
from collections.abc import Callable, Mapping
from queue import Empty, SimpleQueue
from time import perf_counter
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from actorium.actors.config.cluster_settings import client_run_dir
from actorium.actors.core import Context
from actorium.actors.errors import BadModel
from actorium.actors.messages import (
    AdapterAnswer,
    DropAdapter,
    LoadAdapter,
    Masks,
    PageAnswer,
    PageOrder,
    PrepareWeights,
    ReadTensor,
    Ready,
    Reload,
    Reset,
    RowMask,
    StepPlan,
    StepResult,
    TensorAnswer,
    ToWorker,
    Unload,
    Unloaded,
    UpdateWeights,
    WeightsAnswer,
)
from actorium.actors.runtime.roles import rank_of
from actorium.gpu.worker.adapter_thread import AdapterThread
from actorium.gpu.worker.compilations import Compilations

if TYPE_CHECKING:
    import torch

    from actorium.gpu.parallel.rank_group import RankGroup, StepGate
    from actorium.gpu.step.host_pages import HostPages
    from actorium.gpu.step.pools import PagePrefault
    from actorium.gpu.step.runner import ModelRunner
    from actorium.gpu.worker.disk_threads import DiskThreads
    from actorium.gpu.worker.timing import StepTrace, TimedStep
    from actorium.gpu.worker.weights_update import WeightsUpdate

ERROR = 4000
"""Characters of an error that are sent."""
STEPS_AHEAD = 4
"""Steps of the largest size for whose pages memory is populated in advance."""
STEP_TIMEOUT = 45.0
"""Seconds that a rank waits for another one in a step: less than the step's budget, so that it can
say for whom before the watchdog ends it."""
WakeUp = Callable[[], None]
Result = (Ready | StepResult | PageAnswer | Unloaded | AdapterAnswer | WeightsAnswer
          | TensorAnswer)


class StepAbandoned(Exception):
    """The masks of the step in progress will not come."""


class ComputeThread:
    """Runs plans in order on its own thread. The actor submits messages and pops `results`."""

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._work: SimpleQueue[StepPlan | Masks | Reset | Unload | Reload | DropAdapter
                                | UpdateWeights | None] = SimpleQueue()
        self._harvest: SimpleQueue[TimedStep] = SimpleQueue()
        self._ready: Ready
        self._ranks: tuple[RankGroup, StepGate] | None = None
        """None = not joined yet."""
        self._gate: StepGate
        self._post: WakeUp = lambda: None
        self._forget: WakeUp = lambda: None
        """Frees every slot."""
        self._epoch = 0
        """Epoch of the scheduler that is served."""
        self._disk: DiskThreads | None = None
        self._adapters = AdapterThread(rank_of(ctx.role), ctx.config.adapters.max_lora_rank,
                                       self._answer)
        self._weights: WeightsUpdate | None = None
        """None = asleep, or not loaded yet."""
        self._steps_trace: StepTrace | None = None
        self._unloaded = self._harvesting = False
        """The engine sleeps; the thread that waits for results runs."""
        self._adopted = False
        """The scheduler has greeted this worker; plans before that are for its predecessor."""
        self.results: deque[Result] = deque()
        self.updating = False
        """Other weights are being read; no step is run."""
        self.failure: BaseException | None = None
        self.phase, self.detail = "starting", "importing torch"
        self.memory: dict[str, float] = {}
        """Bytes measured and planned (`Footprint.gauges`)."""
        self.steps = 0
        """Steps finished."""
        self.served: Mapping[str, int] = {}
        """Steps launched, by how (`ModelRunner.served`)."""
        self.compilations = Compilations()
        """Kernels compiled since the worker was ready."""
        self.plans_received = self.plans_dropped = 0
        """Each is changed by one thread alone: who submits, and, as `steps`, who computes."""

    def start(self, post: WakeUp) -> None:
        """Start loading. `post` is called, from any thread, when a result or a phase is new."""
        self._post = post
        threading.Thread(target=self._run_guarded, args=(self._compute,), name="compute",
                         daemon=True).start()

    def submit(self, message: ToWorker | None) -> None:
        """Queue a message. None: the scheduler has ended, and no masks will come."""
        if self._disk is not None and isinstance(message, PageOrder | Reset):
            self._disk.submit(message)  # orders do not wait behind the reset in the queue
        if isinstance(message, LoadAdapter):
            self._adapters.submit(message)
        if isinstance(message, ReadTensor):
            self._read_tensor(message)
        if isinstance(message, PrepareWeights):
            self._prepare(message)
        if isinstance(message, PageOrder | LoadAdapter | ReadTensor | PrepareWeights):
            return
        if isinstance(message, StepPlan):
            self.plans_received += 1
        self._work.put(message)

    # --- the threads ---------------------------------------------------------------------------

    def _run_guarded(self, body: Callable[[], None]) -> None:
        try:
            body()
        except BaseException as error:
            self.failure = self.failure or error  # what fails after it may be its doing
            self._post()

    def _compute(self) -> None:
        kept: HostPages | None = None
        while True:
            device, kept = self._serve(kept)
            self._sleep(device)

    def _serve(self, kept: HostPages | None) -> tuple[torch.device, HostPages | None]:
        """Loads the model and runs plans until the engine sleeps. kept: host slots of before, and
        what is returned of them. Nothing else refers to weights and pages afterwards."""
        runner, update, ahead = self._load(kept)
        self._weights = update
        self.served = runner.served
        from actorium.gpu.worker.timing import make_timer

        device = runner.arrays.device
        self._steps_trace = self._steps_trace or self._trace()
        timer = make_timer(device, self._steps_trace)
        if timer.waits and not self._harvesting:
            self._harvesting = True
            threading.Thread(target=self._run_guarded, args=(
                lambda: self._harvest_results(device),), name="harvest", daemon=True).start()
        runner.wait = self._wait_for_masks

        def forget() -> None:
            runner.reset()
            timer.reset()

        self._forget = forget
        while True:
            message = self._next_message(ahead)
            if isinstance(message, Reset):
                self._apply_reset(message)
            elif isinstance(message, Unload):
                if message.epoch >= self._epoch:
                    self._forget, self._weights = lambda: None, None
                    if runner.host is not None:
                        runner.host.detach()
                    return device, runner.host
            elif isinstance(message, UpdateWeights):
                self._update(message, update)
            elif (not self._adopted or message.epoch != self._epoch
                  or not self._gate.opens(message.epoch, message.step)):
                self.plans_dropped += 1
            else:
                try:
                    timed = timer.launch(runner, message)
                except StepAbandoned:
                    self.plans_dropped += 1
                    forget()
                    self._post()  # `done` may have become true
                    continue
                if timer.waits:
                    self._harvest.put(timed)
                    continue
                self._finish(timed)
                meter = update.meter
                if meter is not None and meter.measure_if_larger(message, runner.window):
                    self.memory = meter.footprint.gauges()

    def _sleep(self, device: torch.device) -> None:
        """Gives the memory back, and answers until it is to be loaded again."""
        from actorium.gpu.worker.device import free_memory

        free_memory(device)
        self.memory, self._unloaded = {}, True
        self._report("sleeping", "")
        self._answer(Unloaded(self._epoch, rank_of(self._ctx.role)))
        while not isinstance(message := self._work.get(), Reload):
            if isinstance(message, Reset):
                self._apply_reset(message)
            elif isinstance(message, Unload):
                self._answer(Unloaded(message.epoch, rank_of(self._ctx.role)))
            elif isinstance(message, StepPlan):
                self.plans_dropped += 1
            elif isinstance(message, DropAdapter):
                self._adapters.drop(message)
            elif message is None:
                self._gate.leave()
        self._unloaded = False

    # --- weights -------------------------------------------------------------------------------

    def _prepare(self, message: PrepareWeights) -> None:
        """Reads other weights, on a thread of its own."""
        update = self._weights

        def prepare() -> None:
            start, source, error = perf_counter(), message.source, ""
            try:
                if update is None:
                    raise BadModel("the worker has no model now")
                source = update.prepare(message.number, source)
            except BadModel as fault:
                error = fault.message[:ERROR]
            if update is not None and message.epoch < self._epoch:
                update.drop()
            self._answer(WeightsAnswer(message.epoch, rank_of(self._ctx.role), message.number,
                                       source, error, perf_counter() - start, prepared=True))

        threading.Thread(target=self._run_guarded, args=(prepare,), name="weights",
                         daemon=True).start()

    def _update(self, message: UpdateWeights, update: WeightsUpdate) -> None:
        """Serves what was prepared from the next step on, or says why it cannot."""
        if not self._adopted or message.epoch != self._epoch:
            return
        if not message.take:
            update.drop()
            return
        group, _ = self._ranks or (None, None)
        assert group is not None
        start, error = perf_counter(), ""
        group.timeout_s = self._ctx.config.runtime.start_timeout
        self.updating = True
        try:
            source = update.take(message.number)
        except BadModel as fault:
            source, error = self._ready.weights, fault.message[:ERROR]
        finally:
            self.updating = False
        group.timeout_s = STEP_TIMEOUT
        self._ready = replace(self._ready, weights=source)
        self._answer(WeightsAnswer(self._epoch, self._ready.rank, message.number, source, error,
                                   perf_counter() - start))

    def _read_tensor(self, message: ReadTensor) -> None:
        """Tells of a tensor, on a thread of its own; rank 0 does."""
        if rank_of(self._ctx.role):
            return

        def read() -> None:
            from actorium.gpu.weights.tensor_values import tensor_values

            self._answer(tensor_values(self._ctx.config, self._ready.weights, message))

        threading.Thread(target=self._run_guarded, args=(read,), name="tensor", daemon=True).start()

    def _wait_for_masks(self, plan: StepPlan) -> list[RowMask]:
        """Wait for the masks that follow a plan. Raises `StepAbandoned` where the scheduler was
        replaced or has ended, and `ValueError` on another plan of the same scheduler."""
        while True:
            message = self._work.get()
            if isinstance(message, Masks):
                if (message.epoch, message.step) == (plan.epoch, plan.step):
                    if not self._gate.opens(plan.epoch, plan.step, late=True):
                        raise StepAbandoned
                    return message.masks
            elif isinstance(message, StepPlan):
                if message.epoch == plan.epoch:
                    raise ValueError(f"masks: a plan came instead of those of step {plan.step}")
                self.plans_dropped += 1
            elif isinstance(message, DropAdapter):
                self._adapters.drop(message)
            elif message is None:
                self._gate.leave()
                raise StepAbandoned
            elif isinstance(message, Reset) and self._apply_reset(message):
                raise StepAbandoned

    def _trace(self) -> StepTrace | None:
        if self._ctx.config.runtime.trace_dir is None:
            return None
        from actorium.actors.runtime.step_events import open_events
        from actorium.gpu.worker.timing import StepTrace

        events = open_events(self._ctx, "compute")
        return None if events is None else StepTrace(events)

    def _apply_reset(self, reset: Reset) -> bool:
        """Adopt the reset's scheduler. False for a reset of an older scheduler, or one meant for
        another worker."""
        if reset.epoch < self._epoch or reset.worker not in (0, self._ctx.epoch):
            return False
        self._forget()  # copies touch no slot any more once another scheduler knows of them
        if reset.epoch > self._epoch:
            self._gate.pass_by(reset.epoch)
            self._adapters.reset(reset.epoch)
            if self._disk is not None:
                self._disk.reset(reset.epoch)
            if self._weights is not None:
                self._weights.drop()
        self._epoch, self._adopted = reset.epoch, reset.worker > 0
        if not self._adopted:
            self._answer(Unloaded(self._epoch, rank_of(self._ctx.role)) if self._unloaded
                         else self._ready)
        return True

    def _next_message(self, ahead: PagePrefault) -> StepPlan | Reset | Unload | UpdateWeights:
        """The next plan, reset, unload or update. While none is queued, memory of pages is
        populated."""
        while True:
            try:
                message = self._work.get_nowait()
            except Empty:
                if ahead.some():
                    continue
                message = self._work.get()
            if isinstance(message, StepPlan):
                ahead.note_pages(message)
            if isinstance(message, StepPlan | Reset | Unload | UpdateWeights):
                return message
            if isinstance(message, DropAdapter):
                self._adapters.drop(message)
            elif message is None:
                self._gate.leave()

    def _load(self, kept: HostPages | None
              ) -> tuple[ModelRunner, WeightsUpdate, PagePrefault]:
        start = perf_counter()
        from actorium.gpu.worker.preload import spin_rounds

        os.environ.setdefault("GOMP_SPINCOUNT", str(spin_rounds(self._ctx.config)))
        from actorium.actors.runtime.worker_info import write_info
        from actorium.gpu.step.pools import PagePrefault
        from actorium.gpu.worker.device import join_ranks, open_device
        from actorium.gpu.worker.tiers import KeptTier
        from actorium.gpu.worker.weights_update import WeightsUpdate, kept_source

        first, self._ranks = self._ranks is None, self._ranks or join_ranks(self._ctx)
        group, self._gate = self._ranks
        group.timeout_s = self._ctx.config.runtime.start_timeout
        opened = open_device(self._ctx.config, self._ctx.epoch, self._report,
                             {"import": perf_counter() - start}, group, self._ctx.run_dir,
                             None if kept is None else KeptTier(kept, self._disk),
                             kept_source(self._ctx.run_dir, self._ctx.config))
        self._gate.timeout_s = group.timeout_s = STEP_TIMEOUT
        start = perf_counter()
        ahead = PagePrefault(opened.runner.pools,
                             STEPS_AHEAD * self._ctx.config.scheduler.max_num_batched_tokens,
                             opened.runner.draft_pools)
        ahead.all()
        opened.ready.load_seconds["allocate"] += perf_counter() - start
        gc.freeze()  # torch's objects live as long as the process: nothing to collect
        self.memory = opened.footprint.gauges()
        with contextlib.suppress(OSError):  # a full disk must not keep the engine from serving
            write_info(self._ctx.run_dir, self._ctx.role, opened.info)
        if (images := opened.runner.tables.images) is not None:
            images.open(client_run_dir(self._ctx.config.cluster, self._ctx.run_dir))
        self._ready = opened.ready
        if opened.reader is not None and opened.runner.adapters is not None:
            opened.runner.adapters.known = self._adapters.known
            self._adapters.reader = opened.reader
            if first:
                threading.Thread(target=self._run_guarded, args=(self._adapters.run,),
                                 name="adapters", daemon=True).start()
        if first:
            self._disk = opened.disk
            if opened.disk is not None:
                opened.disk.start(self._answer, self._run_guarded)
            self.compilations.watch()
        self._adopted = False
        self.results.append(opened.ready)
        self._report("ready", opened.ready.device)
        return opened.runner, WeightsUpdate(self._ctx.config, opened, self._ctx.run_dir), ahead

    def _harvest_results(self, device: torch.device) -> None:
        import torch

        if device.type == "cuda":  # a thread begins on device 0, and would make a context there
            torch.cuda.set_device(device)
        while True:
            self._finish(self._harvest.get())

    def _finish(self, timed: Any) -> None:
        result = timed.result()
        if not self._ready.rank:  # one of the ranks answers, and all have the same answer
            self.results.append(result)
        elif timed.copies:
            self._answer(PageAnswer(result.epoch, self._ctx.epoch, self._ready.rank, 0,
                                    step=result.step, lost=result.lost))
        self.steps += 1
        self._post()

    def _answer(self, answer: Result) -> None:
        self.results.append(answer)
        self._post()

    def _report(self, phase: str, detail: str) -> None:
        self.phase, self.detail = phase, detail
        self._post()
