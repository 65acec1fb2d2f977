"""Copies of a model with something wrong in a file, and what reading them comes to, each in a
process of its own that may use so much time and memory."""

from __future__ import annotations

import contextlib
import io
import json
import os
import resource
import shutil
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from actorium.actors.config.tree import Config, DeviceConfig, ModelConfig
from actorium.actors.detokenizer import incremental
from actorium.actors.errors import ActoriumError
from actorium.actors.messages import ChatMessage
from actorium.actors.models.model_dir import DEMO_MODEL
from actorium.actors.tokenizer.chat_template import RenderBudgetExceeded
from actorium.actors.tokenizer.text_model import TextModel
from actorium.gpu.models.registry import load_model
from actorium.gpu.worker.device import open_device
from actorium.tools.cli.plan_command import run as plan_command

SECONDS, MEMORY, PATIENCE = 20, 4 << 30, 120
LONGEST = 4000
"""Characters of the line that says what is wrong."""
ODD: tuple[Any, ...] = (
    -1, 0, 1, 3, 10**6, 2**31, 10**18, 10**400, 1.5, -0.0, 1e300, 1e-320, "x", "", "NaN", True,
    False, None, [], {}, [1], [None], [{}], {"a": 1}, [[]])
"""What a value of a JSON file is replaced by."""
CPU = torch.device("cpu")


def copy_of(base: Path, to: Path) -> Path:
    """A copy that may be written to."""
    shutil.copytree(base, to)
    return to


def demo(tmp_path: Path) -> Path:
    """A copy of the packaged model."""
    return copy_of(DEMO_MODEL, tmp_path / "model")


def configured(path: Path, **model: Any) -> Config:
    return Config(model=ModelConfig(model=str(path), **model),
                  device=DeviceConfig(device="cpu", threads=1))


def plan(path: Path) -> None:
    """What `actorium plan` reads."""
    with contextlib.redirect_stdout(io.StringIO()):
        plan_command("plan", [str(path)])


def text(path: Path) -> None:
    """What the tokenizer actor reads, and a word."""
    model = TextModel(configured(path))
    model.encode("hello world 123", True, "text")


def chat(path: Path) -> None:
    """The same, and a conversation, as the actor itself renders a short one. What takes more is
    rendered elsewhere: not here."""
    model = TextModel(configured(path))
    with contextlib.suppress(RenderBudgetExceeded):
        template = model.templates.pick(None, False)
        assert template is not None
        template.render([ChatMessage("user", "hello " * 20)], {}, None, 20_000)


def detokenize(path: Path) -> None:
    """What the detokenizer reads, and some tokens."""
    stream = incremental.load(configured(path).model).stream([1, 2, 3], True)
    for token in range(40):
        stream.push(token)
    stream.flush()


def weights(path: Path) -> None:
    """What the worker reads."""
    load_model(path, configured(path), CPU, lambda *_: None)


def opened(path: Path) -> None:
    """What the worker does until it is ready."""
    own = configured(path)
    few = msgspec.structs.replace(own.scheduler, max_num_seqs=4, max_num_batched_tokens=64)
    open_device(msgspec.structs.replace(own, scheduler=few), 1, lambda *_: None, {})


READERS: tuple[Callable[[Path], None], ...] = (plan, text, detokenize, weights)


def outcome(read: Callable[[Path], None], path: Path) -> str:
    """"" = it is read; the line by which it is refused; or, after "BAD", what else became of it:
    another exception, the end of the process, too much time or memory, several lines."""
    [line] = outcomes([read], path)
    return line


def outcomes(reads: Sequence[Callable[[Path], None]], path: Path) -> list[str]:
    """The `outcome` of each, one after the other in a process of its own; where it ends, those that
    are left have another one."""
    lines: list[str] = []
    while left := reads[len(lines):]:
        ours, theirs = os.pipe()
        if not (pid := os.fork()):
            try:
                os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
                for read in left:
                    os.write(theirs, _limited(read, path).encode("utf-8", "replace")[:15_000] + END)
            finally:
                os._exit(0)
        os.close(theirs)
        with open(ours, "rb") as pipe:
            lines += [line.decode("utf-8", "replace") for line in pipe.read().split(END)[:-1]]
        _, status = os.waitpid(pid, 0)
        if os.WIFSIGNALED(status):
            lines.append(f"BAD signal {os.WTERMSIG(status)}")
        elif len(lines) < len(reads):
            lines.append("BAD nothing said")
    return lines


END = b"\0"
"""Of a line that a process says."""


def _limited(read: Callable[[Path], None], path: Path) -> str:
    """In a process of its own: as much more time and memory as reading may take."""
    size = int(Path("/proc/self/statm").read_text().split()[0]) * 4096
    seconds = int(time.process_time()) + SECONDS
    for what, most in ((resource.RLIMIT_AS, size + MEMORY), (resource.RLIMIT_CPU, seconds),
                       (resource.RLIMIT_CORE, 0)):
        resource.setrlimit(what, (most, resource.getrlimit(what)[1]))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # Python's would wait for the end of C code
    signal.alarm(PATIENCE)
    return _said(read, path)


def _said(read: Callable[[Path], None], path: Path) -> str:
    torch.set_num_threads(1)  # those of the pool are not in this process
    try:
        read(path)
    except ActoriumError as error:
        line = str(error)
        fine = line.isprintable() and len(line) < LONGEST
        return line if fine else f"BAD line: {line[:300]!r}"
    except BaseException as error:
        where = [f"{Path(frame.filename).name}:{frame.lineno}"
                 for frame in traceback.extract_tb(error.__traceback__)[-4:]]
        return f"BAD {type(error).__name__}: {str(error)[:200]!r} {where}"
    return ""


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value within a JSON value."""
    items: Any = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    for key, below in items:
        yield (*at, key)
        yield from places(below, (*at, key))


def replaced(value: Any, at: tuple[Any, ...], new: Any) -> Any:
    """A copy with another value at that place; `KeyError` as the new one takes it away."""
    whole = json.loads(json.dumps(value))
    holder = whole
    for key in at[:-1]:
        holder = holder[key]
    if new is KeyError:
        del holder[at[-1]]
    else:
        holder[at[-1]] = new
    return whole
