"""The memory plan against what torch allocates, and its laws over many shapes."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_configs import BIG, CONFIGS, DELTA, EXPERTS, HERE, LATENT, SMALL, name_of, shape_of
from hypothesis import given, settings
from hypothesis import strategies as st

from actorium.actors.config.tree import (
    Config,
    DeviceConfig,
    MemoryConfig,
    ModelConfig,
    SchedulerConfig,
)
from actorium.actors.errors import BadConfig
from actorium.gpu.families.architectures import ARCHITECTURES, model_tensors, shape_from_config
from actorium.gpu.families.model_shape import ModelShape
from actorium.gpu.families.recurrent_shapes import DeltaShape
from actorium.gpu.models.registry import decoder_of
from actorium.gpu.plan.memory_plan import (
    Demand,
    MemoryPlan,
    changes,
    default_checkpoints,
    make_plan,
    page_demand,
    token_bytes,
)
from actorium.gpu.plan.sizes import page_table_width
from actorium.gpu.plan.weight_bytes import parameters, table_bytes, weight_bytes
from actorium.gpu.step.pools import make_pools
from actorium.gpu.step.staging import device_arrays
from actorium.gpu.step.states import StatePool
from actorium.gpu.step.tables import SlotTables
from actorium.gpu.weights.dtypes import TORCH_DTYPES, kv_dtype
from actorium.gpu.worker.device import open_device
from actorium.tools.cli import main

CPU = torch.device("cpu")


# --- weights -------------------------------------------------------------------------------------

def test_every_architecture_is_tried() -> None:
    assert set(ARCHITECTURES) == {name_of(config) for config in CONFIGS}
    assert all(map(decoder_of, ARCHITECTURES))


def test_weights_of_the_27b_shape() -> None:
    shape = shape_from_config(json.loads(BIG.read_text()), BIG)
    layer = (5120 * (2 * 24 + 2 * 4) * 256 + 24 * 256 * 5120 + 2 * 256 + 2 * 5120
             + 3 * 5120 * 17408)
    without = parameters(replace(shape, mtp_layers=0))
    assert parameters(shape) - without == layer + 2 * 5120**2 + 3 * 5120
    whole, half = weight_bytes(shape), weight_bytes(shape.split(2))
    assert whole / 2 < half < whole / 2 + (4 << 20)


@pytest.mark.parametrize("config", [
    {"architectures": ["DeepseekV3ForCausalLM"], **LATENT, "num_nextn_predict_layers": 2},
    {"architectures": ["Qwen3_5ForCausalLM"], **DELTA, "mtp_num_hidden_layers": 1},
    {"architectures": ["Qwen3NextForCausalLM"], **DELTA, **EXPERTS, "model_type": "qwen3_next"},
], ids=name_of)
def test_tensors_of_a_layer_that_drafts(config: dict[str, Any]) -> None:
    shape = shape_of(config)
    specs, without = model_tensors(shape), model_tensors(replace(shape, mtp_layers=0))
    assert shape.mtp_layers == 1 and specs[:len(without)] == without
    assert all(spec.name.startswith(("mtp.", "model.layers.4.")) for spec in specs[len(without):])


def test_a_latent_is_all_that_a_token_leaves() -> None:
    raw = {"architectures": ["DeepseekV3ForCausalLM"], "dtype": "bfloat16"}
    ours = replace(shape_from_config(raw, HERE), mtp_layers=0)
    assert ours.kv_row == ours.split(8).kv_row == (1, 512 + 64)
    plan = make_plan(ours, Demand(4, checkpoints=0), 1 << 33)
    assert plan.token_bytes == 61 * 576 * 2
    billions = parameters(ours) / 1e9
    assert 671 < billions < 671.1


def test_tables_take_their_planned_bytes() -> None:
    tables = SlotTables(device_arrays(CPU), 5, page_table_width(512, 16), 16, 199, 512, 2)
    arrays = [tables.last_token, tables.seq_len, tables.ended, tables.record, tables.eos,
              *tables.pages]
    assert table_bytes(5, 512, 16, 2) == sum(array.nbytes for array in arrays)


@pytest.mark.parametrize("config", CONFIGS, ids=name_of)
@pytest.mark.parametrize("demand", [
    Demand(3, 4, 64, checkpoints=0), Demand(2, 16, 32, state_dtype="bfloat16", checkpoints=5),
    Demand(4, 1, 64, kv_dtype="float16"), Demand(3, 16, 64, kv_dtype="fp8_e4m3"),
    Demand(3, 16, 64, kv_dtype="int8"), Demand(3, 8, 64, max_total_tokens=200)])
def test_the_plan_is_what_torch_allocates(config: dict[str, Any], demand: Demand) -> None:
    shape = shape_of(config)
    plan, own = make_plan(shape, demand, 3 << 20), TORCH_DTYPES[shape.dtype]
    dtype = kv_dtype(demand.kv_dtype, own)
    pools = make_pools(shape, [pool.pages for pool in plan.pools], demand.page_size, dtype, CPU)
    assert [pool.bytes for pool in pools] == [pool.bytes for pool in plan.pools]
    used = sum(pool.bytes for pool in pools)
    if shape.state is not None:
        states = StatePool(shape.state, len(shape.recurrent), plan.slots, plan.checkpoints,
                           TORCH_DTYPES[demand.state_dtype], own, CPU)
        assert states.layers[0].state.shape[0] == plan.state_rows
        used += states.bytes
    assert used == plan.used


# --- laws ----------------------------------------------------------------------------------------

@st.composite
def shapes(draw: st.DrawFn) -> ModelShape:
    number = st.integers(1, 6)
    windows = draw(st.lists(st.sampled_from([0, 0, 7, 64, 1024]), min_size=1, max_size=5))
    states = draw(st.none() | st.builds(
        DeltaShape, number, number, number, number, st.integers(2, 5)))
    recurrent = tuple(range(draw(number))) if states else ()
    return ModelShape(
        "Any", 100, 32, 64, len(windows) + len(recurrent), 4, draw(number), draw(number), 1e-6,
        False, (), (*(0 for _ in recurrent), *windows), draw(st.integers(2, 5000)),
        draw(st.sampled_from(["float32", "bfloat16"])), 1.0, recurrent=recurrent,
        recurrence=states, mtp_layers=1)


demands = st.builds(
    Demand, st.integers(1, 40), st.sampled_from([1, 4, 16, 64]), st.integers(1, 600),
    st.integers(0, 4), st.sampled_from(["auto", "fp8_e4m3", "int8"]),
    st.sampled_from(["float32", "bfloat16"]), st.integers(0, 20),
    st.none() | st.none() | st.integers(64, 50_000), other_drafts=st.integers(0, 6))
spares = st.integers(0, 1 << 20)


def least(shape: ModelShape, demand: Demand) -> int:
    """The smallest budget that can be planned for, as the error for none at all tells it."""
    with pytest.raises(BadConfig, match="too few") as error:
        make_plan(shape, demand, 0)
    found = re.search(r"([0-9,]+) too few", error.value.message)
    assert found
    return int(found[1].replace(",", ""))


def planned(shape: ModelShape, demand: Demand, spare: int) -> MemoryPlan:
    """With so many bytes more than the least."""
    return make_plan(shape, demand, least(shape, demand) + spare)


@settings(deadline=None)
@given(shapes(), demands)
def test_what_is_missing_is_missing_exactly(shape: ModelShape, demand: Demand) -> None:
    enough = least(shape, demand)
    make_plan(shape, demand, enough)
    with pytest.raises(BadConfig, match=" are 1 too few"):
        make_plan(shape, demand, enough - 1)


@settings(deadline=None, max_examples=200)
@given(shapes(), demands, spares, st.booleans())
def test_no_byte_is_unaccounted_for(shape: ModelShape, demand: Demand, spare: int,
                                    automatic: bool) -> None:
    budget = least(shape, demand) + spare
    plan = make_plan(shape, demand, budget)
    if automatic:
        budget *= 2
        plan = make_plan(shape, demand._replace(checkpoints=None), budget)
    assert sum(line.bytes for line in plan.lines) == budget
    assert all(line.bytes == line.number * line.each >= 0 for line in plan.lines)
    states = plan.state_rows * plan.state.checkpoint
    states += demand.max_num_seqs * plan.state.window
    assert plan.used == states + sum(pool.bytes for pool in plan.pools) <= budget
    if automatic and shape.recurrent:  # the plan adds those that fit in what pages leave over
        chosen = default_checkpoints(plan.state, token_bytes(shape, demand), budget)
        assert chosen * plan.state.checkpoint <= budget / 16 and chosen <= plan.checkpoints


@settings(deadline=None, max_examples=200)
@given(shapes(), demands, spares, st.integers(0, 1 << 22))
def test_more_memory_never_holds_less(shape: ModelShape, demand: Demand, spare: int,
                                      more: int) -> None:
    less, plenty = planned(shape, demand, spare), planned(shape, demand, spare + more)
    assert less.token_capacity <= plenty.token_capacity
    assert less.one_sequence <= plenty.one_sequence
    assert all(a.pages <= b.pages for a, b in zip(less.pools, plenty.pools, strict=True))


@settings(deadline=None, max_examples=200)
@given(shapes(), demands, spares)
def test_nothing_more_to_hold_makes_room_for_tokens(
        shape: ModelShape, demand: Demand, spare: int) -> None:
    """Where memory is the limit; where each sequence can have its full length, more sequences are
    more tokens."""
    plan = planned(shape, demand, spare)
    if plan.limited_by != "memory":
        return
    for change in changes(plan):
        if change.name in ("one more request", "one more checkpoint"):
            assert (change.token_capacity or 0) <= plan.token_capacity
        elif change.name == "bfloat16 states":
            assert (change.token_capacity or 0) >= plan.token_capacity


@settings(deadline=None, max_examples=200)
@given(shapes(), demands, spares, st.data())
def test_the_capacity_holds_in_whatever_lengths(
        shape: ModelShape, demand: Demand, spare: int, data: st.DataObject) -> None:
    plan = planned(shape, demand, spare)
    n, p, most = demand.max_num_seqs, demand.page_size, shape.max_model_len
    tokens = plan.token_capacity
    assert tokens == 0 or n <= tokens <= n * most
    if not tokens or tokens == n * most:
        return
    pages, size = plan.lead.pages - 1, page_demand(plan.shape, demand)
    cuts = sorted(data.draw(st.lists(st.integers(0, tokens), min_size=n - 1, max_size=n - 1)))
    lengths = [b - a for a, b in zip([0, *cuts], [*cuts, tokens], strict=True)]
    assert sum(-(-length // p) for length in lengths) <= pages
    for pool in plan.pools:
        assert pool.pages - 1 >= min(pages, size.for_all(pool.window))
    worst = [1] * (n - 1) + [tokens + 1 - (n - 1)]
    assert sum(-(-length // p) for length in worst) > pages, "one token more need not fit"


@given(st.sampled_from([1, 2, 4]), demands, spares)
def test_gpus_share_states_and_heads(tp: int, demand: Demand, spare: int) -> None:
    shape = shape_from_config({**SMALL, **DELTA, "architectures": ["Qwen3_5ForCausalLM"],
                             "mtp_num_hidden_layers": 1}, HERE)
    whole, part = planned(shape, demand, spare), planned(shape.split(tp), demand, spare)
    assert part.state.state * tp == whole.state.state
    assert part.token_bytes * min(tp, 2) == whole.token_bytes, "two kv heads cannot be four"
    assert replace(part.shape, tp=1).windows == whole.shape.windows


# --- the worker ----------------------------------------------------------------------------------

@pytest.mark.parametrize(("checkpoints", "kv"), [(None, "auto"), (0, "auto"), (7, "auto"),
                                                 (3, "fp8_e4m3"), (3, "int8")])
def test_the_worker_allocates_what_the_command_prints(
        checkpoints: int | None, kv: str, tmp_path: Path,
        capsys: pytest.CaptureFixture[str]) -> None:
    raw = {**SMALL, **DELTA, "architectures": ["Qwen3_5ForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    budget = 150_000 if kv == "auto" else 100_000
    config = Config(
        model=ModelConfig(model=str(tmp_path), load_format="dummy"),
        memory=MemoryConfig(kv_cache_bytes=budget, page_size=4, checkpoints=checkpoints,
                            kv_cache_dtype=kv),
        scheduler=SchedulerConfig(max_num_seqs=3), device=DeviceConfig(device="cpu", threads=1))
    opened = open_device(config, 1, lambda phase, detail: None, {})
    argv = ["plan", str(tmp_path), "--memory", str(budget), "--page-size", "4"]
    argv += ["--max-num-seqs", "3"]
    argv += ["--checkpoints", str(checkpoints)] if checkpoints is not None else []
    argv += ["--kv-cache-dtype", kv]
    assert main([*argv, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    states = opened.runner.states
    assert states is not None
    assert sum(pool.bytes for pool in opened.runner.pools) + states.bytes == plan["used"]
    assert [group.pages for group in opened.ready.groups] == [
        pool["pages"] for pool in plan["pools"]]
    assert opened.ready.checkpoints == plan["checkpoints"] == (
        1 if checkpoints is None else checkpoints)
    assert plan["limited_by"] == "memory"
    found = {layer.dtype for pool in opened.runner.pools for layer in pool.layers}
    assert found == {kv_dtype(kv, torch.bfloat16)}
    assert opened.info.kv_dtype == plan["kv_dtype"] == ("bfloat16" if kv == "auto" else kv)


def test_a_worker_without_room_reports_the_lack(tmp_path: Path) -> None:
    raw = {**SMALL, **DELTA, "architectures": ["Qwen3_5ForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    config = Config(model=ModelConfig(model=str(tmp_path), load_format="dummy"),
                    memory=MemoryConfig(kv_cache_bytes=1 << 17),
                    device=DeviceConfig(device="cpu", threads=1))
    with pytest.raises(BadConfig, match="^kv_cache_bytes: 131,072 bytes are .* too few: .* for "
                       "the states of 256 sequences"):
        open_device(config, 1, lambda phase, detail: None, {})
