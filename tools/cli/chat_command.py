"""`actorium chat`: a conversation on the terminal, or one line a turn from a pipe."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from actorium.actors.config.tree import Config
from actorium.actors.errors import ActoriumError, BadConfig, EngineUnavailable
from actorium.actors.launcher.preflight import check_machine
from actorium.actors.params import SamplingParams
from actorium.tools.cli.command_line import Parsed, parse
from actorium.tools.cli.engines import own_engine
from actorium.tools.cli.sampling_flags import SamplingOptions, sampling_of
from actorium.tools.cli.status import announced_wait, running_dir

if TYPE_CHECKING:
    from actorium.actors.client.client import Client
    from actorium.actors.client.media import Image, Video

VIDEOS = (".mp4", ".m4v", ".mov", ".webm", ".mkv", ".avi", ".gif")
"""What is sent as a video."""
ABOUT = """Talk to a model. --name NAME talks to an engine that runs already; otherwise one is
started and stopped again. Ctrl-C stops an answer, Ctrl-D (or /exit) leaves, /new begins afresh,
/image FILE shows the model an image with the next turn, /help lists all commands."""
COMMANDS = {
    "/help": "these lines",
    "/new": "forget the conversation and begin afresh",
    "/image FILE": "an image or a video (a file or a URL) that goes with your next turn",
    "/exit": "leave, as /quit and Ctrl-D do; Ctrl-C stops an answer",
}
_COMMAND = re.compile(r"(/[a-z]+)(?:\s+(.*))?", re.DOTALL)
"""A turn that begins so is a command, and a path is none."""


class ChatOptions(SamplingOptions, frozen=True, kw_only=True):
    """The conversation, and how its answers are sampled."""

    system: str | None = None
    """First message, of the system."""
    adapter: str | None = None
    """Name of the LoRA adapter that answers (--lora-modules)."""
    image: tuple[str, ...] = ()
    """Images or videos (files or URLs) that go with the first turn."""


def run(_command: str, argv: list[str]) -> int:
    parsed = parse("actorium chat [MODEL]", argv, ChatOptions, ABOUT,
                   checks=[check_machine])
    sampling = sampling_of(parsed)
    if sampling.get("n", 1) != 1:
        raise BadConfig("--n: a conversation has one answer a turn", "n")
    with contextlib.ExitStack() as stack:
        client = _client(parsed, stack)
        if sys.stdin.isatty():
            print(banner(client.server_info(), sampling), file=sys.stderr, flush=True)
        talk(client, SamplingParams(**sampling), parsed.options.system, parsed.options.image,
             parsed.options.adapter)
    return 0


def _client(parsed: Parsed[ChatOptions], stack: contextlib.ExitStack) -> Client:
    from actorium.actors.client.client import Client

    runtime = parsed.config.runtime
    if "name" not in parsed.written:
        return stack.enter_context(own_engine(parsed.config)).client
    running_dir(runtime)
    client = stack.enter_context(Client(runtime.name, run_dir=runtime.run_dir))
    with announced_wait(f"the engine {runtime.name!r} to be ready", runtime.start_timeout):
        client.wait_ready(runtime.start_timeout)
    return client


def banner(info: dict[str, Any], sampling: dict[str, Any]) -> str:
    """Who answers, how its answers are sampled, and where to go on. sampling: the flags'."""
    from actorium.tools.cli.engines import sampling_line

    own = ", ".join(f"{name} {value}" for name, value in sampling.items())
    default = sampling_line(msgspec.convert(info["config"], Config), info)
    return (f"{info['model']}: conversations of up to {info['max_model_len']:,} tokens\n"
            f"sampling: {f'{own} (flags), else ' if own else ''}{default}\n"
            "/help lists the commands, Ctrl-D leaves")


def talk(client: Client, params: SamplingParams, system: str | None = None,
         images: Sequence[str] = (), adapter: str | None = None) -> None:
    """Read turns until the end of input; print each answer as it comes. images: of the first turn.
    Raises `InvalidRequest` where one of them cannot be read."""
    if sys.stdin.isatty():
        with contextlib.suppress(ImportError):  # a Python may be built without it
            import readline  # noqa: F401  # input() edits its line with it
    attached: list[Image | Video] = [attachment(name) for name in images]
    start: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    history: list[dict[str, Any]] = list(start)
    while (text := _read()) not in (None, "/exit", "/quit"):
        if not text:
            continue
        if command := _COMMAND.fullmatch(text):
            if command[1] == "/new":
                history, attached = list(start), []
            elif command[1] == "/image":
                attach(command[2] or "", attached)
            elif command[1] == "/help":
                print("\n".join(f"{name:<12} {about}" for name, about in COMMANDS.items()))
            else:
                print(f"error: {command[1]}: no such command (/help lists them)", file=sys.stderr,
                      flush=True)
            continue
        history.append({"role": "user", "content": [*attached, text] if attached else text})
        try:
            history.append({"role": "assistant", "content": answer(
                client, history, params, adapter)})
            attached = []
        except EngineUnavailable:
            raise
        except ActoriumError as error:
            print(f"error: {error.message}", file=sys.stderr, flush=True)
            history.pop()


def attachment(name: str) -> Image | Video:
    """The image or the video of a file or a URL. Raises `InvalidRequest`."""
    from actorium.actors.client.media import Image, Video

    path = name.partition("?")[0].lower()
    return Video(name) if path.endswith(VIDEOS) else Image(name)


def attach(name: str, attached: list[Image | Video]) -> None:
    """Adds to what goes with the next turn, and says so."""
    if not name:
        print("error: /image: FILE is missing", file=sys.stderr, flush=True)
        return
    try:
        attached.append(attachment(name))
    except ActoriumError as error:
        print(f"error: {error.message.removeprefix('messages: ')}", file=sys.stderr, flush=True)
        return
    print(f"({name} goes with your next turn)", file=sys.stderr, flush=True)


def _read() -> str | None:
    """The next turn; None at the end of input."""
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        if sys.stdin.isatty():
            print()
        return None
    except KeyboardInterrupt:
        print()
        return ""


def answer(client: Client, history: list[dict[str, Any]], params: SamplingParams,
           adapter: str | None = None) -> str:
    """Stream one answer to standard output; Ctrl-C ends it, and what was said is kept."""
    text = ""
    with client.chat(history, params, stream=True, adapter=adapter) as stream:
        try:
            for delta in stream:
                text += delta.text
                print(delta.text, end="", flush=True)
        except KeyboardInterrupt:
            pass
    print(flush=True)
    return text
