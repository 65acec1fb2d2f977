"""The battery of `benchmarks/gpu.py`: whole, at toy sizes; what it does when time or parts fail."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from helpers_benchmarks import BENCHMARKS, benchmark

gpu, bench, report = benchmark("gpu"), benchmark("gpu_bench"), benchmark("gpu_report")
model, ring, _ = benchmark("gpu_model"), benchmark("gpu_ring"), benchmark("gpu_kernels")
ROOT = BENCHMARKS.parent


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a toy run leaves. Without transformers, whose import takes longest."""
    out = tmp_path_factory.mktemp("gpu")
    names = [name for name in gpu.PARTS if name != "transformers"]
    gpu.write(gpu.battery(names, 600.0, True, out), True, out)
    return out


@pytest.mark.slow
def test_the_toy_battery_fails_nowhere(toy: Path) -> None:
    found = json.loads((toy / "gpu.json").read_text())
    assert found.pop("toy") is True
    assert set(found) == set(gpu.PARTS) - {"transformers"}
    assert {name: part["skipped"] for name, part in found.items() if part["skipped"]} == {}
    assert found["ceilings"]["facts"]["copy_gbs"] > 0
    assert found["kernels"]["facts"]["kernels"] == "triton"
    kernels = {row["kernel"] for row in found["kernels"]["rows"]}
    assert {"paged decode", "paged extend", "delta step", "delta window", "delta extend",
            "conv extend", "experts", "latent decode", "mamba-2 step", "sampling", "rotate_write",
            "linear"} <= kernels
    assert all(row["us"] > 0 and row["share"] > 0 for row in found["kernels"]["rows"])


@pytest.mark.slow
def test_models_decode_what_they_should(toy: Path) -> None:
    found = json.loads((toy / "gpu.json").read_text())
    mixed = [row for row in found["decode"]["rows"] if "tokens" in row]
    assert [row["tokens"] for row in mixed] == [10, 40] and all(r["step_us"] > 0 for r in mixed)
    for row in (row for row in found["decode"]["rows"] if "tokens" not in row):
        assert row["tokens_a_step"] == 1 and row["floor_us"] > 0
    drafted = [row for row in found["speculation"]["rows"] if row["drafts"]]
    assert drafted and all(1 <= row["tokens_a_step"] <= 3 for row in drafted)
    rings = {(row["batch"], row["overlap"]) for name in ("ring", "ring-no-overlap")
             for row in found[name]["rows"]}
    assert rings == {(1, True), (2, True), (1, False), (2, False)}
    assert all(0 <= row["idle_ratio"] < 1 for row in found["ring"]["rows"])


@pytest.mark.slow
def test_what_comes_back_is_few_files(toy: Path) -> None:
    names = sorted(path.name for path in toy.iterdir())
    assert names == ["gpu-decode.png", "gpu-kernels.png", "gpu-timeline.json", "gpu-timeline.png",
                     "gpu.json", "gpu.md"], "and two gpu-tests.xml: eight are the most"
    page = (toy / "gpu.md").read_text()
    for title in ("## Kernels", "whole engine", "piece of a prompt", "forced acceptance",
                  "toy sizes"):
        assert title in page
    assert json.loads((toy / "gpu-timeline.json").read_text())["traceEvents"]


def test_what_fails_or_has_no_time_is_told(tmp_path: Path, capsys: Any) -> None:
    part = bench.Part(tmp_path / "p.json", 5.0, True)
    with part.trying("first", 60.0) as go:
        assert not go
    with part.trying("second") as go:
        assert go
        raise RuntimeError("broken\nin two lines")
    part.add(kernel="third", us=1.0)
    found = json.loads((tmp_path / "p.json").read_text())
    assert found["rows"] == [{"kernel": "third", "us": 1.0}]
    assert found["skipped"] == ["first: 5 s are left, it takes 60", "second: RuntimeError: broken"]
    page = report.page({"kernels": found}, False)
    assert "- kernels: second: RuntimeError: broken" in page and "| third |" in page


def test_a_part_that_dies_leaves_its_rows(tmp_path: Path, monkeypatch: Any) -> None:
    script = tmp_path / "dies.py"
    script.write_text("import sys, json, pathlib\n"
                      "at = pathlib.Path(sys.argv[sys.argv.index('--into') + 1])\n"
                      "at.write_text(json.dumps({'facts': {}, 'rows': [{'us': 2}],"
                      " 'skipped': []}))\nraise SystemExit('out of luck')\n")
    monkeypatch.setattr(gpu, "__file__", str(script))
    found = gpu.battery(["kernels", "decode"], 200.0, False, tmp_path)
    assert found["kernels"]["rows"] == [{"us": 2}]
    assert found["kernels"]["skipped"] == ["the rest: exit code 1: out of luck"]
    assert found["decode"]["rows"], "the next one is begun all the same"


def test_a_part_that_hangs_is_killed(tmp_path: Path, monkeypatch: Any) -> None:
    script = tmp_path / "hangs.py"
    script.write_text("import threading\nthreading.Event().wait()\n")
    monkeypatch.setattr(gpu, "__file__", str(script))
    monkeypatch.setattr(gpu, "GRACE", 0.2)
    assert gpu.in_a_process("kernels", tmp_path / "p.json", 0.3, {}, tmp_path) == (
        "took more than 0 s")


def test_no_time_at_all_is_said(tmp_path: Path) -> None:
    found = gpu.battery(list(gpu.PARTS), 5.0, False, tmp_path)
    assert all(part["skipped"] and not part["rows"] for part in found.values())
    assert "all of it: 0 s are left" in report.page(found, False)


def test_the_shares_fit_in_order() -> None:
    """Nine minutes hold the parts that matter most, even if each takes all it may."""
    assert sum(gpu.PARTS[name].most for name in ("ceilings", "kernels", "decode")) < 420 - 60
    assert all(0 < share.least < share.most for share in gpu.PARTS.values())
    assert list(gpu.PARTS)[0] == "ceilings", "the others are measured by it"


def test_the_floor_counts_weights_pages_and_states() -> None:
    """By hand, for a Llama of two layers in bf16."""
    layer = SimpleNamespace(layers=[None] * 2, dtype=model.torch.bfloat16)
    shape = SimpleNamespace(tied=False, vocab_size=100, hidden=8, dtype=model.torch.bfloat16,
                            kv_row=(4, 16), layers=2)
    runner = SimpleNamespace(model=SimpleNamespace(shape=shape), pools=[layer], states=None)
    opened = SimpleNamespace(runner=runner, footprint=SimpleNamespace(measured={"weights": 10_000}))
    want = 10_000 - 100 * 8 * 2 + 3 * 50 * (4 * 16 * 2 * 2)
    assert model.floor_us(opened, 3, 50, 2.0) == pytest.approx(want / 2.0 / 1e3)


def test_prompts_are_the_same_whoever_asks() -> None:
    few, more = ring.prompts(2, 30, 100), ring.prompts(4, 30, 100)
    assert more[:2] == few and len({tuple(p) for p in more}) == 4
    assert np.array(more).max() < 99


def test_without_a_device_it_says_so(tmp_path: Path) -> None:
    if model.torch.cuda.is_available():
        pytest.skip("there is one")
    done = subprocess.run([sys.executable, str(BENCHMARKS / "gpu.py"), "--out", str(tmp_path)],
                          capture_output=True, text=True)
    assert done.returncode == 2 and "no CUDA device; --toy" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("script", ["gpu_check.sh", "gpu_wheels.sh"])
def test_the_scripts_parse(script: str) -> None:
    assert subprocess.run(["bash", "-n", str(ROOT / "tools" / script)]).returncode == 0
