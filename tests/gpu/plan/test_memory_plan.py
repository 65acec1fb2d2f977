"""The memory plan: every byte accounted for, and a capacity that holds whatever the lengths."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers_imports import loaded_by
from helpers_speed import seconds_of_process, slowness

from actorium.actors.config.retention import retention_bounds
from actorium.actors.config.tree import Config
from actorium.actors.errors import BadModel
from actorium.actors.models.model_dir import checkpoint_bytes
from actorium.gpu.families.architectures import shape_from_config
from actorium.gpu.families.model_shape import ModelShape
from actorium.gpu.families.recurrent_shapes import DeltaShape
from actorium.gpu.plan.memory_plan import (
    Demand,
    MemoryPlan,
    changes,
    make_plan,
)
from actorium.gpu.plan.weight_bytes import weight_bytes
from actorium.tools.cli import main
from actorium.tools.cli.plan_command import size

DATA = Path(__file__).parents[2] / "data" / "qwen3.5-27b"
SHAPES = Path(__file__).parents[3] / "tools" / "bench" / "shapes"
GPU = int(13.61 * 2**30)
COMMAND = ["plan", str(DATA), "--memory", "13.61GiB", "--tp", "2", "--max-num-seqs", "32",
           "--speculative", "mtp:2"]
K = {"drafts": 2, "max_num_seqs": 32}


def read(path: Path) -> ModelShape:
    return shape_from_config(json.loads(path.read_text()), path)


def big(**demand: Any) -> MemoryPlan:
    """The 27B shape on one of two GPUs."""
    return make_plan(read(DATA / "config.json").split(2), Demand(**{**K, **demand}), GPU)


# --- Qwen3.5-27B ---------------------------------------------------------------------------------

@pytest.mark.parametrize(("dtype", "least", "limit", "state"), [
    ("float32", 340_000, 348_080, 24 * 128 * 128 * 4),
    ("bfloat16", 374_000, 382_775, 24 * 128 * 128 * 2)])
def test_the_27b_shape_holds_what_arithmetic_allows(
        dtype: str, least: int, limit: int, state: int) -> None:
    plan = big(state_dtype=dtype, checkpoints=0)
    assert plan.token_bytes == 34_816
    assert plan.arithmetic_limit == limit
    assert least <= plan.token_capacity < plan.page_tokens < limit
    assert plan.state.state == 48 * state
    assert plan.state.columns == 48 * 3 * 5120 * 2
    assert plan.state.window == 48 * 2 * (5120 + 2 * 24) * 2, "of two drafts; no second state"
    assert plan.limited_by == "memory"


@pytest.mark.parametrize("longest", [1000, 4096, 30_000, 262_144])
@pytest.mark.parametrize("windows", [False, True])
def test_requests_of_full_length_fit_at_once_and_one_more_does_not(
        longest: int, windows: bool) -> None:
    shape = read(DATA / "config.json").split(2)
    own = tuple(512 * (i // 4 % 4 > 0) for i in range(shape.layers)) if windows \
        else shape.windows
    plan = make_plan(replace(shape, max_model_len=longest, windows=own), Demand(**K), GPU)
    at_once, table = plan.full_length, -(-longest // plan.demand.page_size)
    assert 1 <= at_once <= 32

    def fits(requests: int) -> bool:
        chunk = -(-plan.demand.chunk // plan.demand.page_size)
        return all(requests * table < pool.pages if not pool.window
                   else requests * (512 // plan.demand.page_size + 2) + chunk < pool.pages
                   for pool in plan.pools)

    assert fits(at_once) and (at_once == 32 or not fits(at_once + 1))
    if longest == 1000:
        assert at_once == 32, "no more than run at once"


def test_checkpoints_have_a_share_and_a_price() -> None:
    plan = big()
    taken = plan.checkpoints * plan.state.checkpoint
    assert GPU / 100 < taken <= GPU / 64
    price = big(checkpoints=4).token_capacity - big(checkpoints=5).token_capacity
    assert 2_200 <= price <= 2_240
    named = {change.name: change.token_capacity for change in changes(plan)}
    assert named["one more checkpoint"] == big(checkpoints=plan.checkpoints + 1).token_capacity
    assert named["no checkpoints"] == big(checkpoints=0).token_capacity
    assert named["one more request"] == big(
        checkpoints=plan.checkpoints, max_num_seqs=33).token_capacity
    assert named["bfloat16 states"] == big(
        checkpoints=plan.checkpoints, state_dtype="bfloat16").token_capacity


def test_few_states_leave_checkpoints_to_the_number_of_prefixes() -> None:
    shape = replace(read(DATA / "config.json"), recurrent=(0,),
                    recurrence=DeltaShape(1, 1, 8, 8, 4))
    plan = make_plan(shape, Demand(4), 1 << 30)
    assert plan.checkpoints == (1 << 30) // (256 * plan.token_bytes)


# --- the command ---------------------------------------------------------------------------------

def as_json(capsys: pytest.CaptureFixture[str], *more: str) -> dict[str, Any]:
    assert main([*COMMAND, "--json", *more]) == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return report


def test_json_has_the_capacity_and_every_byte(capsys: pytest.CaptureFixture[str]) -> None:
    plan = as_json(capsys, "--checkpoints", "0")
    assert plan["token_capacity"] == big(checkpoints=0).token_capacity >= 340_000
    assert sum(line["bytes"] for line in plan["bytes"]) == plan["budget"] == GPU
    assert all(line["bytes"] == line["number"] * line["each"] for line in plan["bytes"])
    pools = sum(pool["bytes"] for pool in plan["pools"])
    states = (plan["states"]["rows"] * (plan["states"]["state"] + plan["states"]["columns"])
              + 32 * plan["states"]["window"])
    assert plan["used"] == pools + states
    assert plan["outside"][0]["bytes"] == weight_bytes(read(DATA / "config.json").split(2))
    halved = as_json(capsys, "--checkpoints", "0", "--state-dtype", "bf16")
    assert halved["token_capacity"] >= 374_000
    assert as_json(capsys)["checkpoints"] == big().checkpoints
    assert as_json(capsys)["kept"] == [row._asdict() for row in retention_bounds(Config())]
    assert as_json(capsys, "--no-prefix-cache")["checkpoints"] == 0


def test_the_table_lists_the_uses_of_memory(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMAND, "--checkpoints", "16"]) == 0
    out = capsys.readouterr().out
    plan = big(checkpoints=16)
    for line in plan.lines:
        assert f"  {line.name} " in out and f"{line.bytes:,}" in out
    assert f"{plan.token_capacity:,}  tokens guaranteed to 32 requests at once" in out
    assert "16 x 76,972,032; states kept for prefix reuse" in out
    assert "one more request (" in out and "bfloat16 states (+" in out
    assert "an estimate" in out


def test_the_command_answers_at_once_and_without_torch() -> None:
    code = f"from actorium.tools.cli import main; main({COMMAND!r})"
    assert min(seconds_of_process(code) for _ in range(3)) < slowness()
    loaded = loaded_by("import io, sys; sys.stdout = io.StringIO()\n" + code
                       + "\nsys.stdout = sys.__stdout__")
    assert not loaded & {"torch", "transformers", "numpy", "zmq", "matplotlib"}


def test_help_names_both_budgets(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["plan", "--help"])
    assert stop.value.code == 0
    out = capsys.readouterr().out
    assert all(word in out for word in ("--memory", "--gpu-memory", "--tp", "--checkpoints"))


def test_a_plan_for_the_whole_device(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(DATA), "--gpu-memory", "80GB", "-tp", "2", "--max-num-seqs", "32",
                 "--memory-fraction", "0.9", "--weights", "27e9", "--json"]) == 2
    assert main(["plan", str(DATA), "--gpu-memory", "80GB", "-tp", "2", "--max-num-seqs", "32",
                 "--memory-fraction", "0.9", "--weights", "27GB", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    outside = {line["name"]: line["bytes"] for line in plan["outside"]}
    assert outside["weights"] == 27 * 10**9
    assert plan["budget"] + sum(outside.values()) == 72 * 10**9
    assert main(["plan", str(DATA), "--kv-cache-bytes", "40g", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["budget"] == 40 << 30


@pytest.mark.parametrize(("words", "place", "captured"), [
    ((), "one worker on a CPU", "programs of decodes of up to 64 rows"),
    (("--device", "cpu", "--memory", "1GiB"), "one worker on a CPU", "programs of decodes"),
    (("--enforce-eager",), "one worker on a CPU", "none: --enforce-eager"),
    (("--gpu-memory", "80GB"), "one GPU", "on cuda; on a cpu programs of up to"),
    (("--memory", "20GiB"), "one GPU", "on cuda"), (("--device", "cuda"), "one GPU", "on cuda")])
def test_a_plan_says_what_it_is_of(words: tuple[str, ...], place: str, captured: str,
                                   capsys: pytest.CaptureFixture[str]) -> None:
    """Without a GPU named or asked for it is a worker's on a CPU: no CUDA graphs lie there."""
    assert main(["plan", *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].startswith(f"bytes of {place}  ")
    (graphs,) = [line for line in lines if line.startswith("graphs ")]
    assert captured in graphs and ("cuda" in graphs) == (place == "one GPU")


def test_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str],
                   monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    assert main([*COMMAND, "--plot", str(tmp_path / "plan.svg")]) == 0
    assert "pages, full attention" in (tmp_path / "plan.svg").read_text()
    capsys.readouterr()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main([*COMMAND, "--plot", str(tmp_path / "plan.svg")]) == 2
    assert capsys.readouterr().err == (
        "actorium: error: --plot: needs matplotlib; from a checkout: pip install -e '.[bench]'\n")


BAD = [
    (["--tp", "3"], "--tp: 4 kv heads cannot be shared out to 3 GPUs"),
    (["--tp", "16"], "--tp: 16 GPUs cannot share 24 attention heads"),
    (["-tp", "0"], "-tp: must be between 1 and 1024, got 0"),
    (["--memory", "2GiB"], "--memory: 2,147,483,648 bytes are"),
    (["--memory", "much"], "--memory: must be bytes or a size as 13.61GiB or 80GB, got 'much'"),
    (["--memory", "0"], "--memory: must be at least 1 byte, got '0'"),
    (["--gpu-memory", "1GB"], "--gpu-memory: 0.85 of 1,000,000,000 bytes are"),
    (["--memory", "1GB", "--gpu-memory", "1GB"], "--memory: the caches' budget; cannot"),
    (["--memory", "40GB", "--speculative", "2"], "--speculative: must be auto, off, or METHOD"),
    (["--memory", "40GB", "--speculative", "mtp:0"], "--speculative: must be auto, off, or METHOD"),
    (["--memory", "40GB", "--kv-cache-dtype", "q4"], "--kv-cache-dtype: must be one of auto"),
    (["--memory", "40GB", "--state-dtype", "fp8"], "--state-dtype: must be float32 or bfloat16"),
    (["--memory", "40GB", "--checkpoints", "-1"], "--checkpoints: must not be negative"),
    (["--memory", "40GB", "--plot", "x.txt"], "--plot: must end in .png"),
    (["--memory", "40GB", "--plot", "/nowhere/x.png"], "--plot: no such directory: /nowhere"),
    (["--max-model-len", "1m"], "max_model_len: 1048576 exceeds the model's own limit"),
    (["extra"], "extra: unexpected argument"),
]


@pytest.mark.parametrize(("argv", "message"), BAD)
def test_bad_flags_exit_2_with_one_line(argv: list[str], message: str,
                                        capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(DATA), *argv]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert captured.err.startswith(f"actorium: error: {message}")


def test_a_lack_of_memory_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMAND[:2], "--memory", "2GiB", "-tp", "2", "--max-num-seqs", "32",
                 "--speculative", "off"]) == 2
    need = 32 * (75_497_472 + 1_474_560) + 76_972_032 + 1_048_576  # one checkpoint fits in 1/16
    assert f"are {need - (1 << 31):,} too few" in capsys.readouterr().err


@pytest.mark.parametrize(("config", "message"), [
    ({}, "architectures: must name the model class"),
    ({"architectures": ["GPT9LMHeadModel"]}, "architecture GPT9LMHeadModel is not supported"),
    ({"num_hidden_layers": None}, "num_hidden_layers: must be a positive integer, got None"),
    ({"num_key_value_heads": 5}, "num_key_value_heads: 5 does not divide 16 heads"),
    ({"dtype": "int4"}, "dtype: must be float32, bfloat16 or float16, got 'int4'"),
    ({"use_sliding_window": True, "sliding_window": 8, "layer_types": ["full"]},
     "layer_types: must be 28 times"),
])
def test_bad_configs_name_file_and_field(config: dict[str, Any], message: str, tmp_path: Path,
                                         capsys: pytest.CaptureFixture[str]) -> None:
    whole = {**json.loads((SHAPES / "S06.json").read_text()), **config} if config else {}
    file = tmp_path / "config.json"
    file.write_text(json.dumps(whole))
    with pytest.raises(BadModel, match="config.json"):
        read(file)
    assert main(["plan", str(file)]) == 2
    assert capsys.readouterr().err.startswith(f"actorium: error: {file}: {message}")


def test_no_such_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "/nowhere/config.json"]) == 2
    assert capsys.readouterr().err == (
        "actorium: error: model: no such file: /nowhere/config.json\n")
    assert main(["plan", "/nowhere"]) == 2
    assert "no such directory" in capsys.readouterr().err


@pytest.mark.parametrize(("text", "count"), [
    ("1024", 1024), ("13.61GiB", GPU), ("80GB", 80 * 10**9), ("2g", 2 << 30), ("1.5 MiB", 3 << 19),
    ("7b", 7)])
def test_sizes(text: str, count: int) -> None:
    assert size(text, "--memory") == count


def test_the_checkpoints_size_stands_beside_the_arithmetic(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert checkpoint_bytes(tmp_path) is None
    raw = json.loads((SHAPES / "TINY.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, "quantization_config": {"bits": 4}}))
    assert main(["plan", str(tmp_path)]) == 2
    assert "--weights: the checkpoint is quantized" in capsys.readouterr().err
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 1001}}))
    assert main(["plan", str(tmp_path), "--tp", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["outside"][0]["bytes"] == 501
    index.unlink()
    (tmp_path / "model.safetensors").write_bytes(b"x" * 77)
    assert checkpoint_bytes(tmp_path) == 77
