"""Crash reports: all that is known about an actor that died, in one file to send on.

    <run dir's parent>/crashes/ENGINE-ROLE-EPOCH-TIME.tar.gz
        about.json   who died of what, when, on what
        config.json  the engine's, without its keys
        status.json  the watchdog's status, if it answered
        *.log        the ends of the actors' logs; stacks of a fatal signal or of a hang are there
        *.tape0/1    the flight recorder's files (`actorium replay` takes the whole report)

There is no prompt in it unless the engine records prompts. The files are taken hold of by
links, which is a matter of microseconds, so that a restart need not wait; a thread packs them.
"""

from __future__ import annotations

import contextlib
import io
import os
import platform
import secrets
import shutil
import tarfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from actorium.actors.config import tree as configs
from actorium.actors.messages import Exited, FromWatchdogFront, GetStatus
from actorium.actors.runtime.process import describe_exit
from actorium.actors.runtime.rundir import address

DIRECTORY = "crashes"
KEPT = 5
"""Reports in the directory, of all engines; older ones go."""
TAKEN = (".log", ".tape0", ".tape1")
LOG_BYTES = 1 << 20
"""Of the end of each log."""
PATIENCE_MS = 500
"""Milliseconds that the watchdog has to answer."""
LEVEL = 1
STALE_SECONDS = 600.0
_decode_status = msgspec.msgpack.Decoder(FromWatchdogFront).decode
"""Made at import, since reports have threads: see `client/connection.py`."""


def report(run_dir: Path, exited: Exited, why: str = "",
           done: Callable[[Path], None] | None = None) -> threading.Thread | None:
    """Begin a report about an actor that has exited; None if it cannot be written.

    `why`: the error that it reported. `done` is called with the report's path by the thread that
    makes it, for which an ending process waits.
    """
    stamp = time.strftime("%Y%m%d-%H%M%S")
    name = f"{run_dir.name}-{exited.role}-{exited.epoch}-{stamp}-{secrets.token_hex(2)}"
    staging = run_dir.parent / DIRECTORY / f".{name}"
    try:
        staging.parent.mkdir(mode=0o700, exist_ok=True)
        staging.parent.chmod(0o700)
        staging.mkdir(mode=0o700)
        _take(run_dir, staging)
    except OSError:
        shutil.rmtree(staging, ignore_errors=True)
        return None
    thread = threading.Thread(target=_pack, args=(run_dir, exited, why, staging, name, done),
                              name="crash report")
    thread.start()
    return thread


def _take(run_dir: Path, staging: Path) -> None:
    """Take hold of the files as they are: the next incarnation makes new ones, or appends."""
    for entry in run_dir.iterdir():
        if entry.suffix in TAKEN:
            with contextlib.suppress(FileNotFoundError):
                os.link(entry, staging / entry.name)
    config = configs.load((run_dir / "config.json").read_bytes())
    (staging / "config.json").write_bytes(msgspec.json.encode(configs.with_secrets_hidden(config)))


def _about(run_dir: Path, exited: Exited, why: str) -> dict[str, object]:
    return {"engine": run_dir.name, "role": exited.role, "pid": exited.pid, "epoch": exited.epoch,
            "end": describe_exit(exited.status), "why": why, "time": time.time(),
            "python": platform.python_version(), "platform": platform.platform(),
            "cpus": os.cpu_count()}


def _pack(run_dir: Path, exited: Exited, why: str, staging: Path, name: str,
          done: Callable[[Path], None] | None) -> None:
    path = staging.parent / f"{name}.tar.gz"
    try:
        (staging / "about.json").write_bytes(msgspec.json.encode(_about(run_dir, exited, why)))
        if exited.role != "watchdog":
            _ask_status(run_dir, staging / "status.json")
        fd = os.open(staging / "report", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(fd, "wb") as file, tarfile.open(fileobj=file, mode="w:gz",
                                                  compresslevel=LEVEL) as archive:
            for entry in sorted(staging.iterdir()):
                if entry.name != "report":
                    _add(archive, name, entry)
        os.replace(staging / "report", path)
        _forget_old(staging.parent)
    except OSError:
        return
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    if done is not None:
        done(path)


def _add(archive: tarfile.TarFile, name: str, entry: Path) -> None:
    """A file, or the end of a log, as it is at this moment."""
    with entry.open("rb") as file:
        if entry.suffix == ".log":
            file.seek(max(0, entry.stat().st_size - LOG_BYTES))
        data = file.read()
    info = tarfile.TarInfo(f"{name}/{entry.name}")
    info.size, info.mode, info.mtime = len(data), 0o600, int(entry.stat().st_mtime)
    archive.addfile(info, io.BytesIO(data))


def _ask_status(run_dir: Path, path: Path) -> None:
    """Write the watchdog's status, if it answers in time."""
    import zmq

    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(address(run_dir, "watchdog.front"))
        socket.send(msgspec.msgpack.encode(GetStatus("crash")))
        if socket.poll(PATIENCE_MS):
            with contextlib.suppress(msgspec.MsgspecError):
                status = _decode_status(socket.recv())
                path.write_bytes(msgspec.json.encode(status))


def _forget_old(directory: Path) -> None:
    """Remove all reports but the latest ones, and what a killed launcher has left half made."""
    reports: list[tuple[float, Path]] = []
    for entry in directory.iterdir():
        with contextlib.suppress(FileNotFoundError):
            age = entry.stat().st_mtime
            if entry.name.endswith(".tar.gz"):
                reports.append((age, entry))
            elif entry.name.startswith(".") and age < time.time() - STALE_SECONDS:
                shutil.rmtree(entry, ignore_errors=True)
    for _, entry in sorted(reports, reverse=True)[KEPT:]:
        entry.unlink(missing_ok=True)
