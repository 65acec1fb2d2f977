"""An engine of the command's own, started from the parsed configuration, and what a terminal shows
meanwhile: bars while it loads, then who took how long and what is served."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from actorium.actors.config.models_settings import ModelsConfig, serves_models
from actorium.actors.config.tree import Config, RuntimeConfig
from actorium.actors.errors import ActoriumError
from actorium.actors.health import READY_PHASES
from actorium.actors.messages import ActorStatus, Status
from actorium.actors.models import model_dir as models
from actorium.actors.models.model_dir import is_jinja, recommended_sampling
from actorium.actors.models.obtain import with_model_path
from actorium.actors.runtime.console import PREFIX, print_notice
from actorium.actors.runtime.rundir import engine_dir
from actorium.actors.runtime.worker_info import WorkerInfo, read_info
from actorium.tools.cli.status import Asker

if TYPE_CHECKING:
    from rich.progress import Progress

    from actorium.actors.launcher.engine import Engine

LOOK_SECONDS = 0.03
_COUNT = re.compile(r"(\d+)\s*/\s*(\d+)")


class StartUp:
    """Collects the way of each actor to readiness; prints it when all are there.

    Goes to stderr: bars on a terminal, one line a change elsewhere.
    """

    def __init__(self, config: Config, quiet: bool = False) -> None:
        self.quiet = quiet
        self.config = config
        self.name = config.runtime.name
        self.model = served_models_text(config.models) or next(
            iter(config.model.served_model_name), config.model.model) or "the demo model"
        self.began = process_start()
        self.ready_at: dict[str, float] = {}
        """Role -> seconds from the start of this process to its readiness."""
        self.spans: dict[str, list[tuple[str, float]]] = {}
        """Role -> (what it was doing, since when), in seconds from the start of this process."""
        self.probes = ""
        """Where the watchdog answers probes, if it does."""
        self.http = ""
        """Where the gateways listen, if there are any."""
        self.resumed = ""
        """What the scheduler goes on with that an engine before has left in the ledger."""
        self._said: dict[str, str] = {}
        self._bars: Progress | None = None
        self._tasks: dict[str, Any] = {}

    def show(self, status: Status) -> None:
        now = time.time() - self.began
        for actor in status.actors:
            doing = _COUNT.sub("", actor.detail).strip() or actor.phase
            if actor.phase in READY_PHASES:
                doing = "ready"
                self.ready_at.setdefault(actor.role, now)
            spans = self.spans.setdefault(actor.role, [])
            if not spans or spans[-1][0] != doing:
                spans.append((doing, now))
            if actor.role == "watchdog":
                self.probes = actor.detail
            if actor.detail.startswith("HTTP at ") and actor.phase in READY_PHASES:
                self.http = actor.detail
            if actor.gauges.get("resumed_sequences"):
                self.resumed = actor.detail
            self._tell(actor)

    def _tell(self, actor: ActorStatus) -> None:
        text = f"{actor.phase}: {actor.detail}" if actor.detail else actor.phase
        if self.quiet or self._said.get(actor.role) == text:
            return
        self._said[actor.role] = text
        if sys.stderr.isatty():
            self._bar(actor, text)
        elif actor.detail and actor.phase not in READY_PHASES:
            print_notice(f"{actor.role} {text}", self.config.runtime)

    def _bar(self, actor: ActorStatus, text: str) -> None:
        """One bar for an actor that counts something (shards, graphs)."""
        count = _COUNT.search(actor.detail)
        if count is None and actor.role not in self._tasks:
            return
        if self._bars is None:
            from rich.console import Console
            from rich.progress import Progress

            self._bars = Progress(console=Console(stderr=True), transient=True)
            self._bars.start()
        if actor.role not in self._tasks:
            self._tasks[actor.role] = self._bars.add_task(actor.role)
        bar = self._tasks[actor.role]
        if count is not None:
            self._bars.update(bar, completed=int(count[1]), total=int(count[2]))
        self._bars.update(bar, description=f"{actor.role} {text}")

    def close(self) -> None:
        if self._bars is not None:
            self._bars.stop()
            self._bars = None

    def report(self, facts: Sequence[str] = ()) -> str:
        """Returns the time each actor took from the start of the command; facts: lines about what
        is served."""
        lines = [f"actorium: engine {self.name!r} serves {self.model}; ready after:"]
        for role, seconds in sorted(self.ready_at.items(), key=lambda item: item[1]):
            phases = ", ".join(f"{doing} {took:.2f}" for doing, took in self.phases(role))
            lines.append(f"  {role:<12} {seconds:6.2f} s" + (f"  ({phases})" if phases else ""))
        lines += [f"  {line}" for line in (*facts, self.probes, self.resumed, self.http) if line]
        return "\n".join(lines)

    def phases(self, role: str) -> list[tuple[str, float]]:
        """(what the actor was doing, seconds) until it was ready, as far as it was seen."""
        spans = self.spans.get(role, [])
        return [(doing, until - since) for (doing, since), (_, until)
                in zip(spans, spans[1:], strict=False) if doing != "ready"]


def served_models_text(settings: ModelsConfig) -> str:
    """Which models a server of several serves; empty = it is one of one model."""
    places = [place for place in (settings.models, settings.models_dir) if place is not None]
    return f"the models of {' and '.join(places)}" if places else ""


def watch(run_dir: Path, show: StartUp, over: threading.Event) -> None:
    """`follow`, then print the report."""
    if follow(run_dir, show, over):
        several = serves_models(show.config.models)
        facts = [] if several else report_lines(show.config, *look_up(run_dir))
        print_notice(show.report(facts).removeprefix(PREFIX), show.config.runtime)


def follow(run_dir: Path, show: StartUp, over: threading.Event) -> bool:
    """Look at a starting engine until it is ready (True), or failed or `over` (False).

    Nothing polls a running engine.
    """
    asker = Asker(run_dir)
    try:
        while not over.wait(LOOK_SECONDS):
            status = asker.ask(0.25)
            if status is None:
                continue
            show.show(status)
            if status.ready or status.error is not None:
                return status.ready
        return False
    finally:
        show.close()
        asker.close()


def process_start() -> float:
    """When this process was started, as `time.time()` (to 10 ms, the kernel's tick)."""
    import os

    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    ticks = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - ticks)


# --- the report -----------------------------------------------------------------------------------

WORKER = "worker-0"
ASK_SECONDS = 5.0
TOLD_SECONDS = 0.05
"""From this many graphs on, the time capture took is reported."""
TEMPLATE_CHARS = 60
NEUTRAL = "temperature 1, nothing cut off"


def report_lines(config: Config, worker: WorkerInfo | None,
                 info: dict[str, Any] | None) -> list[str]:
    """The block, a line a subject. worker: None for an engine without a model. info: what the
    tokenizer says of the model; None = it did not answer."""
    rows = _worker_rows(worker) if worker is not None else []
    if (ranks := config.device.tensor_parallel_size) > 1:
        rows.insert(0, ("ranks", f"{ranks} share each layer, worker-0 to worker-{ranks - 1}; what "
                                 "follows is of each"))
    if info is not None:
        rows += _chat_rows(config, info)
        rows.append(("sampling", sampling_line(config, info)))
    return [f"{name:<12} {text}" for name, text in rows]


def look_up(run_dir: Path) -> tuple[WorkerInfo | None, dict[str, Any] | None]:
    """Collects what is reported of a ready engine."""
    from actorium.actors.client.client import Client

    try:
        with Client(run_dir) as client:
            info = client.server_info(timeout=ASK_SECONDS)
    except ActoriumError:
        info = None
    return read_info(run_dir, WORKER), info


def _worker_rows(w: WorkerInfo) -> list[tuple[str, str]]:
    formats = [f"{name} {_mib(held)}" for name, held in w.weight_formats.items()]
    held = ", ".join(formats) if len(formats) > 1 else w.dtype
    rows = [("weights", f"{_mib(w.weights_bytes)} on {w.device}, {held}")]
    cache = f"{w.kv_tokens:,} tokens ({_mib(w.kv_bytes)}, {w.kv_dtype}), "
    if w.full_length:
        cache += f"{w.full_length:,} full-length requests at once ({w.max_model_len:,} tokens each)"
    else:
        cache += (f"not one of {w.max_model_len:,} tokens, the longest that the model allows: "
                  "--max-model-len, or more memory")
    rows.append(("KV cache", cache))
    if w.state_bytes:
        rows.append(("states", f"{_mib(w.state_bytes)} for {w.max_num_seqs} requests at once and "
                     f"{w.checkpoints} checkpoints for reuse of prefixes"))
    rows.append(("level", f"-O{w.level}: passes {w.passes}"))
    took = f", captured in {w.capture_seconds:.1f} s" if w.capture_seconds >= TOLD_SECONDS else ""
    rows.append(("graphs", f"{w.graphs}{took}" if w.graphs
                 else f"none: {w.no_graphs or 'none were asked for'}"))
    rows.append(("kernels", f"{w.kernels}; attention: {w.attention}"))
    same = "" if w.inexact else ": a token has the same bits in any batch, chunk or recovery"
    rows.append(("exact", f"{w.exact}{same}"))
    if w.drafts:
        rows.append(("drafts", f"up to {w.drafts} a step, by the model's MTP layer"))
    return rows


def _chat_rows(config: Config, info: dict[str, Any]) -> list[tuple[str, str]]:
    from actorium.actors.config.reasoning_formats import NONE
    from actorium.actors.gateway.parsers.parser_factory import ModelTemplates, ParserFactory
    from actorium.actors.plugins.parser_plugins import add_formats

    add_formats(config.runtime.plugins)
    template = info.get("chat_template")
    if template is None:
        why = "" if info.get("has_tokenizer") else " (the engine runs without a tokenizer)"
        return [("chat", f"no template{why}")]
    given, gateway = config.model.chat_template, config.gateway
    if given and not is_jinja(given):
        shown = f"the template in {given}"
    else:
        whose = "the template given" if given else "the model's template"
        text = " ".join(template.split())
        shown = f"{whose}: {text[:TEMPLATE_CHARS]}{'...' * (len(text) > TEMPLATE_CHARS)}"
    templates = ModelTemplates.of(info)
    parsing = ParserFactory(gateway.tool_call_parser, gateway.reasoning_parser, templates)
    tools = parsing.tools
    if templates.generic_tools and tools != NONE:
        tools += ", which the system message asks for: the template has no place for tools"
    elif templates.with_tools != templates.plain:
        tools += "; those of the template tool_use"
    if config.model.default_chat_template_kwargs:
        shown += f"; {_kwargs(config.model.default_chat_template_kwargs, template)}"
    return [("chat", shown), ("parsers", f"tool calls: {tools}; reasoning: {parsing.reasoning}")]


def _kwargs(kwargs: dict[str, Any], template: str) -> str:
    """What the template learns unless a request says otherwise, and what it never asks for."""
    text = ", ".join(f"{name}={value!r}" for name, value in kwargs.items())
    strange = [name for name in kwargs if name not in template]
    return text + (f" (the template does not name {', '.join(strange)})" if strange else "")


def sampling_line(config: Config, info: dict[str, Any]) -> str:
    """The defaults of requests, where they come from, and how to choose others. info: what the
    tokenizer says of the model."""
    m, defaults = config.model, info.get("generation_defaults", {})
    limit = info.get("limits", {}).get("max_new_tokens")  # that no request may exceed
    path = info.get("model_path")
    known = recommended_sampling(Path(path)) if path and m.generation_config == "auto" else None
    text = ", ".join(f"{name} {value}" for name, value in defaults.items()
                     if limit is None or name != "max_tokens") or NEUTRAL
    if limit is not None:
        text += f", at most {limit} new tokens"
    source = {"auto": "the model's generation_config.json", "vllm": "--generation-config vllm"}
    where = source.get(m.generation_config, m.generation_config)
    if known is not None:
        where = f"its maker's for {known[0]}, whose files name none"
    if m.override_generation_config:
        where += " and --override-generation-config"
    elif m.generation_config == "auto" and not defaults:
        where = "the model has no others"
    hints = ["--generation-config vllm"] * (m.generation_config == "auto" and bool(defaults))
    hints += ["--override-generation-config JSON"] * (not m.override_generation_config)
    return f"{text} ({where})" + (f"; others: {', '.join(hints)}" if hints else "")


def _mib(count: int) -> str:
    if count >= 10 << 30:
        return f"{count / 2**30:,.1f} GiB"
    return f"{count / 2**20:,.0f} MiB" if count >= 10 << 20 else f"{count / 2**20:.1f} MiB"


def settings_of(config: Config) -> dict[str, Any]:
    """The whole tree as keyword arguments of `Engine`, under a name of its own if none is given."""
    values: dict[str, Any] = {}
    for section in msgspec.structs.asdict(config).values():
        values |= msgspec.structs.asdict(section)
    if config.runtime.name == RuntimeConfig().name:
        values["name"] = f"batch-{os.getpid()}-{secrets.token_hex(3)}"
    return values


def for_batches(config: Config) -> Config:
    """The configuration of an engine whose streams nobody reads while they come: without a bound on
    the gap between tokens, and without a fork server, unless they are asked for."""
    scheduler, recovery = config.scheduler, config.recovery
    if scheduler.target_itl is None:
        scheduler = msgspec.structs.replace(scheduler, target_itl=0.0)
    if recovery.fork_server == "auto":
        recovery = msgspec.structs.replace(recovery, fork_server="off")
    return msgspec.structs.replace(config, scheduler=scheduler, recovery=recovery)


@contextlib.contextmanager
def own_engine(config: Config, start_up: StartUp | None = None, watched: bool = True
               ) -> Iterator[Engine]:
    """Start an engine, wait until it is ready, stop it at the end.

    On a terminal, or with `start_up`, its way to readiness is shown, unless it is not to be
    watched. Raises what `Engine` does.
    """
    from actorium.actors.launcher.engine import Engine

    config = with_model_path(config)
    models.resolve(config.model.model)
    values = settings_of(config)
    with _watched(config, values["name"], start_up) if watched else contextlib.nullcontext():
        engine = Engine(values.pop("model"), **values)
    if start_up is not None and engine.status is not None:
        start_up.show(engine.status)
    try:
        yield engine
    finally:
        engine.close()


@contextlib.contextmanager
def _watched(config: Config, name: str, start_up: StartUp | None) -> Iterator[None]:
    """Look at the starting engine meanwhile, if there is anyone to show it to."""
    if start_up is None and not sys.stderr.isatty():
        yield
        return

    over = threading.Event()
    show = start_up or StartUp(config)
    run_dir = engine_dir(name, config.runtime.run_dir)
    thread = threading.Thread(target=follow, args=(run_dir, show, over), daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
