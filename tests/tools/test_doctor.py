"""`actorium doctor`: each thing that a machine can lack has its line, its state and what to do."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

import msgspec
import pytest

from actorium.tools.cli import doctor_command, main
from actorium.tools.cli.doctor_checks import (
    BAD,
    EXTRAS,
    OFF,
    OK,
    Check,
    Gpu,
    Machine,
    Package,
    check_all,
    serves,
)

ENGINE = [Package("torch", ">=2.11,<2.14", "2.13.0"), Package("numpy", ">=1.26", "2.3")]
GOOD = Machine(
    system="Linux x86_64", python=(3, 12, 3), torch="2.13.0+cpu", torch_fault="", torch_cuda=None,
    extras={"engine": ENGINE, "video": [Package("av", ">=14,<19", "18.0")]},
    gpus=[], driver=False, triton_fault="", processor="A processor",
    instructions=frozenset({"avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512dq",
                            "avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16"}),
    compiler="/usr/bin/cc", built=True, cpus=8, cpu_quota=None, threads=0,
    free_memory=12 << 30, memory=16 << 30, memory_limit="", shared_memory=1 << 30,
    open_files=1 << 20, run_dir="/run/user/1000/actorium/default", run_dir_fault="",
    host="127.0.0.1", port=8000, port_fault="", cache="/home/me/hub", cache_free=90 << 30,
    cached=3, token=True, offline=False, model="", model_fault="", model_missing=False,
    model_text="the demo model fits", engines={})
RUN_DIR = f"/tmp/doctor-{os.getpid()}"
"""Of no engine, and short enough for sockets."""
H100 = Gpu("NVIDIA H100", 80 << 30, (9, 0))
T4 = Gpu("Tesla T4", 16 << 30, (7, 5))
CUDA: dict[str, Any] = {"torch": "2.13.0+cu130", "torch_cuda": "13.0", "driver": True}

FAULTS: list[tuple[dict[str, Any], str, str, str, str]] = [
    ({"system": "Darwin arm64"}, "python", BAD, "needs Linux", "container"),
    ({"python": (3, 10, 1)}, "python", BAD, "3.11 or newer", "PYTHON=python3.11"),
    ({"python": (3, 15, 0)}, "python", OFF, "newest that is tested", ""),
    ({"extras": {}}, "packages", BAD, "not installed", "pip install -e '.[engine]'"),
    ({"extras": {"engine": [*ENGINE, Package("uvloop", ">=0.20", None)]}}, "packages", BAD,
     "uvloop missing (serving)", "pip install -e '.[engine]'"),
    ({"extras": {"engine": [Package("torch", ">=2.11,<2.14", "2.9", False)]}}, "packages", BAD,
     "torch 2.9 is not >=2.11,<2.14", "pip install -e '.[engine]'"),
    ({"extras": {"video": [Package("av", ">=14", None)]}}, "extra video", OFF,
     "av missing (videos in requests)", "pip install -e '.[video]'"),
    ({"torch": "", "torch_fault": "libcudart.so.13: cannot open"}, "torch", BAD, "libcudart",
     "--force-reinstall torch"),
    ({"driver": True}, "gpu", OFF, "torch is built without CUDA", "torch==2.13.0"),
    ({**CUDA}, "gpu", OFF, "torch finds no device", "nvidia-smi"),
    ({}, "gpu", OFF, "no CUDA device", ""),
    ({**CUDA, "gpus": [T4]}, "gpu 0", OFF, "from sm_80 on; off: products in FP8", ""),
    ({**CUDA, "gpus": [H100], "triton_fault": "triton is not installed"}, "gpu 0", OFF,
     "triton is not installed", "pip install -e '.[engine]'"),
    ({"instructions": GOOD.instructions - {"amx_tile"}}, "processor", OFF, "off: amx (", ""),
    ({"instructions": frozenset()}, "processor", OFF, "plain x86-64; off: avx2 (", ""),
    ({"system": "Linux aarch64"}, "processor", OFF, "run as plain C", ""),
    ({"compiler": None, "built": False}, "kernels", OFF, "several times as slow",
     "apt install gcc"),
    ({"cpu_quota": 1.5}, "threads", OFF, "the time of 1.5", "--threads 2"),
    ({"threads": 64}, "threads", OFF, "64 on 8 CPUs", "--threads 8"),
    ({"free_memory": 300 << 20, "memory_limit": "/sys/fs/cgroup/memory.max"}, "memory", BAD,
     "(limit: /sys/fs/cgroup/memory.max)", "a larger limit"),
    ({"shared_memory": 0}, "/dev/shm", OFF, "cannot be written", "--shm-size"),
    ({"open_files": 1024}, "files", OFF, "1,024 may be open", "ulimit -Hn"),
    ({"open_files": 64}, "files", BAD, "64 may be open", "ulimit -Hn"),
    ({"run_dir_fault": "/x: cannot be written"}, "run dir", BAD, "/x", "ACTORIUM_RUN_DIR"),
    ({"port_fault": "Address already in use"}, "port", OFF, "127.0.0.1:8000: Address already",
     "actorium serve --port 8001"),
    ({"cache_free": 0}, "hub cache", OFF, "cannot be written", "HF_HOME"),
    ({"token": False, "cached": 0}, "hub cache", OK, "no token (`hf auth login`", ""),
    ({"offline": True}, "hub cache", OFF, "forbids downloads", "unset HF_HUB_OFFLINE"),
    ({"model": "a/b", "model_missing": True}, "model", OFF, "a/b is not on this machine",
     "actorium pull a/b"),
    ({"model": "a/b", "model_missing": True, "offline": True}, "model", BAD, "a/b is not",
     "actorium models"),
    ({"model": "big", "model_fault": "needs 90 GB, 12 GB are free"}, "model", BAD, "needs 90 GB",
     "actorium plan big"),
    ({"engines": {"one": "worker-0 is loading"}}, "engine", OFF, "one: worker-0 is loading",
     "actorium ps"),
    ({"engines": {"one": "no answer"}}, "engine", OFF, "one: no answer", "actorium ps"),
]


def changed(**fields: Any) -> Machine:
    return msgspec.structs.replace(GOOD, **fields)


def line(checks: list[Check], name: str) -> Check:
    return next(check for check in checks if check.name == name)


@pytest.mark.parametrize(("fields", "name", "state", "text", "do"), FAULTS)
def test_what_a_machine_lacks_has_its_line(fields: dict[str, Any], name: str, state: str,
                                           text: str, do: str) -> None:
    checks = check_all(changed(**fields))
    check = line(checks, name)
    assert check.state == state and text in check.text
    assert do in check.next if do else not check.next
    assert serves(checks) == (state != BAD)


def test_a_machine_that_lacks_nothing_has_nothing_to_do() -> None:
    checks = check_all(changed(**CUDA, gpus=[H100], engines={"one": "ready, HTTP at http://x"}))
    assert {check.state for check in checks} == {OK}
    assert [check for check in checks if check.next] == []
    assert "avx_vnni" not in GOOD.instructions  # either name of VNNI will do
    other = (GOOD.instructions - {"avx512_vnni"}) | {"avx_vnni"}
    assert line(check_all(changed(instructions=other)), "processor").state == OK


def test_a_base_install_lacks_packages_alone() -> None:
    """The client's, without torch."""
    lacking = {"engine": [Package("pyzmq", ">=26.2", "27.3"), Package("torch", ">=2.11", None)]}
    checks = check_all(changed(torch="", extras=lacking))
    assert [check.name for check in checks if check.state == BAD] == ["packages"]


def test_every_bad_line_says_what_to_do() -> None:
    for fields, name, state, *_ in FAULTS:
        if state == BAD:
            assert line(check_all(changed(**fields)), name).next, fields


@pytest.mark.parametrize(("machine", "code", "last"), [
    (GOOD, 0, "next: actorium serve"),
    (changed(port_fault="Address already in use"), 0, "next: actorium serve"),
    (changed(torch="", torch_fault="libc10.so is missing", open_files=9), 1,
     "no engine can serve here: torch, files"),
])
def test_the_exit_code_is_1_where_no_engine_can_serve(
        machine: Machine, code: int, last: str, monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(doctor_command, "read_machine", lambda config: machine)
    assert main(["doctor"]) == code
    shown = capsys.readouterr().out.splitlines()
    assert shown[-1] == last and len(shown) < 40
    follow = [number for number, text in enumerate(shown) if text.startswith("  -> ")]
    assert all(f" {OK} " not in shown[number - 1] for number in follow)
    assert main(["doctor", "--json"]) == code
    told = json.loads(capsys.readouterr().out)
    assert told["serves"] == (code == 0)
    assert {check["name"] for check in told["checks"]} >= {"python", "memory", "port"}


def test_this_machine_serves_the_demo_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
                                            capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("ACTORIUM_RUN_DIR", RUN_DIR)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        port = taken.getsockname()[1]
        assert main(["doctor", "--json", "--port", str(port)]) == 0
    checks = {check["name"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
    assert checks["port"]["state"] == OFF and f"--port {port + 1}" in checks["port"]["next"]
    assert checks["packages"]["state"] == checks["torch"]["state"] == OK
    assert "the demo model fits" in checks["model"]["text"]
    assert checks["engine"]["text"] == "none runs" and "0 repositories" in \
        checks["hub cache"]["text"]
    assert list(tmp_path.iterdir()) == [] and not Path(RUN_DIR).exists()  # nothing is made


@pytest.mark.parametrize(("model", "text", "do"), [
    ("org/not-here", "org/not-here is not on this machine", "actorium pull org/not-here"),
    ("./not/here", "no such directory", "actorium models"),
    ("{empty}", "has no config.json", "actorium models"),
])
def test_a_model_that_cannot_be_served(model: str, text: str, do: str, tmp_path: Path,
                                       monkeypatch: pytest.MonkeyPatch,
                                       capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("ACTORIUM_RUN_DIR", RUN_DIR)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    (tmp_path / "empty").mkdir()
    code = main(["doctor", model.format(empty=tmp_path / "empty"), "--json"])
    checks = {check["name"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
    assert text in checks["model"]["text"] and do in checks["model"]["next"]
    assert code == (checks["model"]["state"] == BAD)


def test_a_run_directory_without_room_for_sockets(tmp_path: Path) -> None:
    assert doctor_command.run_dir_fault(Path(RUN_DIR, "one")) == ""
    assert "exceed 107 bytes" in doctor_command.run_dir_fault(tmp_path / ("long" * 30))
    assert "cannot be written" in doctor_command.run_dir_fault(Path("/proc/cpuinfo/one"))


def test_a_port_of_another_machine_is_a_fault() -> None:
    assert doctor_command.port_fault("127.0.0.1", 0) == ""
    assert "assign" in doctor_command.port_fault("192.0.2.1", 8000)


def test_the_quota_is_that_of_the_tightest_group(tmp_path: Path) -> None:
    inner = tmp_path / "cgroup" / "a" / "b"
    inner.mkdir(parents=True)
    proc = tmp_path / "proc"
    proc.mkdir()
    (proc / "cgroup").write_text("0::/a/b\n")
    (proc / "mountinfo").write_text(
        f"30 23 0:26 / {tmp_path}/cgroup rw - cgroup2 cgroup2 rw\n")
    assert doctor_command.cpu_quota(proc) is None
    (inner / "cpu.max").write_text("max 100000\n")
    (inner.parent / "cpu.max").write_text("150000 100000\n")
    assert doctor_command.cpu_quota(proc) == 1.5


def test_every_extra_for_users_is_explained() -> None:
    """Those of developers are not."""
    assert doctor_command.extras().keys() - {"test", "bench", "docs"} <= EXTRAS.keys()
