"""What all scenarios do alike: their options, turns, medians and ratios, what machine it was, and
where figures go.

A scenario is a function of a file in `scenarios/`, marked with `@scenario`. What it takes are the
options of its command line, by name, annotation and default; what it yields are rows of figures,
each printed as soon as it is there and kept for `--json`. `run.py` finds and runs it.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import os
import statistics
import time
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from actorium import __version__

Row = dict[str, Any]
"""Figures, by name."""
Rows = Iterator[Row]
T = TypeVar("T")
SCENARIOS = Path(__file__).parent / "scenarios"
SHM = "/dev/shm" if Path("/dev/shm").is_dir() else None
"""A folder in memory, for what must not wait for a disk."""


def scenario(run: Callable[..., Rows]) -> Callable[..., Rows]:
    """Marks a function that `run.py` can run."""
    return run


class Part(NamedTuple):
    """A scenario, as its file says without being run."""

    name: str
    about: str
    """The first line of its docstring."""
    flags: tuple[str, ...]


def parts_of(path: Path) -> tuple[str, list[Part]]:
    """Returns (the first line of a file's docstring, its scenarios)."""
    tree = ast.parse(path.read_text())
    found = []
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and any(
                isinstance(mark, ast.Name) and mark.id == "scenario"
                for mark in node.decorator_list):
            own = node.args
            flags = own.args[len(own.args) - len(own.defaults):] + own.kwonlyargs
            found.append(Part(node.name, _first_line(ast.get_docstring(node)),
                              tuple(_flag(flag.arg) for flag in flags)))
    return _first_line(ast.get_docstring(tree)), found


def all_scenarios() -> dict[str, tuple[str, list[Part]]]:
    """Returns every file of `scenarios/` that has some, by its name."""
    found = {path.stem: parts_of(path) for path in sorted(SCENARIOS.glob("*.py"))}
    return {name: own for name, own in found.items() if own[1]}


def _first_line(text: str | None) -> str:
    return (text or "").split("\n\n")[0].replace("\n", " ")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


# --- options --------------------------------------------------------------------------------------

def parser_of(run: Callable[..., Rows], prog: str) -> argparse.ArgumentParser:
    """Returns the command line of a scenario: arguments without a default are positional, lists
    take several words."""
    parser = argparse.ArgumentParser(prog, description=inspect.getdoc(run),
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    hints = typing.get_type_hints(run)
    for name, own in inspect.signature(run).parameters.items():
        if own.kind is own.VAR_POSITIONAL:
            continue  # what follows, for another command
        kinds = [kind for kind in (typing.get_args(hints[name]) or (hints[name],))
                 if kind is not type(None)]
        how: dict[str, Any] = {"type": kinds[0]}
        if typing.get_origin(hints[name]) is list:
            how["nargs"] = "+"
        if own.default is own.empty:
            parser.add_argument(name, **how)
            continue
        if hints[name] is bool:
            how = {"action": argparse.BooleanOptionalAction}
        parser.add_argument(_flag(name), default=own.default, **how,
                            help="default: %(default)s" if own.default not in (None, "") else None)
    if "json" not in hints:
        parser.add_argument("--json", type=Path, help="write the figures there, too")
    return parser


def run_scenario(run: Callable[..., Rows], prog: str, argv: Sequence[str]) -> None:
    """Runs a scenario with these words, prints its rows, and writes them anew after each. Raises
    `SystemExit` where the words are wrong, or what it measures is not as it must be."""
    parser = parser_of(run, prog)
    kinds = [own.kind for own in inspect.signature(run).parameters.values()]
    passed_on = inspect.Parameter.VAR_POSITIONAL in kinds
    given, more = parser.parse_known_args(argv)
    if more and not passed_on:
        parser.error(f"unrecognized arguments: {' '.join(more)}")
    options = vars(given)
    own_file = "json" in inspect.signature(run).parameters
    target: Path | None = None if own_file else options.pop("json")
    positional = [options.pop(name) for name, own in inspect.signature(run).parameters.items()
                  if passed_on and own.kind is own.POSITIONAL_OR_KEYWORD]
    result: dict[str, Any] = {"scenario": prog, "options": shown_words(argv), "machine": machine(),
                              "rows": []}
    for row in run(*positional, *more, **options):
        print(as_text(row), flush=True)
        result["rows"].append(row)
        result["machine"]["load"][1] = load()
        if target is not None:
            write_json(target, result)


def shown_words(argv: Sequence[str]) -> list[str]:
    """Returns the words of a command line; of absolute paths their last part, since figures are
    published, and folders of the machine are not."""
    return [Path(word).name if word.startswith("/") else word for word in argv]


# --- output ---------------------------------------------------------------------------------------

def as_text(row: Mapping[str, Any]) -> str:
    """Returns a row as text: words as they are, what has a name behind it."""
    return "  ".join(short(value) if isinstance(value, str) else f"{name} {short(value)}"
                     for name, value in row.items())


def short(value: Any) -> str:
    """Returns a figure with four digits, groups in brackets."""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    if isinstance(value, Mapping):
        return "(" + ", ".join(f"{key} {short(own)}" for key, own in value.items()) + ")"
    if isinstance(value, (list, tuple)):
        return "(" + ", ".join(map(short, value)) + ")"
    return str(value)


def write_json(path: Path, found: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1, default=str) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(path.read_text())
    return result


def markdown(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Returns a table for a document."""
    return "\n".join("| " + " | ".join(map(str, row)) + " |"
                     for row in (heads, ["---"] * len(heads), *rows))


# --- the machine ----------------------------------------------------------------------------------

def processor() -> str:
    """Returns its name as the system has it, and what it has of what our kernels use."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    facts = {key.strip(): value.strip() for key, _, value in (line.partition(":")
                                                             for line in lines)}
    flags = set(facts.get("flags", "").split())
    has = [flag for flag in ("avx2", "avx_vnni", "avx512_vnni", "avx512_bf16", "amx_bf16",
                             "amx_int8") if flag in flags]
    return " ".join([facts.get("model name", "?"), *has])


def load() -> float:
    """Returns how many processes wanted a processor in the last minute."""
    return round(os.getloadavg()[0], 1)


def machine() -> dict[str, Any]:
    """Returns what figures hang on: the load is (at the start, at the last row)."""
    return {"at": time.strftime("%Y-%m-%d"), "actorium": __version__, "processor": processor(),
            "cores": len(os.sched_getaffinity(0)), "load": [load(), load()]}


def cpu_seconds(pid: int) -> float:
    """Returns the processor time of all threads of a process: to the nanosecond where the kernel
    keeps schedstat, else in clock ticks."""
    tasks = list(Path(f"/proc/{pid}/task").iterdir())
    try:
        return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9
    except (OSError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Processors:
    """Processor time of some processes, from one question to the next."""

    def __init__(self, pids: Mapping[str, int]) -> None:
        self._pids = pids
        self._last = self._now()

    def _now(self) -> dict[str, float]:
        return {name: cpu_seconds(pid) for name, pid in self._pids.items()}

    def spent(self) -> dict[str, float]:
        """Returns the seconds of each since the last call."""
        before, self._last = self._last, self._now()
        return {name: now - before[name] for name, now in self._last.items()}


# --- turns ----------------------------------------------------------------------------------------

def take_turns(contenders: Mapping[str, Callable[[], T]], rounds: int,
               seconds: float = 0.0) -> dict[str, list[T]]:
    """Returns what each contender gave in each round. They go one after the other, since machines
    change their speed, and another one goes first each time. So many rounds at least, and more
    until so many seconds have passed."""
    result: dict[str, list[T]] = {name: [] for name in contenders}
    names, end, turn = list(contenders), time.perf_counter() + seconds, 0
    while turn < rounds or time.perf_counter() < end:
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            result[name].append(contenders[name]())
        turn += 1
    return result


def timed(call: Callable[[], Any], clock: Callable[[], float] = time.perf_counter) -> float:
    """Returns the seconds of a call."""
    began = clock()
    call()
    return clock() - began


def ratios(base: Sequence[float], other: Sequence[float]) -> list[float]:
    """Returns how many times as much the other took, in runs next to each other."""
    return [b / a for a, b in zip(base, other, strict=True)] + [
        b / a for a, b in zip(base[1:], other, strict=False)]


def middle(values: Sequence[float]) -> dict[str, float]:
    """Returns the median, and the middle half of the values."""
    if len(values) < 2:
        return dict.fromkeys(("median", "low", "high"), values[0])
    low, median, high = statistics.quantiles(values, n=4)
    return {"median": median, "low": low, "high": high}


def p99(values: Sequence[float]) -> float:
    """Returns the value that one of a hundred exceeds."""
    return sorted(values)[min(len(values) - 1, int(0.99 * len(values)))]
