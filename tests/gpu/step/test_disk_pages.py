"""Pages as files: whole, checked, bounded, found again, and never an error."""

from __future__ import annotations

import fcntl
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import zlib
from pathlib import Path

import pytest

from actorium.actors.runtime.rundir import sweep
from actorium.actors.runtime.security.private_paths import UnsafePath
from actorium.gpu.step.disk_pages import BLOCK, LOCK, DiskPages
from actorium.gpu.step.page_store import CORRUPT, DONE, HEADER, MISSING

WIDTH = 3000
SPACE = b"n" * 16


def name_of(number: int) -> bytes:
    return number.to_bytes(16, "big")[::-1]


def page_of(number: int) -> bytes:
    return random.Random(number).randbytes(WIDTH)


def opened(directory: Path, bound: int = 1 << 24, space: bytes = SPACE) -> DiskPages:
    return DiskPages(directory, bound, space)


def put(disk: DiskPages, *numbers: int) -> None:
    for number in numbers:
        page = page_of(number)
        assert disk.write(name_of(number), memoryview(page), zlib.crc32(page))


def got(disk: DiskPages, number: int) -> bytes | int:
    """What is read: the page, or why not."""
    into = bytearray(WIDTH)
    found, crc = disk.read(name_of(number), memoryview(into))
    if found == DONE:
        assert crc == zlib.crc32(into)
        return bytes(into)
    return found


def files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file() and path.name != LOCK)


def test_what_was_written_is_read_by_the_next_one(tmp_path: Path) -> None:
    first = opened(tmp_path / "pages")
    put(first, *range(20))
    assert (first.pages, first.held_bytes) == (20, 20 * BLOCK)
    first.close()
    second = opened(tmp_path / "pages")
    assert (second.pages, second.held_bytes) == (20, 20 * BLOCK)
    assert all(second.holds(name_of(n)) for n in range(20)) and not second.holds(name_of(20))
    assert [got(second, n) for n in range(21)] == [*map(page_of, range(20)), MISSING]


def test_nobody_else_may_look_into_it(tmp_path: Path) -> None:
    opened(tmp_path / "made")
    assert (tmp_path / "made").stat().st_mode & 0o777 == 0o700
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o755)
    with pytest.raises(PermissionError, match="mode 0700"):
        opened(tmp_path / "open")
    (tmp_path / "worse").mkdir()
    (tmp_path / "worse").chmod(0o777)
    with pytest.raises(UnsafePath):
        opened(tmp_path / "worse" / "pages")
    put(disk := opened(tmp_path / "made"), 1)
    assert all(path.stat().st_mode & 0o077 == 0 for path in files(tmp_path / "made"))
    assert disk.pages == 1


def test_a_thousand_flips_are_detected_and_none_is_served(tmp_path: Path) -> None:
    """In headers as well: a flip may sit anywhere in the file."""
    disk, dice = opened(tmp_path / "pages"), random.Random(3)
    for round_ in range(20):
        numbers = range(50 * round_, 50 * (round_ + 1))
        put(disk, *numbers)
        for path in files(tmp_path / "pages"):
            data = bytearray(path.read_bytes())
            at = dice.randrange(len(data) if round_ else HEADER.size)
            data[at] ^= 1 << dice.randrange(8)
            path.write_bytes(data)
        assert [got(disk, n) for n in numbers] == [CORRUPT] * 50
        assert not files(tmp_path / "pages"), "they are gone, and written anew"
    put(disk, 7)
    assert got(disk, 7) == page_of(7)


@pytest.mark.parametrize("size", [0, 1, HEADER.size - 1, HEADER.size, HEADER.size + WIDTH - 1,
                                  HEADER.size + WIDTH + 1])
def test_a_file_of_another_length_is_no_page(tmp_path: Path, size: int) -> None:
    disk = opened(tmp_path / "pages")
    put(disk, 1)
    (path,) = files(tmp_path / "pages")
    os.truncate(path, size)
    assert got(disk, 1) == CORRUPT and got(disk, 1) == MISSING


def test_a_page_under_anothers_name_is_not_served(tmp_path: Path) -> None:
    disk = opened(tmp_path / "pages")
    put(disk, 1, 2)
    (tmp_path / "pages" / disk._path(name_of(1))).rename(
        tmp_path / "pages" / disk._path(name_of(2)))
    assert got(disk, 2) == CORRUPT
    other = opened(tmp_path / "pages", space=b"m" * 16)
    put(other, 5)
    assert got(disk, 5) == MISSING, "another model's"
    (tmp_path / "pages" / disk._own / "05").mkdir(exist_ok=True)
    (tmp_path / "pages" / other._path(name_of(5))).rename(
        tmp_path / "pages" / disk._path(name_of(5)))
    assert got(disk, 5) == CORRUPT


def test_the_least_recently_used_goes_and_the_bound_holds(tmp_path: Path) -> None:
    bound = 64 * BLOCK
    disk = opened(tmp_path / "pages", bound)
    put(disk, *range(60))
    for path in files(tmp_path / "pages"):
        os.utime(path, (1000, 1000))
    assert got(disk, 5) == page_of(5)  # has been used now
    put(disk, *range(100, 140))
    assert sum(BLOCK for _ in files(tmp_path / "pages")) <= bound
    assert got(disk, 5) == page_of(5) and got(disk, 139) == page_of(139)
    assert disk.evicted >= 36 and sum(got(disk, n) == MISSING for n in range(60)) >= 36


def test_another_models_pages_go_as_well(tmp_path: Path) -> None:
    bound = 64 * BLOCK
    put(opened(tmp_path / "pages", bound, b"m" * 16), *range(60))
    for path in files(tmp_path / "pages"):
        os.utime(path, (1000, 1000))
    disk = opened(tmp_path / "pages", bound)
    put(disk, *range(60))
    assert len(files(tmp_path / "pages")) <= 64
    assert sum(got(disk, n) == page_of(n) for n in range(60)) >= 55


def test_several_write_read_and_make_room_at_once(tmp_path: Path) -> None:
    """Each reads its own, the others' or nothing, and never anything else; the directory stays
    within its bound and what each may write between two looks. Without that some two hundred pages
    would lie there."""
    bound, wrong = 64 * BLOCK, []

    def work(number: int) -> None:
        disk, dice = opened(tmp_path / "pages", bound), random.Random(number)
        for _ in range(150):
            own = dice.randrange(400)
            page = page_of(own)
            if dice.random() < 0.5:
                disk.write(name_of(own), memoryview(page), zlib.crc32(page))
            elif got(disk, own) not in (page, MISSING):
                wrong.append(own)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert len(files(tmp_path / "pages")) <= 64 + 4 * (64 // 16 + 1)


def test_nothing_is_written_beyond_the_bound_while_another_makes_room(tmp_path: Path) -> None:
    bound = 64 * BLOCK
    disk = opened(tmp_path / "pages", bound)
    put(disk, *range(64))
    with (tmp_path / "pages" / LOCK).open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        page = page_of(100)
        assert not any(disk.write(name_of(n), memoryview(page), 0) for n in range(100, 200))
        assert got(disk, 1) == page_of(1)
    put(disk, 100)
    assert got(disk, 100) == page_of(100) and len(files(tmp_path / "pages")) <= 64


def test_a_half_written_file_is_never_a_page_and_goes(tmp_path: Path) -> None:
    disk = opened(tmp_path / "pages")
    put(disk, 1)
    left = tmp_path / "pages" / disk._own / ".123-4"
    left.write_bytes(b"half")
    assert opened(tmp_path / "pages").pages == 2 and left.exists(), "it may still be written"
    os.utime(left, (1000, 1000))
    assert opened(tmp_path / "pages").pages == 1 and not left.exists()


KILLED_IN_A_WRITE = """
import os, signal, sys
from pathlib import Path
from actorium.gpu.step.disk_pages import DiskPages

def half(fd, parts):
    os.write(fd, bytes(parts[0]) + bytes(parts[1])[:1000])
    os.kill(os.getpid(), signal.SIGKILL)

disk = DiskPages(Path(sys.argv[1]), 1 << 24, b"n" * 16)
os.writev = half
disk.write(bytes.fromhex(sys.argv[2]), memoryview(bytes(3000)), 0)
"""


def test_who_is_killed_while_it_writes_leaves_no_page(tmp_path: Path) -> None:
    """Nor does what it leaves keep anybody else from writing it."""
    disk = opened(tmp_path / "pages")
    put(disk, 1)
    killed = subprocess.run([sys.executable, "-c", KILLED_IN_A_WRITE, tmp_path / "pages",
                             name_of(2).hex()], timeout=60)
    assert killed.returncode == -signal.SIGKILL
    (left,) = [path for path in files(tmp_path / "pages") if path.name.startswith(".")]
    assert left.stat().st_size == HEADER.size + 1000
    assert not disk.holds(name_of(2)) and got(disk, 2) == MISSING
    put(disk, 2)
    assert got(disk, 2) == page_of(2) and got(opened(tmp_path / "pages"), 1) == page_of(1)


def test_a_disk_that_is_full_or_removed_is_a_miss(tmp_path: Path,
                                               monkeypatch: pytest.MonkeyPatch,
                                               caplog: pytest.LogCaptureFixture) -> None:
    disk = opened(tmp_path / "pages")
    put(disk, 1)

    def full(fd: int, parts: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "writev", full)
        assert not disk.write(name_of(2), memoryview(page_of(2)), 0)
        assert not disk.write(name_of(3), memoryview(page_of(3)), 0)
    assert "No space left" in caplog.text and len(caplog.records) == 1, "one line a minute"
    assert len(files(tmp_path / "pages")) == 1, "nothing is left half-written"
    put(disk, 4)
    shutil.rmtree(tmp_path / "pages")
    assert got(disk, 1) == MISSING and not disk.holds(name_of(1))
    assert not disk.write(name_of(5), memoryview(page_of(5)), 0)
    disk.wipe()
    assert not (tmp_path / "pages").exists(), "what somebody removed stays removed"


def test_a_wipe_leaves_other_models_alone(tmp_path: Path) -> None:
    disk, other = opened(tmp_path / "pages"), opened(tmp_path / "pages", space=b"m" * 16)
    put(disk, 1, 2, 3)
    put(other, 4)
    disk.wipe()
    assert got(disk, 1) == MISSING and got(other, 4) == page_of(4) and disk.pages == 1


def test_a_cache_among_run_directories_is_not_taken_for_a_dead_engines(tmp_path: Path) -> None:
    """A launcher that starts removes those; an empty cache looked like one."""
    disk = opened(tmp_path / "pages")
    sweep(str(tmp_path))
    put(disk, 1)
    sweep(str(tmp_path))
    assert got(disk, 1) == page_of(1)


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    disk = opened(tmp_path / "pages")
    put(disk, 1)
    (path,) = files(tmp_path / "pages")
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert got(disk, 1) == MISSING and not disk.holds(name_of(1))
