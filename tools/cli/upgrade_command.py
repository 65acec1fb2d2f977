"""`actorium upgrade`: a running engine goes over to another version, or to other flags."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from actorium import __version__
from actorium.actors.config import sources as settings
from actorium.actors.config import tree as configs
from actorium.actors.config.tree import SECRETS, Config
from actorium.actors.config.validation import validate
from actorium.actors.errors import BadConfig, EngineFailed, EngineUnavailable
from actorium.actors.gateway.actor import BACKGROUND, FORGETS
from actorium.actors.launcher.handover import (
    OUTCOME,
    UpgradeOutcome,
    model_stamp,
    why_unreadable,
)
from actorium.actors.launcher.preflight import check_all
from actorium.actors.messages import Upgrade
from actorium.actors.runtime.rundir import address, is_running
from actorium.actors.runtime.security import private_paths as private
from actorium.tools.cli import status
from actorium.tools.cli.command_line import Parsed, parse
from actorium.tools.cli.ps_command import name_first
from actorium.tools.cli.status import announced_wait, running_dir

PROG = "actorium upgrade [NAME]"
ABOUT = """A running engine goes over to this version of actorium, and to the flags that are given
here; the others stay. Its requests go on: streams pause for some seconds. What is checked before
(flags, the model's files, memory, formats of what one version leaves to the other) is refused with
the reason, and nothing has happened. If the actors of this version do not get ready, the old
version goes on. Exit codes: 0 it runs, 1 it has failed and the old version runs, 2 refused."""
MAY_CHANGE = frozenset((
    "max_total_tokens", "memory_fraction", "kv_cache_bytes", "checkpoints", "host_cache",
    "disk_cache", "disk_timeout", "remote_cache", "remote_cache_password_file",
    "eviction_policy", "debug_memory", "audit_every",
    "max_num_seqs", "max_num_batched_tokens", "target_itl", "max_num_queued_reqs", "overlap",
    "schedule_policy", "tenant_weights", "request_timeout", "sleep_after", "sleep_level",
    "background_seqs", "force_preempt_every",
    "fork_server", "ledger_patience", "retain", "silence", "max_restarts", "restart_window",
    "request_budget", "upgrade_fault", "probe_port", "probe_host", "gateways", "access_log",
    "max_connections", "body_timeout", "send_timeout", "responses_max_bytes", "responses_max",
    "files_max_bytes", "files_expire_after",
    "resume_grace", "recovery_patience", "heartbeat", "start_timeout", "drain_timeout",
    "queue_messages", "log_level", "log_format", "log_interval", "recorder_bytes",
    "crash_reports", "trace_dir", "record_prompts"))
"""Settings that a request under way does not notice. Any other may change its answer, or what was
checked when it came."""
MAY_GROW = ("gateways", "max_connections")
"""Of these, those that connections of callers lie in."""
FINDING = ("name", "run_dir")
"""What says which engine is meant."""
LOOK_SECONDS = 0.05
BESIDE_SECONDS = 180.0
"""For all of it but the start of actors: longer than its parts may take
(`launcher/handed_launcher.py`)."""
READY_SECONDS = 30.0
BACKGROUND_SECONDS = 300.0


class UpgradeOptions(Struct, frozen=True, kw_only=True):
    """What to go over to."""

    python: str | None = None
    """Interpreter (or its virtual environment) of the version; default: that of this command."""
    json: bool = False
    """An object, {"version": ..., "pause": seconds, "changed": {flag: value}}, instead of a
    sentence."""


def run(_command: str, argv: list[str]) -> int:
    python, rest = _other_python(argv)
    if python is not None and python != os.path.abspath(sys.executable):
        os.execv(python, [python, "-P", "-m", "actorium.tools.cli", "upgrade", *rest])
    parsed = parse(PROG, name_first(argv), UpgradeOptions, ABOUT, model=False)
    runtime = parsed.config.runtime
    path = running_dir(runtime)
    before = _running_config(path)
    wanted, changed = with_changes(before, parsed)
    check(path, before, wanted, parsed.written)
    _await_background(path)
    order = Upgrade(uuid.uuid4().hex, python or sys.executable, configs.dump(wanted))
    limit = wanted.runtime.start_timeout + before.runtime.start_timeout + BESIDE_SECONDS
    with announced_wait(f"the engine {runtime.name!r} to be upgraded", limit):
        pause = _upgraded(path, order, limit)
    if parsed.options.json:
        print(json.dumps({"version": __version__, "pause": round(pause, 3), "changed": changed}))
    else:
        what = ", ".join(f"{name} {value}" for name, value in changed.items())
        print(f"engine {runtime.name!r} runs actorium {__version__}{what and ' with ' + what}; "
              f"streams paused for {pause:.1f} s")
    return 0


# --- before ---

def _other_python(argv: Sequence[str]) -> tuple[str | None, list[str]]:
    """Returns the interpreter of `--python`, and the other words, which its version understands.
    Raises `BadConfig` if it has no actorium."""
    rest, python = list(argv), None
    for at, word in enumerate(argv):
        if word.startswith("--python="):
            python, rest = word.partition("=")[2], [*argv[:at], *argv[at + 1:]]
        elif word == "--python" and at + 1 < len(argv):
            python, rest = argv[at + 1], [*argv[:at], *argv[at + 2:]]
    if python is None:
        return None, rest
    path = Path(python).expanduser().absolute()
    if path.is_dir():
        path = path / "bin" / "python"
    try:
        tried = subprocess.run([path, "-P", "-m", "actorium.tools.cli", "version"], text=True,
                               capture_output=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        why = error.strerror if isinstance(error, OSError) else "does not answer"
        raise BadConfig(f"--python: {python}: {why}", "python") from None
    if tried.returncode:
        why = (tried.stderr.strip().splitlines() or ["it ends at once"])[-1]
        raise BadConfig(f"--python: {python} runs no actorium: {why}", "python")
    return str(path), rest


def _running_config(path: Path) -> Config:
    try:
        return configs.load(private.read_file(path / "config.json"))
    except (OSError, private.UnsafePath, msgspec.MsgspecError) as error:
        raise BadConfig(f"the running engine's configuration means nothing to actorium "
                        f"{__version__}: {error}") from None


def with_changes(before: Config, parsed: Parsed[Any]) -> tuple[Config, dict[str, Any]]:
    """Returns the configuration with what was given, and that by name. Raises `BadConfig` for what
    must stay."""
    config, changed = before, {}
    known = settings.fields()
    for name, given in parsed.given.items():
        section = getattr(config, known[name].section)
        old = getattr(section, name)
        if name in FINDING or given.value == old:
            continue
        if name not in MAY_CHANGE:
            now = "" if (known[name].section, name) in SECRETS else f" (it is {old!r})"
            raise BadConfig(f"{given.origin}: cannot change while requests run{now}; start another "
                            "engine", known[name].key)
        if name in MAY_GROW and given.value < old:
            raise BadConfig(f"{given.origin}: cannot become less than the {old} that are there, "
                            "which hold connections", known[name].key)
        config = msgspec.structs.replace(config, **{known[name].section: msgspec.structs.replace(
            section, **{name: given.value})})
        changed[name] = given.value
    return validate(config), changed


def check(path: Path, before: Config, wanted: Config, written: dict[str, str]) -> None:
    """Raises `BadConfig` if the engine cannot be upgraded to this."""
    facts = status.about(path)
    if "formats" not in facts:
        raise BadConfig("the running engine is of a version that cannot be upgraded: stop it, and "
                        "start it again with the same --ledger-dir")
    if why := why_unreadable(facts["formats"]):
        raise BadConfig(why)
    if facts.get("files") != model_stamp(wanted.model.model):
        raise BadConfig("model: its files have changed since the engine was started; start another "
                        "engine", "model.model")
    check_all(wanted)
    if before.memory != wanted.memory or before.scheduler != wanted.scheduler:
        _check_memory(before, wanted)


def _check_memory(before: Config, wanted: Config) -> None:
    """What could be served so far must still have room. Of a GPU, only its worker knows."""
    if wanted.device.null_worker or wanted.device.device == "cuda":
        return
    from actorium.tools.cli.plan_command import PlanOptions, make_report

    old, new = (make_report(config, PlanOptions()) for config in (before, wanted))
    if not new.on_cpu:
        return
    least = min(old.plan.token_capacity, new.plan.shape.max_model_len)
    if new.plan.token_capacity < least:
        raise BadConfig(f"memory: {new.plan.token_capacity} tokens would fit, but requests that "
                        f"run may have {least}")


def _await_background(path: Path) -> None:
    """Waits for responses with `background: true`, which end with their gateway. Raises `BadConfig`
    if that takes too long."""
    until = time.monotonic() + BACKGROUND_SECONDS
    what = "responses that run in the background to end"
    with announced_wait(what, BACKGROUND_SECONDS):
        while (number := _gauge(path, BACKGROUND)) and time.monotonic() < until:
            time.sleep(LOOK_SECONDS)
    if _gauge(path, FORGETS):
        print("actorium: responses that /v1/responses has stored in a gateway's memory are "
              "forgotten; --responses-store keeps them", file=sys.stderr)
    if number:
        raise BadConfig(f"{number} responses still run in the background, and would fail; try "
                        "again, or cancel them")


def _gauge(path: Path, name: str) -> int:
    """Returns the sum over all actors."""
    answer = status.ask(path, 1.0)
    return 0 if answer is None else sum(int(each.gauges.get(name, 0)) for each in answer.actors)


# --- the upgrade ---

def _upgraded(path: Path, order: Upgrade, limit: float) -> float:
    """Returns for how long streams paused, in seconds. Raises `EngineFailed`, `BadConfig` and
    `EngineUnavailable`."""
    _send(path, order)
    until = time.monotonic() + limit
    while (outcome := _outcome(path, order)) is None or outcome.state == "under way":
        if not is_running(path):
            raise EngineUnavailable("the engine has ended during the upgrade")
        if time.monotonic() > until:
            raise EngineFailed(f"the upgrade is not done after {limit:g} s")
        time.sleep(LOOK_SECONDS)
    if outcome.state == "refused":
        raise BadConfig(outcome.why)
    if outcome.state == "failed":
        raise EngineFailed(f"the upgrade failed, and actorium {outcome.release} goes on: "
                           f"{outcome.why}")
    while (answer := status.ask(path, 1.0)) is None or not answer.ready:
        if time.monotonic() > outcome.ended_at + READY_SECONDS:
            break
        time.sleep(LOOK_SECONDS)
    return time.monotonic() - outcome.ended_at


def _send(path: Path, order: Upgrade) -> None:
    import zmq

    with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
        socket.setsockopt(zmq.LINGER, 5000)
        socket.connect(address(path, "launcher.inbox"))
        socket.send(msgspec.msgpack.encode(order))


def _outcome(path: Path, order: Upgrade) -> UpgradeOutcome | None:
    try:
        outcome = msgspec.json.decode(private.read_file(path / OUTCOME), type=UpgradeOutcome)
    except (OSError, private.UnsafePath, msgspec.MsgspecError):
        return None
    return outcome if outcome.upgrade == order.id else None
