"""The run directory of an engine: its sockets, its lock, its configuration.

Mode 0700 and a flock, because a second bind to an ipc path silently steals it; and nobody else can
have made it or any directory above it (`private`). Only the standard library is imported: the
client uses this, too.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import stat
import time
from collections.abc import Collection
from pathlib import Path

from actorium.actors.errors import ActoriumError, BadConfig, EngineUnavailable
from actorium.actors.runtime.security import private_paths as private
from actorium.actors.runtime.security.private_paths import UnsafePath

MAX_IPC_PATH = 107
"""sun_path less its terminator."""
LONGEST_SOCKET = "detokenizer.front"
OUR_FILES = frozenset({"lock", "config.json", "engine.json", "probes.json", "probes.sock",
                       "gateway.json", "connections.sock", "exact.json", "passes.json",
                       "upgrade.json", "plans.json", "pulled.json", "weights.json"})
WEIGHTS = "weights.json"
"""The files that the worker has its model's weights from, where they have changed."""
RANK_FILE = re.compile(r"worker-\d+\.json")
NEW = ".new"
"""Behind the name of a file that is being written."""
PEER = ".peer"
"""Behind the name of a gateway's socket for the others."""
CALLS = ".calls"
"""Behind the name of a gateway's socket for connections that the relay hands over."""
TENSORS = ".safetensors"
"""How names of files end that clients send a model's tensors in."""
OUR_SUFFIXES = (".inbox", ".front", ".log", ".tape0", ".tape1", ".journal", PEER, CALLS, NEW,
                TENSORS)
UNUSED_TENSORS = 600.0
"""Seconds after which tensors that were sent, and are not in use, are removed: the order to use
them may still be on its way."""
GROUP = "group-"
"""Before the epoch: the directory in which the ranks of a worker meet."""
GROUP_FILES = frozenset({"gate", "ranks", "ranks.new", "store"})
LEDGER = "ledger"
"""Directory of the ledger, where no other was chosen."""
LEDGERS = "ledgers"
"""Directory of the ledgers of a server's engines, each in a directory of its engine's name: they
outlive the engines' run directories."""
LOCK_TRIES = 6
LOCK_PAUSE = 0.005
MEDIA = "media"
"""The folder of prepared images and videos. It lies in shared memory where that has room for it,
and is then a symbolic link there, of a name that nobody can guess. Whoever removes the run
directory removes what the link names, too: also what an engine left that was killed."""
SHARED_MEMORY = Path("/dev/shm")
ROWS, FACTS, SECRET = ".rows", ".facts", "secret"
"""How names of files in it end; and the name of the one that keys are made with."""
_MEDIA_FILE = re.compile(r"([0-9a-f]{64}(\.rows|\.facts)|secret)(\.new)?")
_MEDIA_FOLDER = re.compile(r"actorium-media-[0-9a-f]{32}")
OWN_LEVELS = 2
"""The last directories of a run directory's path, the engine's and the one of all engines, which
are no symbolic links."""


def base_dir(run_dir: str | None = None) -> Path:
    """Where the run directories of this user's engines lie."""
    if run_dir:
        return Path(run_dir)
    if env := os.environ.get("ACTORIUM_RUN_DIR"):
        return Path(env)
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and _is_own(runtime):
        return Path(runtime) / "actorium"
    return Path(f"/tmp/actorium-{os.getuid()}")


def _is_own(directory: str) -> bool:
    """Whether the user owns the directory: `sudo` may leave another's in the environment."""
    try:
        return os.stat(directory).st_uid == os.getuid() and os.access(directory, os.W_OK)
    except OSError:
        return False


def engine_dir(name: str, run_dir: str | None = None) -> Path:
    """Run directory of the engine `name`, whether it runs or not."""
    return base_dir(run_dir) / name


def remove_tensors(directory: Path, used: Collection[str]) -> None:
    """Removes the tensors that clients have sent and that are not in use; used: the files that are.
    """
    for file in directory.glob(f"*{TENSORS}"):
        with contextlib.suppress(OSError):
            if str(file) not in used and file.stat().st_mtime < time.time() - UNUSED_TENSORS:
                file.unlink()


def address(directory: Path, socket: str) -> str:
    """ZMQ address of one socket: "scheduler.inbox", "tokenizer.front", ...; of another engine
    beside this one: "../NAME/scheduler.inbox"."""
    beside = socket.removeprefix("../")
    return f"ipc://{(directory if beside == socket else directory.parent) / beside}"


def is_running(directory: Path) -> bool:
    """True while a launcher of this user (or root's) holds the directory's lock."""
    try:
        private.check_directory(directory, keep_links=OWN_LEVELS)
        fd = private.open_file(directory / "lock", os.O_RDWR)
    except (OSError, UnsafePath):
        return False
    try:
        # Shared: whoever else looks at the same time is no engine.
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def running_engines(run_dir: str | None = None) -> list[str]:
    """Names of this user's running engines, sorted."""
    base = base_dir(run_dir)
    if not base.is_dir():
        return []
    return sorted(d.name for d in base.iterdir() if d.is_dir() and is_running(d))


class RunDir:
    """The launcher's hold on a run directory: made, locked, cleared; removed by `close`.

    Only files that engines make are ever removed: a directory that holds anything else is refused.
    """

    def __init__(self, name: str, run_dir: str | None = None) -> None:
        """Raises `EngineUnavailable` if an engine of that name runs, `BadConfig` on a bad path."""
        if name.startswith(".") or "/" in name:
            raise BadConfig(f"name: {name!r} is not the name of an engine", "runtime.name")
        self.path = engine_dir(name, run_dir).absolute()
        if len(str(self.path / LONGEST_SOCKET).encode()) > MAX_IPC_PATH:
            raise BadConfig(f"run_dir: socket paths under {self.path} exceed {MAX_IPC_PATH} bytes",
                            "runtime.run_dir")
        while True:
            self._make()
            self.lock = self._take(name)
            if self._still_there():
                break
            os.close(self.lock)  # its last owner removed it between our open and our lock
        self._clear()

    @classmethod
    def taken_over(cls, path: Path, lock: int) -> RunDir:
        """Returns the directory whose lock this process has got from the launcher before."""
        held = cls.__new__(cls)
        held.path, held.lock = path, lock
        return held

    def _make(self) -> None:
        try:
            private.check_directory(self.path, make=True, keep_links=OWN_LEVELS)
            foreign = sorted(e.name for e in self.path.iterdir() if not _is_ours(e))
            if not foreign:
                self.path.chmod(0o700)
        except OSError as error:
            raise BadConfig(f"run_dir: cannot make {self.path}: {error.strerror}",
                            "runtime.run_dir") from None
        except UnsafePath as error:
            raise BadConfig(f"run_dir: {error}", "runtime.run_dir") from None
        if foreign:
            raise BadConfig(f"run_dir: {self.path} holds {foreign[0]!r}, which is no engine's file",
                            "runtime.run_dir")

    def _take(self, name: str) -> int:
        """The locked lock file. Tries for a moment: `is_running` holds a lock while it looks."""
        try:
            lock = private.open_file(self.path / "lock", os.O_RDWR | os.O_CREAT)
        except FileNotFoundError:
            return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise BadConfig(f"run_dir: {self.path}/lock: {error.strerror}",
                            "runtime.run_dir") from None
        except UnsafePath as error:
            raise BadConfig(f"run_dir: {error}", "runtime.run_dir") from None
        for left in reversed(range(LOCK_TRIES)):
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return lock
            except BlockingIOError:
                if left:
                    time.sleep(LOCK_PAUSE)
        os.close(lock)
        raise EngineUnavailable(f"an engine named {name!r} is already running", "name")

    def _still_there(self) -> bool:
        try:
            return os.path.samestat(os.stat(self.path / "lock"), os.fstat(self.lock))
        except FileNotFoundError:
            return False

    def _clear(self) -> None:
        """Remove what an engine that was killed has left."""
        for entry in self.path.iterdir():
            if entry.name == LEDGER:
                remove_ledger(entry)
            elif entry.name == LEDGERS:
                for ledger in entry.iterdir():
                    remove_ledger(ledger)
                entry.rmdir()
            elif _is_group(entry):
                remove_group(entry)
            elif is_media_folder(entry):
                remove_media_folder(entry)
            elif entry.name != "lock" and _is_ours(entry):
                entry.unlink(missing_ok=True)

    def close(self) -> None:
        """Remove the directory and let the lock go."""
        with contextlib.suppress(OSError):
            self._clear()
            (self.path / "lock").unlink()
            self.path.rmdir()
        os.close(self.lock)


def remove_ledger(directory: Path) -> None:
    """Removes a ledger that nobody writes."""
    for file in directory.iterdir():
        file.unlink(missing_ok=True)
    directory.rmdir()


def remove_group(directory: Path) -> None:
    """Remove the directory of ranks that are gone."""
    for name in GROUP_FILES:
        (directory / name).unlink(missing_ok=True)
    directory.rmdir()


def sweep(run_dir: str | None = None) -> None:
    """Remove the run directories of engines whose launcher was killed."""
    base = base_dir(run_dir)
    with contextlib.suppress(OSError):
        for entry in list(base.iterdir()):
            if (entry / "lock").is_file() and not is_running(entry):
                with contextlib.suppress(ActoriumError):
                    RunDir(entry.name, run_dir).close()


def write_private(path: Path, data: bytes) -> None:
    """(Over)write a file that nobody else may read, whatever the umask; at once, since clients tell
    engines apart by when it was written."""
    new = path.with_name(path.name + NEW)
    fd = private.open_file(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    with open(fd, "wb") as file:
        file.write(data)
    new.replace(path)


def rewrite_private(path: Path, data: bytes) -> None:
    """Overwrites such a file so that clients, who know it by its inode and time, notice nothing.
    Whoever reads it meanwhile gets half of it."""
    fd = private.open_file(path, os.O_RDWR)
    with open(fd, "r+b") as file:
        before = os.fstat(fd)
        file.write(data)
        file.truncate()
        file.flush()
        os.utime(fd, ns=(before.st_atime_ns, before.st_mtime_ns))


def _is_group(entry: Path) -> bool:
    return (entry.name.startswith(GROUP) and entry.is_dir() and not entry.is_symlink()
            and GROUP_FILES.issuperset(os.listdir(entry)))


def _is_ours(entry: Path) -> bool:
    if entry.name == LEDGER:
        return _is_ledger(entry)
    if entry.name == LEDGERS and entry.is_dir() and not entry.is_symlink():
        return all(map(_is_ledger, entry.iterdir()))
    return (entry.name in OUR_FILES or _is_group(entry) or is_media_folder(entry)
            or entry.name.endswith(OUR_SUFFIXES) or RANK_FILE.fullmatch(entry.name) is not None)


def _is_ledger(entry: Path) -> bool:
    return entry.is_dir() and not entry.is_symlink() and all(
        file.name == "lock" or file.suffix in (".seg", ".told") for file in entry.iterdir())


# --- the folder of prepared images and videos ---

def make_media_folder(run_dir: Path, need: int, shared: Path = SHARED_MEMORY) -> Path:
    """The folder, made if missing. need: bytes that shared memory must have. Raises `OSError`."""
    link = run_dir / MEDIA
    if not os.path.lexists(link):
        if free_bytes(shared) >= need:
            # The link is made first: a folder without one would be left behind by a kill.
            link.symlink_to(shared / f"actorium-media-{secrets.token_hex(16)}")
        else:
            link.mkdir(0o700)
    if link.is_symlink():
        target = Path(os.readlink(link))
        with contextlib.suppress(FileExistsError):
            target.mkdir(0o700)
        if not _is_own_folder(target):
            raise PermissionError(f"{target} is no folder of this user's")
    return link


def is_media_folder(entry: Path) -> bool:
    """Whether an entry of a run directory is this folder, and holds nothing else."""
    if entry.name != MEDIA:
        return False
    if entry.is_symlink():
        return _MEDIA_FOLDER.fullmatch(Path(os.readlink(entry)).name) is not None
    return entry.is_dir() and all(_MEDIA_FILE.fullmatch(name) for name in os.listdir(entry))


def remove_media_folder(entry: Path) -> None:
    """Removes the folder with what is in it."""
    if not entry.is_symlink():
        _remove_media(entry)
        return
    target = Path(os.readlink(entry))
    if _MEDIA_FOLDER.fullmatch(target.name) and _is_own_folder(target):
        _remove_media(target)
    entry.unlink()


def _remove_media(folder: Path) -> None:
    for name in os.listdir(folder):
        if _MEDIA_FILE.fullmatch(name):
            (folder / name).unlink(missing_ok=True)
    folder.rmdir()


def _is_own_folder(folder: Path) -> bool:
    try:
        info = os.lstat(folder)
    except FileNotFoundError:
        return False
    return stat.S_ISDIR(info.st_mode) and info.st_uid == os.geteuid()


def free_bytes(shared: Path) -> int:
    """Bytes that files there may take; 0 = it cannot be written."""
    try:
        stats = os.statvfs(shared)
    except OSError:
        return 0
    return stats.f_bavail * stats.f_frsize if os.access(shared, os.W_OK) else 0
