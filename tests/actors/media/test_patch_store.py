"""Prepared images and videos as files, and the folder that goes with the run directory."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from actorium.actors.errors import BadConfig
from actorium.actors.media.patch_store import (
    MediaFacts,
    patch_folder,
    read_facts,
    read_patches,
    remove_patches,
    stored_items,
    write_new,
    write_patches,
)
from actorium.actors.runtime.rundir import RunDir, make_media_folder, remove_media_folder

KEY, OTHER = bytes(range(32)), bytes(32)
FACTS = MediaFacts(True, (2, 2, 4), 2, 24, 0.5, (0.25, 1.25))
ROWS = np.arange(16 * 24, dtype=np.float32).reshape(16, 24)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    write_patches(tmp_path, KEY, ROWS, FACTS)
    found = read_patches(tmp_path, KEY)
    assert np.array_equal(found, ROWS) and found.dtype == np.float32 and not found.flags.writeable
    assert read_facts(tmp_path, KEY) == FACTS and FACTS.tokens == 4 and FACTS.bytes == ROWS.nbytes
    assert (tmp_path / f"{KEY.hex()}.rows").read_bytes() == ROWS.tobytes()
    assert (tmp_path / f"{KEY.hex()}.rows").stat().st_mode & 0o777 == 0o600
    remove_patches(tmp_path, KEY)
    assert not list(tmp_path.iterdir())
    assert found[3, 5] == ROWS[3, 5], "what is mapped stays"
    for read in (read_facts, read_patches):
        with pytest.raises(FileNotFoundError):
            read(tmp_path, KEY)


def test_rows_that_are_not_as_long_as_the_facts_say(tmp_path: Path) -> None:
    write_patches(tmp_path, KEY, ROWS, FACTS)
    with open(tmp_path / f"{KEY.hex()}.rows", "ab") as file:
        file.truncate(100)
    with pytest.raises(ValueError, match="has 100 bytes instead of 1536"):
        read_patches(tmp_path, KEY)
    (tmp_path / f"{KEY.hex()}.facts").write_text("{")
    with pytest.raises(ValueError, match="facts: "):
        read_facts(tmp_path, KEY)
    with pytest.raises(ValueError, match="1536 bytes of rows"):
        write_patches(tmp_path, OTHER, ROWS, MediaFacts(False, (1, 2, 2), 2, 24))


def test_a_new_actor_finds_what_is_whole(tmp_path: Path) -> None:
    write_patches(tmp_path, KEY, ROWS, FACTS)
    write_new(tmp_path, OTHER, ROWS, FACTS)
    (tmp_path / f"{'ab' * 32}.rows").write_bytes(b"no facts")
    assert list(stored_items(tmp_path)) == [(KEY, FACTS)]
    assert sorted(os.listdir(tmp_path)) == [f"{KEY.hex()}.facts", f"{KEY.hex()}.rows"]


@pytest.mark.parametrize("need", [0, 1 << 62], ids=["shared", "beside"])
def test_the_folder_goes_with_the_run_directory(tmp_path: Path, need: int) -> None:
    """Also where the engine was killed and the next one of its name finds it."""
    shared = tmp_path / "shm"
    shared.mkdir()
    run = RunDir("vl", str(tmp_path / "run"))
    folder = make_media_folder(run.path, need, shared)
    assert folder == patch_folder(run.path) == make_media_folder(run.path, need, shared)
    assert folder.is_symlink() == (need == 0) and folder.stat().st_mode & 0o777 == 0o700
    write_patches(folder, KEY, ROWS, FACTS)
    os.close(run.lock)  # as a kill lets go of it
    again = RunDir("vl", str(tmp_path / "run"))
    assert not os.path.lexists(folder) and not list(shared.iterdir())
    make_media_folder(again.path, need, shared)
    again.close()
    assert not list(shared.iterdir()) and not again.path.exists()


def test_nothing_of_others_is_removed(tmp_path: Path) -> None:
    others = tmp_path / "others"
    others.mkdir()
    (others / "precious").touch()
    run = tmp_path / "run" / "vl"
    run.mkdir(parents=True, mode=0o700)
    (run / "media").symlink_to(others)
    with pytest.raises(BadConfig, match="holds 'media'"):
        RunDir("vl", str(tmp_path / "run"))
    assert (others / "precious").exists()
    target = tmp_path / f"actorium-media-{'0' * 32}"
    (run / "media").unlink()
    (run / "media").symlink_to(target)
    make_media_folder(run, 0)  # its maker was killed behind the link: made again
    assert target.is_dir()
    remove_media_folder(run / "media")
    assert not target.exists()
