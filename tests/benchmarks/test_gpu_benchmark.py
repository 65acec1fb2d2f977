"""`make gpu-check` without a GPU: its calls at toy sizes, row for row; what happens when rows,
tests, time or memory fail; its files."""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from helpers_benchmarks import BENCHMARKS, benchmark

ROOT = BENCHMARKS.parent
plan, record, battery = (benchmark(f"gpucheck.{name}") for name in ("plan", "record", "battery"))
cache, suites, report, child, outcomes = (
    benchmark(f"gpucheck.{name}") for name in ("cache", "suites", "report", "child", "outcomes"))
profiled, machine, models, ring, shapes = (
    benchmark(f"gpucheck.{name}") for name in ("profiled", "machine", "models", "ring", "shapes"))


def walked(out: Path, part: str, *flags: str) -> dict[str, Any]:
    """What a toy run of a call writes, by the command that a real one is."""
    done = subprocess.run(
        ["bash", "tools/gpu_check.sh", part, "--toy", *flags], cwd=ROOT, capture_output=True,
        text=True, env=os.environ | {"OUT": str(out), "PYTHON": sys.executable, "LIMIT": "900"})
    assert done.stderr == ""
    found: dict[str, Any] = json.loads((out / f"gpu-{part}.json").read_text())
    return found | {"code": done.returncode, "said": done.stdout}


def rows_of(found: dict[str, Any]) -> dict[str, list[str]]:
    return {name: [row["name"] for row in own["rows"]] for name, own in found["groups"].items()}


def planned(part: str) -> dict[str, list[str]]:
    return {group.name: [row.name for row in group.rows] for group in plan.PARTS[part]()}


def skipped(found: dict[str, Any]) -> dict[str, str]:
    return {each["name"]: each["why"] for own in found["groups"].values()
            for each in own["skipped"]}


# --- whole calls ---------------------------------------------------------------------------------

MEASURED = [group.name for group in plan.contact() if not group.suites]
"""Groups that are no tests: those are collected by `test_gpu_suites`."""
BY_COMMAND = ("profile",)
"""What is written beside the rows; each is a process that imports all. The slow walk has all."""


def measure_in_process(group: Any, file: Path) -> None:
    """A group's rows, by the code of its process, in this one."""
    options = argparse.Namespace(memory=0.0, row_limit=0.0, fault=[])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(child, "faulthandler", Mock())  # pytest has its own
        assert child.run(record.Record(file, group.name), group, 900.0, True, options) == 0


@pytest.fixture(scope="module")
def contact(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    out = tmp_path_factory.mktemp("contact")
    found = walked(out, "contact", *(word for name in BY_COMMAND for word in ("--group", name)))
    file = out / "gpu-contact.json"
    for group in plan.contact():
        if group.name in MEASURED and group.name not in BY_COMMAND:
            measure_in_process(group, file)
    return found | json.loads(file.read_text()), out


@pytest.mark.timeout(900)
def test_a_first_contact_writes_every_row(contact: tuple[dict[str, Any], Path]) -> None:
    check_contact(contact[0], MEASURED)


def check_contact(found: dict[str, Any], groups: list[str]) -> None:
    """Of these groups every row is there, and right."""
    assert skipped(found) == {}
    assert found["code"] == 0, found["said"][-3000:]
    every = planned("contact")
    assert {name: sorted(rows) for name, rows in rows_of(found).items()} == {
        name: sorted(every[name]) for name in groups}
    for name, own in found["groups"].items():
        for row in own["rows"]:
            if name == "tests":
                assert row["selected"] == row["skipped"] + row["passed"] > 0, "a name that is gone"
            assert row["verdict"] in (("left out", "right") if name == "tests" else
                                      ("right", "slow")), row


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_first_contact_with_its_tests(tmp_path: Path) -> None:
    """A process of pytest for each suite."""
    found = walked(tmp_path, "contact")
    check_contact(found, [*planned("contact")])
    assert "test_worker_gpu.py" in (tmp_path / "gpu-contact.log").read_text()


def test_a_first_contact_asks_what_matters_most_first() -> None:
    assert [group.name for group in plan.contact()] == [
        "tests", "tokens", "decode", "ring", "ring without overlap", "decode, fp8 weights",
        "decode, fp8 pages", "profile", "ceilings"]
    tests, _, decode, ring, *_ = plan.contact()
    assert len(tests.suites) == tests.jobs == 8 and tests.most == 60
    assert [row.name for row in decode.rows][1:] == [
        "graphs beside eager, 1 x 1024", "graphs beside eager, 256 x 1024", "1 x 1024",
        "256 x 1024"]
    assert [row.name for row in ring.rows] == ["1 x 1024", "64 x 1024"]


@pytest.mark.timeout(900)
def test_figures_of_a_first_contact(contact: tuple[dict[str, Any], Path]) -> None:
    groups = contact[0]["groups"]
    for name in ("decode", "decode, fp8 weights", "decode, fp8 pages"):
        for row in groups[name]["rows"]:
            if row["name"].startswith("graphs beside eager"):
                assert row["compared"] == 3 * (4 if "256" in row["name"] else 1)
            elif row["name"] != "graph capture":
                assert row["tokens_a_step"] == 1 and row["floor_us"] > 0
                assert row["replays"] == 4, "every step but that of the prompts is replayed"
    assert groups["tokens"]["rows"][0]["distinct"] > 3
    for group in ("decode", "profile"):
        assert groups[group]["rows"][0]["name"] == "graph capture"
    for row in groups["profile"]["rows"]:
        if row["name"] == "capture of 58 sizes":
            assert row["seconds"] > 0 and (row["graphs"], row["largest"]) == (4, 16)
            assert row["planned_mib"] > 0
        elif row["name"] != "graph capture":
            assert 0 < row["covered_us"] <= row["wall_us"] and row["launches"] > 10
            assert 0 < len(row["top"]) <= 30 and row["top"][0]["share"] > 0
    for name, overlap in (("ring", True), ("ring without overlap", False)):
        one, many = groups[name]["rows"]
        assert all(row["overlap"] is overlap and 0 <= row["idle_ratio"] < 1
                   and row["share"] == pytest.approx(row["floor_us"] / row["step_us"])
                   for row in (one, many))
        assert len(one["answer"]) == one["compared"] == 10 and "answer" not in many
    one, other = (groups[name]["rows"][0] for name in ("ring", "ring without overlap"))
    assert one["answer"] == other["answer"]


@pytest.mark.timeout(900)
def test_what_comes_back_of_a_first_contact(contact: tuple[dict[str, Any], Path]) -> None:
    found, out = contact
    names = sorted(path.name for path in out.iterdir())
    assert names == ["gpu-contact.json", "gpu-contact.log", "gpu-contact.md",
                     "gpu-timeline.json"], "and a cache: eight are the most"
    page = (out / "gpu-contact.md").read_text()
    for text in ("toy sizes", "the whole engine", "| wanted | reached |", "under the profiler"):
        assert text in page
    for text in (page, json.dumps(found["groups"])):
        assert str(ROOT) not in text and sys.prefix not in text, "a folder of this machine"
    log = (out / "gpu-contact.log").read_text()
    assert log.endswith("exit code 0\n")
    assert json.loads((out / "gpu-timeline.json").read_text())["traceEvents"]
    assert found["facts"]["device"].startswith("none")
    assert {"date", "torch", "triton", "python", "cache"} <= set(found["facts"])


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", ["kernels", "tests"])
def test_the_other_calls_write_every_row(part: str, tmp_path: Path) -> None:
    found = walked(tmp_path, part)
    assert skipped(found) == {} and found["code"] == 0
    assert {name: sorted(rows) for name, rows in rows_of(found).items()} == {
        name: sorted(rows) for name, rows in planned(part).items()}
    if part == "kernels":
        groups = found["groups"]
        assert groups["paged decode"]["facts"]["kernels"] == "triton"
        for row in groups["products"]["rows"]:
            assert row["us"] > 0 and row["peer_us"] > 0
        tables = {group.name for group in plan.kernels() if group.runs == "ceilings.table"}
        assert all(row["verdict"] in ("right", "slow") and row["error"] <= row["tolerance"]
                   for name in tables for row in groups[name]["rows"])
        drafted = [row for row in groups["speculation"]["rows"] if row["drafts"]]
        assert len(drafted) == 3
        assert all(1 <= row["tokens_a_step"] <= 3 and row["ratio"] > 0 for row in drafted)


WALKED = {"speculation": "2 drafts, batch 1", "longer and mixed": "mixed 16, segments"}
"""Rows that show more than the first of their group."""


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton compiles for CUDA here")
def test_a_row_of_each_group_of_the_kernels_call(tmp_path: Path) -> None:
    for group in plan.kernels():
        own = record.Record(tmp_path / "gpu-kernels.json", group.name)
        wanted = WALKED.get(group.name, group.rows[0].name)
        for row in group.rows:
            if row.name != wanted:
                own.skip(row.name, "not walked here", "left out")
        measure_in_process(group, own.path)
        row, = own.group()["rows"]
        assert row["name"] == wanted and row["verdict"] in ("right", "slow"), row
        assert len(own.group()["skipped"]) == len(group.rows) - 1
        if group.runs == "ceilings.table":
            assert row["error"] <= row["tolerance"] and row["us"] > 0
        if group.name == "products":
            assert row["peer_us"] > 0
        if group.name == "speculation":
            assert 1 <= row["tokens_a_step"] <= 3 and row["drafts"] == 2


# --- what fails ----------------------------------------------------------------------------------

def ran(tmp_path: Path, *flags: str) -> tuple[int, dict[str, Any], str]:
    """benchmarks/gpu.py contact --toy, of its ceilings alone."""
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "gpu.py"), "contact", "--toy", "--group", "ceilings",
         "--out", str(tmp_path), *flags], capture_output=True, text=True)
    found = json.loads((tmp_path / "gpu-contact.json").read_text())
    return done.returncode, found, done.stdout + done.stderr


@pytest.mark.slow
def test_rows_that_fail_cost_only_themselves(tmp_path: Path) -> None:
    """One raises, one hangs, one ends its process: the last one is measured behind them."""
    code, found, said = ran(tmp_path, "--row-limit", "4", *(
        word for row, fault in (("copy", "raise"), ("bf16 products", "hang"),
                                ("fp8 products", "exit"))
        for word in ("--fault", f"ceilings/{row}={fault}")))
    assert code == 1
    assert rows_of(found)["ceilings"] == ["small launches"]
    assert skipped(found) == {
        "copy": "RuntimeError: a fault, as was asked for",
        "bf16 products": "took more than 4 s: its stacks are in the log",
        "fp8 products": "its process ended: see the log"}
    assert said.count("in _inject") == 2, "the stacks of what was raised and of what hung"
    assert "- ceilings: fp8 products: its process ended: see the log" in said


@pytest.mark.slow
def test_behind_a_capture_that_failed_another_process_goes_on(tmp_path: Path) -> None:
    """Since after that torch's allocator is in no state to go on."""
    code, found, _ = ran(tmp_path, "--fault", "ceilings/fp8 products=capture")
    assert code == 1 and rows_of(found)["ceilings"] == ["copy", "bf16 products", "small launches"]
    assert skipped(found) == {"fp8 products": "CaptureFailed: as was asked for"}


def test_what_a_row_needs_may_be_held_by_its_own_process(tmp_path: Path) -> None:
    """Whose model is opened once for all rows: what counts is what was free when it began."""
    double = machine.Double(80.0)
    group = plan.Group("decode", (plan.Row("fits", gib=79.0), plan.Row("does not", gib=81.0)),
                       1, 9)
    own = record.Record(tmp_path / "gpu-contact.json", "decode")
    bench = child.Bench(own, group, double, 60.0)
    faulthandler.cancel_dump_traceback_later()
    double.free_gib = lambda: 5.0
    for name, fits in (("fits", True), ("does not", False)):
        assert bench.wants(name) is fits
        with bench.row(name) as go:
            assert go is fits
    faulthandler.cancel_dump_traceback_later()
    assert [each["why"] for each in own.group()["skipped"]] == ["it needs 81 GiB, 80 are free"]


def test_rows_that_do_not_fit_are_named(tmp_path: Path) -> None:
    """On a card of 24 GiB the shape opens, and takes no 64 sequences."""
    groups = {group.name: group for group in plan.contact()}
    fits = [row.name for row in groups["decode"].rows if row.gib <= 23]
    assert fits == ["graph capture", "graphs beside eager, 1 x 1024", "1 x 1024"]
    assert all(row.gib <= 78 for part in plan.PARTS.values() for group in part()
               for row in group.rows), "an H100 takes all"
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "gpu.py"), "kernels", "--toy", "--memory", "5",
         "--group", "mamba-2 step", "--out", str(tmp_path)], capture_output=True, text=True)
    found = json.loads((tmp_path / "gpu-kernels.json").read_text())
    assert done.returncode == 0, "what does not fit is no failure"
    assert set(skipped(found).values()) == {"it needs 12 GiB, 5 are free"}
    assert len(skipped(found)) == 3 and "## Left out" in done.stdout


def test_a_missing_time_is_reported(tmp_path: Path) -> None:
    options = argparse.Namespace(
        part="contact", group=None, toy=False, seconds=5.0, out=tmp_path, carried=False,
        scratch=tmp_path, memory=0.0, row_limit=0.0, fault=[])
    assert battery.run(options) == 0
    found = json.loads((tmp_path / "gpu-contact.json").read_text())
    assert all(own["skipped"] and not own["rows"] for own in found["groups"].values())
    assert len(skipped(found)) == len({name for rows in planned("contact").values()
                                       for name in rows})
    assert "0 s are left" in (tmp_path / "gpu-contact.md").read_text()


def test_the_calls_fit_into_nine_minutes() -> None:
    """Groups share the time in the order of what they tell: those that answer the aims fit even if
    each takes all that it may."""
    for part, least in (("contact", 5), ("kernels", 6), ("tests", 1)):
        groups = plan.PARTS[part]()
        assert sum(group.most for group in groups[:least]) <= 500
        assert all(0 < group.least < group.most for group in groups)
    script = (ROOT / "tools" / "gpu_check.sh").read_text()
    assert "limit=${LIMIT:-520}" in script and "ending=15 " in script


FAULTY = """
import os, time
import pytest
pytestmark = pytest.mark.gpu

def test_a_first(): pass
def test_b_exits(): os._exit(3)
def test_c_fails(): raise RuntimeError("CUDA error: an illegal memory access was encountered")
def test_d_hangs(): time.sleep(600)
def test_e_is_wrong(): assert 1 == 2
def test_f_last(): pass
"""


@pytest.mark.slow
def test_tests_that_end_their_process_cost_only_themselves(tmp_path: Path, capfd: Any,
                                                           monkeypatch: Any) -> None:
    file = tmp_path / "test_faulty.py"
    file.write_text(FAULTY)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n")
    monkeypatch.setattr(suites, "ROOT", tmp_path)
    suite = plan.Suite("faulty", "test_faulty.py", limit=1.5)
    group = plan.Group("tests", (plan.Row("faulty"),), 1, 60, suites=(suite,))
    own = record.Record(tmp_path / "gpu-tests.json", "tests")
    suites.run_suites(own, group, 60.0, True, tmp_path)
    row, = own.group()["rows"]
    assert (row["selected"], row["passed"], row["failed"]) == (6, 2, 4)
    assert row["verdict"] == "wrong"
    reasons = {each["name"].rpartition("::")[2]: (each["kind"], each["why"])
               for each in own.group()["skipped"]}
    assert reasons == {
        "test_b_exits": ("failed", "exit code 3"),
        "test_c_fails": ("failed", "RuntimeError: CUDA error: an illegal memory access was "
                         "encountered"),
        "test_d_hangs": ("failed", "took more than 2 s: its stacks are in the log"),
        "test_e_is_wrong": ("wrong", "assert 1 == 2")}
    assert 'in test_d_hangs' in capfd.readouterr().out, "the stack of the one that hung"


def test_tests_that_no_time_is_left_for_are_left_out(tmp_path: Path, monkeypatch: Any) -> None:
    """Those of a suite that was under way as well, whose process is ended."""
    (tmp_path / "test_slow.py").write_text("import pytest, time\npytestmark = pytest.mark.gpu\n"
                                           "def test_a(): pass\ndef test_b(): time.sleep(600)\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n")
    monkeypatch.setattr(suites, "ROOT", tmp_path)
    both = tuple(plan.Suite(name, "test_slow.py", limit=600) for name in ("first", "second"))
    own = record.Record(tmp_path / "gpu-tests.json", "tests")
    group = plan.Group("tests", (plan.Row("first"), plan.Row("second")), 1, 60, suites=both)
    real, begun = suites.monotonic, suites.monotonic()

    def clock() -> float:
        """The time is over as soon as the second test is under way."""
        there = outcomes.read(tmp_path / "first.outcomes")["now"]
        return real() + (1e6 if there and "test_b" in there[0] or real() > begun + 300 else 0)

    monkeypatch.setattr(suites, "monotonic", clock)
    suites.run_suites(own, group, 1e5, True, tmp_path)
    row = own.row("first")
    assert (row["verdict"], row["passed"], row["failed"]) == ("left out", 1, 0)
    said = {each["name"]: (each["kind"], each["why"]) for each in own.group()["skipped"]}
    assert said["first"] == ("left out", "1 tests: the time was over in test_slow.py::test_b")
    assert said["second"][0] == "left out"


@pytest.mark.slow
def test_a_missing_device_is_reported(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    done = subprocess.run([sys.executable, str(BENCHMARKS / "gpu.py"), "tests", "--out",
                           str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 2 and "no CUDA device; --toy" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_options_are_checked() -> None:
    for flags in (["nonsense"], ["contact", "--fault", "ceilings/copy=raise"]):
        done = subprocess.run([sys.executable, str(BENCHMARKS / "gpu.py"), *flags],
                              capture_output=True, text=True)
        assert done.returncode == 2 and "gpu.py: error" in done.stderr
    done = subprocess.run(["bash", "tools/gpu_check.sh", "nonsense"], cwd=ROOT,
                          capture_output=True, text=True)
    assert done.returncode == 2 and "contact, kernels or tests, not nonsense" in done.stderr


# --- figures -------------------------------------------------------------------------------------

def test_a_profile_is_counted() -> None:
    """By hand: two steps of 100 us, in each a kernel of 60 and one of 30 that overlap by 10."""
    kernels = [("big", 0.0, 60.0), ("small", 50.0, 80.0), ("big", 100.0, 160.0),
               ("small", 150.0, 180.0)]
    found = profiled.digest(machine.Profile(kernels, {"cudaGraphLaunch": 4}), 2)
    assert found["wall_us"] == 90 and found["kernels_us"] == 90 and found["covered_us"] == 80
    assert found["idle_share"] == pytest.approx(1 - 160 / 180)
    assert found["launches"] == 2 and found["calls"] == {"cudaGraphLaunch": 2}
    assert found["top"][0] == {"kernel": "big", "launches": 1, "us": 60,
                               "share": pytest.approx(2 / 3)}
    with pytest.raises(ValueError, match="saw nothing run"):
        profiled.digest(machine.Profile([], {}), 1)


def test_aims_are_held_against_the_worst_row() -> None:
    rows = [{"name": own.name, "idle_ratio": 0.01 * (i + 1)} for i, own in enumerate(shapes.RING)]
    lines = "\n".join(report.aim_table({"ring": {"rows": rows}}))
    assert "| 2.0% | <= 1.5% | no |" in lines
    lines = "\n".join(report.aim_table({"ring": {"rows": rows[:1]}}))
    assert "| 1.0% (1 of 2 rows) | <= 1.5% | yes |" in lines
    lines = "\n".join(report.aim_table({"ring": {"rows": []}}))
    assert "| never measured | <= 1.5% | |" in lines
    every = {group.name: {row.name for row in group.rows} for part in ("contact", "kernels")
             for group in plan.PARTS[part]()}
    for aim in report.AIMS:
        assert set(aim.rows) <= every[aim.group] and aim.rows, aim.what


def test_the_floor_counts_weights_pages_and_states() -> None:
    """By hand, for a Llama of two layers in bf16."""
    layer = SimpleNamespace(layers=[None] * 2, dtype=torch.bfloat16)
    shape = SimpleNamespace(tied=False, vocab_size=100, hidden=8, itemsize=2, kv_row=(4, 16),
                            layers=2)
    runner = SimpleNamespace(model=SimpleNamespace(shape=shape), pools=[layer], states=None)
    opened = SimpleNamespace(runner=runner, footprint=SimpleNamespace(planned={"weights": 10_000}))
    want = 10_000 - 100 * 8 * 2 + 3 * 50 * (4 * 16 * 2 * 2)
    assert models.floor(opened).us(3, 50, 2.0) == pytest.approx(want / 2.0 / 1e3)


def test_prompts_depend_on_the_seed_only() -> None:
    few, more = ring.prompts(2, 30, 100), ring.prompts(4, 30, 100)
    assert more[:2] == few and len({tuple(p) for p in more}) == 4
    assert np.array(more).max() < 99


# --- files ---------------------------------------------------------------------------------------

def test_no_local_path_is_reported() -> None:
    said = "FileNotFoundError: '/home/some-one/deep/er/file.so': see /opt/x/y.log, 3/4 of a/b"
    assert record.without_paths(said) == "FileNotFoundError: 'file.so': see y.log, 3/4 of a/b"


COMPILED = """
import sys
import triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

@triton.jit
def add(x, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + i, tl.load(x + i, mask=i < n) + 1, mask=i < n)

source = ASTSource(add, {"x": "*fp32", "n": "i32", "BLOCK": "constexpr"}, {"BLOCK": 128})
print(*sorted(triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm))
"""


def test_a_cache_that_was_carried_is_found(tmp_path: Path) -> None:
    """By triton itself, in another folder: nothing but the binary is there, so nothing was compiled
    again."""
    (tmp_path / "compiled.py").write_text(COMPILED)

    def compiled(folder: str) -> list[str]:
        environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        return subprocess.run(
            [sys.executable, str(tmp_path / "compiled.py")], capture_output=True, text=True,
            check=True, env=environment | {"TRITON_CACHE_DIR": str(tmp_path / folder)}
        ).stdout.split()

    assert "ttir" in compiled("first")
    archive = tmp_path / "triton-cache.tar.gz"
    assert cache.pack(tmp_path / "first", archive).startswith("1 kernels packed")
    (tmp_path / "first").rename(tmp_path / "gone")
    assert cache.unpack(archive, tmp_path / "second") == 1
    assert compiled("second") == ["cubin"]


def test_a_cache_that_is_too_large_is_left_out(tmp_path: Path) -> None:
    folder, archive = tmp_path / "cache", tmp_path / "c.tar.gz"
    assert "nothing to pack" in cache.pack(tmp_path / "none", archive)
    folder.mkdir()
    (folder / "k.cubin").write_bytes(os.urandom(200_000))
    assert "0.2 MiB packed, 0.1 are the most" in cache.pack(folder, archive, 0.1)
    assert not archive.exists()


def test_the_script_of_wheels_parses() -> None:
    assert subprocess.run(["bash", "-n", str(ROOT / "tools" / "gpu_wheels.sh")]).returncode == 0


def test_make_passes_its_arguments_on() -> None:
    done = subprocess.run(["make", "-n", "gpu-check", "PART=kernels", "TOY=1", "CACHE=a.tar.gz"],
                          cwd=ROOT, capture_output=True, text=True)
    assert all(own in done.stdout for own in ("CACHE=a.tar.gz", "gpu_check.sh kernels", "--toy"))
