"""Limits of control groups, over trees of files as both versions of the kernel's interface show
them."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from actorium.actors.runtime.memory_limits import (
    OOM_KILLED,
    OomKills,
    available_memory,
    groups,
    memory_limit,
)
from actorium.actors.runtime.process import describe_exit

MIB = 1 << 20
V1, V2 = "/sys/fs/cgroup/memory", "/sys/fs/cgroup"


class Machine:
    """A process of another machine, whose files lie in a directory."""

    def __init__(self, base: Path, cgroup: str, *mounts: tuple[str, str, str]) -> None:
        """mounts: (type, root, where) of hierarchies."""
        self.base, self.proc = base, base / "proc"
        self.proc.mkdir()
        (self.proc / "cgroup").write_text(cgroup)
        (self.proc / "mountinfo").write_text("22 1 0:21 / /proc rw - proc proc rw\n" + "".join(
            f"30 23 0:27 {root} {base}{where} rw,relatime shared:9 - {kind} cgroup rw"
            f"{',memory' if kind == 'cgroup' else ''}\n" for kind, root, where in mounts))

    def write(self, file: str, text: str) -> Path:
        path = self.base / file.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path


@pytest.fixture
def nested(tmp_path: Path) -> Machine:
    """Version 2: a unit in a slice."""
    made = Machine(tmp_path, "0::/a.slice/b.service\n", ("cgroup2", "/", V2))
    made.write(f"{V2}/a.slice/b.service/memory.max", "max\n")
    made.write(f"{V2}/a.slice/memory.max", f"{900 * MIB}\n")
    return made


def test_the_smallest_limit_of_all_groups_around_counts(nested: Machine) -> None:
    found = memory_limit(nested.proc)
    assert found is not None and found.bytes == 900 * MIB
    assert found.text == f"943,718,400 bytes, {nested.base}{V2}/a.slice/memory.max"
    assert available_memory(nested.proc) == 900 * MIB
    nested.write(f"{V2}/a.slice/b.service/memory.high", f"{700 * MIB}\n")
    nested.write(f"{V2}/a.slice/b.service/memory.max", f"{800 * MIB}\n")
    found = memory_limit(nested.proc)
    assert found is not None and (found.bytes, found.file.name) == (700 * MIB, "memory.high")


def test_the_same_in_version_1_beside_an_empty_version_2(tmp_path: Path) -> None:
    made = Machine(tmp_path, "4:memory:/outer/inner\n2:cpu,cpuacct:/x\n0::/\n",
                   ("cgroup2", "/", f"{V2}/unified"), ("cgroup", "/", V1))
    made.write(f"{V1}/outer/inner/memory.limit_in_bytes", "9223372036854771712\n")
    made.write(f"{V1}/outer/memory.limit_in_bytes", f"{512 * MIB}\n")
    made.write(f"{V1}/memory.limit_in_bytes", "9223372036854771712\n")
    found = memory_limit(made.proc)
    assert found is not None and found.bytes == 512 * MIB and found.file.parent.name == "outer"


@pytest.mark.parametrize(("kind", "own", "root", "name"), [
    ("cgroup2", "0::/", "/", "memory.max"),
    ("cgroup2", "0::/../../x", "/", "memory.max"),
    ("cgroup", "3:memory:/docker/f00", "/docker/f00", "memory.limit_in_bytes")])
def test_a_container_sees_its_own_group_as_the_outermost(tmp_path: Path, kind: str, own: str,
                                                         root: str, name: str) -> None:
    made = Machine(tmp_path, f"{own}\n", (kind, root, "/cg"))
    file = made.write(f"/cg/{name}", f"{300 * MIB}\n")
    assert memory_limit(made.proc) == (300 * MIB, file)


@pytest.mark.parametrize("cgroup", ["", "0::/gone\n", "nonsense\n", "4:memory:/x\n"])
def test_where_there_is_no_limit(tmp_path: Path, cgroup: str) -> None:
    made = Machine(tmp_path, cgroup, ("cgroup2", "/", V2))
    assert memory_limit(made.proc) is None and memory_limit(tmp_path / "none") is None
    assert available_memory(made.proc) == available_memory(tmp_path / "none")
    assert OomKills(made.proc).status(-signal.SIGKILL) == -signal.SIGKILL


def test_of_this_machine() -> None:
    """Whatever it is: all groups that are named are there, and a limit is one of theirs."""
    there = [directory for _, directory in groups()]
    assert all(directory.is_dir() for directory in there)
    limit = memory_limit()
    assert limit is None or limit.bytes > 0 and limit.file.parent in there
    assert OomKills().status(0) == 0


@pytest.mark.parametrize("version", [1, 2])
def test_a_kill_for_want_of_memory_has_a_status_of_its_own(tmp_path: Path, version: int) -> None:
    if version == 1:
        made = Machine(tmp_path, "4:memory:/e\n0::/\n", ("cgroup", "/", V1),
                       ("cgroup2", "/", f"{V2}/unified"))
        file, text = f"{V1}/e/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill {}\n"
    else:
        made = Machine(tmp_path, "0::/e\n", ("cgroup2", "/", V2))
        file, text = f"{V2}/e/memory.events", "low 0\nhigh 0\nmax 9\noom 9\noom_kill {}\n"
    made.write(file, text.format(3))
    kills = OomKills(made.proc)
    assert kills.status(-signal.SIGKILL) == -signal.SIGKILL
    made.write(file, text.format(5))
    assert [kills.status(status) for status in (1, -15, -9, -9, -9)] == [
        1, -15, OOM_KILLED, OOM_KILLED, -9]
    made.write(file, text.format(6))  # somebody else in the group
    for now in (0.0, 0.9, 1.0):
        kills.look(now)
    assert kills.status(-9) == -9
    kills.look(2.0)
    made.write(file, text.format(7))
    kills.look(2.5)
    kills.look(3.0)
    assert [kills.status(-9), kills.status(-9)] == [OOM_KILLED, -9]
    assert describe_exit(OOM_KILLED) == "was killed by the kernel, for want of memory"
    assert describe_exit(-9) == "was killed by SIGKILL"
