"""What segments keep of each size, and what the largest takes while it is captured, with a device's
kernels, counted on any machine: a size more costs what the driver keeps, and nothing of the pool.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from helpers_benchmarks import benchmark
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from actorium.gpu.graphs.piecewise_graphs import PiecewiseGraphRunner
from actorium.gpu.plan.graph_memory import GRAPH_BYTES, Graphs, graphs_estimate
from actorium.gpu.plan.memory_plan import Demand
from actorium.gpu.plan.weight_bytes import workspace_bytes

pytest.importorskip("triton")
launches = benchmark("launches")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="counts what Triton's "
                                "interpreter is asked for")
T = TypeVar("T")
SIZES = [512, 480, 256, 64, 16]
LAYERS = 4


class Live(TorchDispatchMode):
    """Knows which memory that was allocated meanwhile is in use."""

    def __init__(self) -> None:
        super().__init__()
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {_storage(t) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        out = func(*args, **(kwargs or {}))
        for own in tree_leaves(out):
            if isinstance(own, Tensor) and own.device.type == "cpu" and _storage(own) not in given:
                memory = own.untyped_storage()
                self._live[_storage(own)] = (StorageWeakRef(memory), memory.nbytes())
        self.peak = max(self.peak, self.held)
        return out

    @property
    def held(self) -> int:
        """Bytes."""
        self._live = {key: own for key, own in self._live.items() if not own[0].expired()}
        return sum(size for _, size in self._live.values())


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata  # type: ignore[no-any-return]


class Forgetting:
    """See `Capturer`: what is borrowed is held by nobody; knows what each capture took at most."""

    def __init__(self, counting: Any, live: Live) -> None:
        self._counting, self._live = counting, live
        self.peaks: list[int] = []

    def capture(self, run: Callable[[], T]) -> tuple[Any, T]:
        self._live.peak = 0
        with self._counting.apart():
            out = run()
        self.peaks.append(self._live.peak)
        return None, out

    def borrow(self, tensor: Tensor) -> Tensor:
        assert tensor.is_contiguous()
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


@pytest.mark.parametrize(("config", "quantization"), [
    (launches.LLAMA, "auto"), (launches.LLAMA, "fp8"), (launches.HYBRID, "auto"),
    (launches.HYBRID, "fp8"), (launches.MOE, "auto")])
def test_a_size_more_keeps_nothing(config: dict[str, Any], quantization: str,
                                   tmp_path: Path) -> None:
    fields = config | launches.WIDTHS | {"num_hidden_layers": LAYERS}
    if "layer_types" in fields:
        fields["layer_types"] = fields["layer_types"][:LAYERS]
    (tmp_path / "config.json").write_text(json.dumps(fields))
    case = launches.Case("", fields, 4, quantization=quantization)
    with launches.counted() as counting:
        runner = launches.open_device(launches.settings(tmp_path, case, "all"), 1,
                                      lambda *_: None, {}).runner
        runner.model.ops.products.assume(())
        live = Live()
        capturer = Forgetting(counting, live)
        segments = PiecewiseGraphRunner(runner.model, runner.pools, capturer, SIZES)
        with live:
            segments.capture(lambda *_: None)
            assert live.held == 0, "kept beside what segments take in"
    peaks = [max(capturer.peaks[at:at + LAYERS]) for at in range(0, len(capturer.peaks), LAYERS)]
    assert len(peaks) == len(SIZES) and peaks == sorted(peaks, reverse=True)
    assert 0 < peaks[0] <= workspace_bytes(runner.model.shape, SIZES[0], 0) < 3 * peaks[0]
    shape, demand = runner.model.shape, Demand(4)
    planned = graphs_estimate(shape, demand, Graphs([], SIZES))
    assert planned - graphs_estimate(shape, demand, Graphs([], SIZES[:1])) == 4 * GRAPH_BYTES
