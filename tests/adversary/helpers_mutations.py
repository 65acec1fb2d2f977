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
import traceback
from collections.abc import Callable, Iterator
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
    ours, theirs = os.pipe()
    pid = os.fork()
    if not pid:
        told = "BAD nothing said"
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            size = int(Path("/proc/self/statm").read_text().split()[0]) * 4096
            resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, size + MEMORY))
            resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            signal.alarm(PATIENCE)
            told = _said(read, path)
        finally:
            os.write(theirs, told.encode("utf-8", "replace")[:60_000])
            os._exit(0)
    os.close(theirs)
    with open(ours, "rb") as pipe:
        told = pipe.read().decode()
    _, status = os.waitpid(pid, 0)
    return f"BAD signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else told


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
