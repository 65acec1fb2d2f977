"""The warm-up's kernels are compiled ahead of it: nothing is computed or changed on that walk, and
what was compiled is what a start launches (see also `test_warmup_forms`)."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers_compile import compiled

from actorium.gpu.worker.warmup import ZeroMode, one_layer_per_kind


def test_results_are_zeros_of_the_right_shape() -> None:
    x, w, at = torch.ones(3, 4), torch.ones(5, 4), torch.tensor([2, 9])
    with torch.inference_mode(), ZeroMode():
        found = [F.linear(x, w), x.softmax(1), x.sum(0), x[at], torch.cat((x, x)).view(4, 6),
                 x.new_empty(2, 3), torch.empty(7), torch.randn(2, 2), torch.stack((x, x)),
                 F.scaled_dot_product_attention(*[x.view(1, 1, 3, 4)] * 3),
                 x.bfloat16() @ w.T.bfloat16()]
    assert [tuple(own.shape) for own in found] == [
        (3, 5), (3, 4), (4,), (2, 4), (4, 6), (2, 3), (7,), (2, 2), (2, 3, 4), (1, 1, 3, 4), (3, 5)]
    assert not any(own.any() for own in found) and found[-1].dtype is torch.bfloat16


def test_nothing_is_changed_in_place() -> None:
    x, y = torch.ones(3, 4), torch.ones(3, 4)
    with torch.inference_mode(), ZeroMode():
        assert x.add_(1) is x and x.addmm_(y, y.T @ y) is x
        x[torch.tensor([0])] = 5.0
        x.zero_()
        torch.mul(y, 3, out=x)
        assert x[1:].data_ptr() == x.data_ptr() + 16, "views are views"
    assert x.eq(1).all()


def test_copies_between_host_and_device_run() -> None:
    x, y = torch.tensor([3, 0, 4]), torch.zeros(3, dtype=torch.int64)
    with torch.inference_mode(), ZeroMode():
        y.copy_(x)
        assert y.tolist() == [3, 0, 4] and int(y[2]) == 4
        assert x.nonzero().tolist() == [[0], [2]], "its shape follows from the numbers"


def test_a_layer_of_each_kind_is_left() -> None:
    def other(self: Any) -> None:
        """Of another kind."""

    def run(kind: Any = test_nothing_is_changed_in_place) -> Any:
        return SimpleNamespace(whole=SimpleNamespace(__func__=kind))

    runs = [run(), run(), run(other), run(), run(other), run()]
    model: Any = SimpleNamespace(runs=runs, shape=SimpleNamespace(windows=(0, 0, 0, 8, 0, 0)))
    with pytest.raises(ValueError, match="on the walk"), one_layer_per_kind(model):
        assert model.runs == [runs[0], runs[2], runs[3], runs[5]]
        raise ValueError("on the walk")
    assert model.runs is runs


CODE = """
import threading
import torch
from actorium.gpu.worker.warmup import compiling_launches
from actorium.kernels.triton.norm import rms_norm

def run(*widths):
    with compiling_launches(2) as missed:
        for width in widths:
            rms_norm(torch.zeros(4, width), torch.zeros(width), 1e-5)
    return missed

hopper.launcher_cls = lambda source, metadata: threads.append(threading.get_ident())
threads = []
assert run(32, 64, 32) == ["_norm", "_norm"]
assert len(threads) == 2 and threading.get_ident() not in threads
assert run(32, 64) == [], "they are in this process by now"
from actorium.kernels.triton.norm import _norm
_norm.device_caches.clear()
assert run(32, 64) == [] and len(threads) == 4, "they are on the disk"
hopper.kernels.clear()
print("ahead")
"""


@pytest.mark.slow
def test_threads_compile_what_is_launched_once(tmp_path: Path) -> None:
    """By Triton's own compiler, for a device that is not there."""
    pytest.importorskip("triton")
    assert "ahead" in compiled(CODE, tmp_path)
