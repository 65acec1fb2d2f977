"""Gives an opened device other weights of the same model, between two steps.

The model is loaded a second time, beside the one that is served and while steps go on, with its
kernels and its attention. Only when all of it is there, on every rank, does the runner take it, and
what was made of the old one is made anew: graphs or programs, layers with adapters, what drafts.
Pages, tables and states stay. What fails before leaves everything as it was.

What a worker serves is written to the run directory, for the workers that come after it."""

from __future__ import annotations

import gc
import logging
from pathlib import Path
from threading import Lock
from time import perf_counter

import msgspec
import torch
from msgspec.structs import replace

from actorium.actors.config.tree import Config
from actorium.actors.errors import BadConfig, BadModel
from actorium.actors.messages import WeightsSource
from actorium.actors.models.model_dir import resolve
from actorium.actors.runtime.memory_limits import available_memory
from actorium.actors.runtime.rundir import WEIGHTS, remove_tensors, write_private
from actorium.gpu.adapters.adapter_setup import renew_adapters
from actorium.gpu.families.architectures import ARCHITECTURES
from actorium.gpu.graphs.decode_programs import DecodePrograms
from actorium.gpu.models.decoder import Decoder, LoadedModel
from actorium.gpu.models.registry import load_model
from actorium.gpu.passes.pass_manager import PassManager
from actorium.gpu.step.eagle import eagle_proposers
from actorium.gpu.step.speculation import make_proposers
from actorium.gpu.weights.weight_files import Precedence, files_of
from actorium.gpu.worker.device import OpenedDevice, free_memory
from actorium.gpu.worker.exactness import set_exact, two_way_kernels
from actorium.gpu.worker.graph_setup import capture_programs, recapture_graphs
from actorium.gpu.worker.measure import WorkspaceMeter, cache_tensors

LOG = logging.getLogger("actorium.model")
MAX_OVER = 16
"""Files in front of a checkpoint: a worker that starts opens them all."""


class WeightsUpdate:
    """Updates one device."""

    def __init__(self, config: Config, opened: OpenedDevice, run_dir: Path) -> None:
        self._config, self._opened, self._run_dir = config, opened, run_dir
        self._one_by_one = Lock()
        self._prepared: tuple[int, WeightsSource, Decoder] | None = None

    def prepare(self, number: int, source: WeightsSource) -> WeightsSource:
        """Reads these files, while steps may go on, and returns what they are. Raises `BadModel`
        where they cannot be served."""
        with self._one_by_one:
            self._prepared = None
            try:
                made, model = self._load(source)
            except (BadConfig, OSError, MemoryError, RuntimeError) as error:
                raise BadModel(str(error).partition("\n")[0] or "there is no memory for them"
                               ) from None
            self._prepared = number, made, model
            return made

    def drop(self) -> None:
        """Gives up what was prepared."""
        self._prepared = None

    def take(self, number: int) -> WeightsSource:
        """Serves what was prepared under this number from now on, and returns what it is. No step
        is under way; all ranks call this. Raises `BadModel` where that cannot be; then nothing has
        changed."""
        start, runner, why = perf_counter(), self._opened.runner, ""
        prepared, self._prepared = self._prepared, None
        old = runner.model
        assert isinstance(old, LoadedModel)
        group = old.group
        try:
            if prepared is None or prepared[0] != number:
                raise BadModel("the weights were not prepared")
            PassManager(prepared[2], prepared[2].passes).install()
        except BadModel as error:
            why = error.message
        if not group.agreed(float(not why)) or prepared is None:
            raise BadModel(why or "another rank cannot serve them")
        made = prepared[1]
        self._install(prepared[2])
        del old, prepared
        free_memory(runner.arrays.device)
        gc.freeze()
        if runner.arrays.device.type == "cpu":
            self._opened = self._opened._replace(meter=self._new_meter())
        LOG.info("weights: %s, in %.2f s", made, perf_counter() - start)
        if self._opened.ready.rank == 0:
            keep_source(self._run_dir, made)
        group.agreed(1.0)  # no rank goes on before it is written
        return made

    @property
    def meter(self) -> WorkspaceMeter | None:
        """See `OpenedDevice`."""
        return self._opened.meter

    def _load(self, source: WeightsSource) -> tuple[WeightsSource, Decoder]:
        old = self._opened.runner.model
        if not isinstance(old, Decoder):
            raise BadModel("a model that transformers' classes run keeps its weights")
        config, served = self._config, resolve(self._config.model.model)
        files = files_of(source, served)
        files = files._replace(over=Precedence(
            files.over, ARCHITECTURES[old.shape.architecture].names).needed)
        if len(files.over) > MAX_OVER:
            raise BadModel(f"tensors of {MAX_OVER} updates are in use: send all of them at once")
        self._check_memory()
        before = files.digest(served)
        model = load_model(served, config, old.device, lambda *_: None, old.group,
                           lambda *_: old.passes, files, old)
        assert isinstance(model, Decoder)
        if files.digest(served) != before:
            raise BadModel(f"{files.path}: its files were changed while they were read")
        set_exact(model, all(part.exact for part in two_way_kernels(old)))
        return WeightsSource(source.path, [str(own) for own in files.over], before), model

    def _check_memory(self) -> None:
        """Raises `BadModel` where a second model has no room beside the first."""
        device, size = self._opened.runner.arrays.device, sum(
            self._opened.footprint.formats.values())
        free = available_memory() if device.type == "cpu" else torch.cuda.mem_get_info(device)[0]
        if size > free:
            raise BadModel(f"new weights are read beside those that are served: they take "
                           f"{size:,} bytes, and {free:,} are free")

    def _install(self, model: Decoder) -> None:
        opened, runner = self._opened, self._opened.runner
        if runner.adapters is not None:
            runner.adapters.layers = renew_adapters(runner.adapters.layers, model)
        pools = {method: own.pool for method, own in runner.proposers.items()}
        runner.model = model
        # What drafts from texts, or is a model of its own, stays.
        runner.proposers |= make_proposers(model.drafter, model.shape, pools.get("mtp"),
                                           runner.tables)
        runner.proposers |= eagle_proposers(model, pools.get("eagle3"), runner.tables)
        if runner.tables.images is not None and model.vision is not None:
            runner.tables.images.renew(model.vision)
        if runner.arrays.device.type == "cuda":
            recapture_graphs(self._config, runner)
        elif runner.segments is not None:
            runner.segments = None
            capture_programs(self._config, runner, opened.footprint, None, lambda *_: None)

    def _new_meter(self) -> WorkspaceMeter | None:
        """The two models that were there at once are no step's temporaries."""
        if self._opened.meter is None:
            return None
        runner = self._opened.runner
        meter = WorkspaceMeter(self._opened.footprint, cache_tensors(runner))
        if isinstance(runner.segments, DecodePrograms):
            meter.leave_out(runner.segments.memory)
        return meter


# --- What a worker serves, for those that come after it ------------------------------------------

def keep_source(run_dir: Path, source: WeightsSource) -> None:
    """Writes it down, and removes tensors that were sent to the engine and are no longer in use.
    Raises `OSError`."""
    write_private(run_dir / WEIGHTS, msgspec.json.encode(source))
    remove_tensors(run_dir, source.over)


def kept_source(run_dir: Path, config: Config) -> WeightsSource:
    """What the worker before this one has served, as its files are now. Raises `BadModel` where
    they are gone."""
    try:
        kept = msgspec.json.decode((run_dir / WEIGHTS).read_bytes(), type=WeightsSource)
    except FileNotFoundError:
        return WeightsSource()
    except (OSError, msgspec.MsgspecError) as error:
        raise BadModel(f"{run_dir / WEIGHTS}: {error}") from None
    served = resolve(config.model.model)
    now = replace(kept, digest=files_of(kept, served).digest(served))
    if now != kept:
        LOG.warning("%s: the files of the weights have changed since they were read", now.path)
    return now
