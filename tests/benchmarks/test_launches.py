"""Launches of a decode step, counted: they are the part of a small step that no kernel can win."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers_benchmarks import BENCHMARKS, benchmark
from helpers_worker import CPU

from actorium.gpu.step.staging import DeviceArrays

pytest.importorskip("triton")
launches = benchmark("launches")
FILE = BENCHMARKS / "results" / "launches.json"
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="counts what Triton's "
                                "interpreter is asked for")


def test_the_step_of_one_sequence() -> None:
    found = launches.count(launches.CASES[0])
    assert found.launches["_fill"] == 1 and found.launches["_decode"] == 32
    assert found.launches["_list"] == 1 and "_merge" not in found.launches
    assert found.replays <= 2 and found.uploads == 0 and found.fetches == 1
    assert sum(found.launches.values()) <= 200


def test_the_step_of_one_sequence_without_passes() -> None:
    """Of a layer: two norms, four products, q and k turned, k and v joined and written, attention,
    the gate, two sums."""
    plain = launches.count(launches.CASES[0], fused=False, passes="none").launches
    joined = launches.count(launches.CASES[0], fused=False).launches
    assert plain["_norm"] == joined["_norm"] == 65 and plain["_decode"] == 32
    assert plain["aten::add"] - joined["aten::add"] == 64 and "_rotate" not in plain
    assert sum(plain.values()) - sum(joined.values()) == 32 * 9


@pytest.mark.slow
def test_a_step_of_many_sequences() -> None:
    """Norms and gates are in the products of these as well, where that is chosen."""
    many = next(case for case in launches.CASES if case.batch == 64)
    fused, apart = launches.count(many), launches.count(many, fused=False)
    assert sum(fused.launches.values()) <= 200 and not {"_norm", "_gate"} & set(fused.launches)
    assert fused.launches["_skinny"] == 65 and fused.launches["aten::addmm_"] == 64
    assert sum(apart.launches.values()) <= 296 and apart.launches["_norm"] == 65


def test_a_step_in_fp8() -> None:
    """What attention gives is quantised by a launch of its own in each layer; all else on the way
    of what was launched anyway."""
    found = launches.count(replace(launches.CASES[0], quantization="fp8"))
    assert found.launches["_quantise_rows"] == 32 and found.launches["_norm_fp8"] == 64
    assert found.launches["_gate_rows"] == 32 and sum(found.launches.values()) <= 328


@pytest.mark.slow
def test_a_step_in_int8() -> None:
    """The same: without the passes that quantise each product does so by itself."""
    case = replace(launches.CASES[0], quantization="int8", group=0)
    found = launches.count(case).launches
    apart = launches.count(case, passes="all,-norm_quant,-act_quant").launches
    assert found["_norm_int8"] == 64 and found["_gate_int8"] == 32
    assert apart["_quantise_int8"] - found["_quantise_int8"] == 96
    assert sum(apart.values()) - sum(found.values()) == 96


def test_a_piece_of_a_prompt_in_segments() -> None:
    """Between them each layer attends to prompt and decodes, but for the last, whose prompt goes
    on. The segments hold a layer's eight other kernels, embedding and rope, but not the last five
    of all; their inputs are gathered by one."""
    layers, config = 4, launches.LLAMA | {"num_hidden_layers": 4}
    eager, cut = (launches.count_piece(config, 512, how) for how in (False, True))
    assert cut.replays == layers and cut.uploads == eager.uploads == cut.fetches == 1
    outside = sum(cut.launches.values()) - cut.in_graphs
    assert cut.launches["_decode"] == layers and cut.launches["_extend"] == layers - 1
    assert sum(eager.launches.values()) - outside == 8 * layers + 2 - 5 - 1
    told = json.loads(FILE.read_text())["prompts"]["Llama-3.1-8B"]
    assert told["replays"] == 32 and told["launches"] - outside == 2 * 28


def test_the_file_promises_no_less_than_there_is() -> None:
    told, case = json.loads(FILE.read_text()), launches.CASES[0]
    assert launches.count(case).figures()["launches"] <= told["now"][case.name]["launches"]
    assert set(told["now"]) == {own.name for own in launches.CASES} >= set(told["before"])


def test_counted_and_uncounted_launches() -> None:
    x, rows = torch.ones(4, 6), torch.zeros(2, dtype=torch.int64)
    moves = DeviceArrays(CPU)
    with launches.counted() as counting:
        y = torch.empty(2, 2)
        y.view(-1)[1:].t()
        assert not counting.tally.launches, "views and memory are free"
        assert y.tolist() == [[0, 0], [0, 0]]
        counting.tally = launches.Tally()
        torch.nn.functional.linear(x, x)  # a view and a product
        x.t().reshape(-1)  # a copy, where a view will not do
        x.reshape(-1)
        x[rows] += 1
        with counting.apart() as inner:
            x.add_(1)
        moves.send([np.zeros(3, np.int32)])
        moves.fetch(x, x)
    assert counting.tally.launches == {"aten::mm": 1, "aten::clone": 1, "aten::index": 1,
                                       "aten::add_": 1, "aten::index_put_": 1}
    assert inner.launches == {"aten::add_": 1}
    assert (counting.tally.uploads, counting.tally.fetches) == (1, 2)
    assert counting.tally.replays == 0


def test_a_graph_counts_when_it_is_replayed() -> None:
    with launches.counted() as counting:
        graph, _ = launches.CountingCapturer(counting).capture(lambda: torch.zeros(3).add_(1))
        assert not counting.tally.launches
        graph.replay()
        graph.replay()
    assert counting.tally.replays == 2
    assert counting.tally.launches == {"aten::zeros": 2, "aten::add_": 2}
