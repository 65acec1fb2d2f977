"""`actorium chat`: a conversation on the terminal, or one line a turn from a pipe."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Any

from actorium.actors.errors import ActoriumError, BadConfig, EngineUnavailable
from actorium.actors.launcher.preflight import check_machine
from actorium.actors.params import SamplingParams
from actorium.actors.runtime.rundir import engine_dir, is_running
from actorium.tools.cli.command_line import Parsed, parse
from actorium.tools.cli.engines import own_engine
from actorium.tools.cli.sampling_flags import SamplingOptions, sampling_of

if TYPE_CHECKING:
    from actorium.actors.client.client import Client

ABOUT = """Talk to a model. --name NAME talks to an engine that runs already; otherwise one is
started and stopped again. Ctrl-C stops an answer, Ctrl-D (or /exit) leaves, /new begins afresh."""


class ChatOptions(SamplingOptions, frozen=True, kw_only=True):
    """The conversation, and how its answers are sampled."""

    system: str | None = None
    """First message, of the system."""


def run(_command: str, argv: list[str]) -> int:
    """Entry of the command."""
    parsed = parse("actorium chat [MODEL]", argv, ChatOptions, ABOUT,
                   checks=[check_machine])
    sampling = sampling_of(parsed)
    if sampling.get("n", 1) != 1:
        raise BadConfig("--n: a conversation has one answer a turn", "n")
    with contextlib.ExitStack() as stack:
        client = _client(parsed, stack)
        talk(client, SamplingParams(**sampling), parsed.options.system)
    return 0


def _client(parsed: Parsed[ChatOptions], stack: contextlib.ExitStack) -> Client:
    from actorium.actors.client.client import Client

    runtime = parsed.config.runtime
    if "name" not in parsed.written:
        return stack.enter_context(own_engine(parsed.config)).client
    if not is_running(engine_dir(runtime.name, runtime.run_dir)):
        raise EngineUnavailable(f"no engine named {runtime.name!r} is running", "name")
    client = stack.enter_context(Client(runtime.name, run_dir=runtime.run_dir))
    client.wait_ready(runtime.start_timeout)
    return client


def talk(client: Client, params: SamplingParams, system: str | None = None) -> None:
    """Read turns until the end of input; print each answer as it comes."""
    start = [{"role": "system", "content": system}] if system else []
    history = list(start)
    while (text := _read()) not in (None, "/exit", "/quit"):
        if text == "/new":
            history = list(start)
        if not text or text == "/new":
            continue
        history.append({"role": "user", "content": text})
        try:
            history.append({"role": "assistant", "content": answer(client, history, params)})
        except EngineUnavailable:
            raise
        except ActoriumError as error:
            print(f"error: {error.message}", file=sys.stderr, flush=True)
            history.pop()


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


def answer(client: Client, history: list[dict[str, Any]], params: SamplingParams) -> str:
    """Stream one answer to standard output; Ctrl-C ends it, and what was said is kept."""
    text = ""
    with client.chat(history, params, stream=True) as stream:
        try:
            for delta in stream:
                text += delta.text
                print(delta.text, end="", flush=True)
        except KeyboardInterrupt:
            pass
    print(flush=True)
    return text
