"""Attention backends and dtypes of the KV cache on a model that someone trained: how far what they
say is apart, and whether they still answer and find as much.

    python benchmarks/attention_backends.py pairs MODEL --json benchmarks/results/FILE
    python benchmarks/attention_backends.py scores "" --json FILE      # the demo model, 700 items
    python benchmarks/attention_backends.py scores MODEL --json FILE   # its 400 questions
    python benchmarks/attention_backends.py windows GGUF --json FILE
    python benchmarks/attention_backends.py needle MODEL --lengths 512,2048 --json FILE --png FILE

pairs: `actorium compare` between all of them. Each is an engine that answers the ten prompts by
itself, reads them with the first one's answers, and what any two said is held against one another.
scores: `actorium eval demo`, `actorium eval questions`. windows: the same questions, where the
options are read by decodes of one token, or of a token and two drafts that are right, which a model
without a layer that drafts never has in the engine. needle: `actorium eval needle`.

Each case is written to the file as it is done, and is not run again while it is there.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

os.environ.setdefault("GOMP_SPINCOUNT", "200")  # as in the worker; read when torch is loaded

import torch
from tokenizers import Tokenizer

from actorium.actors.config.tree import Config, ModelConfig
from actorium.actors.models.model_dir import resolve
from actorium.actors.tokenizer.tokenizer_json import load_tokenizer
from actorium.gpu.attention.backend_choice import StepAttention, make_backend
from actorium.gpu.attention.capabilities import needs_of
from actorium.gpu.models.registry import Model, load_model
from actorium.gpu.step.batch import ExtendRow, ForwardBatch
from actorium.gpu.step.pools import make_pools
from actorium.gpu.weights.dtypes import TORCH_DTYPES
from actorium.tools.cli.command_line import parse
from actorium.tools.cli.compare_command import CompareOptions, heard_from, served_side
from actorium.tools.cli.eval_choices import OWN_QUESTIONS
from actorium.tools.compare.comparison import PARTS, Bars, Heard, compared
from actorium.tools.compare.default_prompts import PROMPTS
from actorium.tools.evaluation.choice_run import ChoiceMethod, QuestionAsker
from actorium.tools.evaluation.choice_scores import ChoiceResult, result_object
from actorium.tools.evaluation.multiple_choice import read_lines
from actorium.tools.evaluation.rated_model import RatedModel, Rating

CPU = torch.device("cpu")
PAGE = 16
BACKENDS = {
    "torch": "--attention-backend torch",
    "native": "--attention-backend native",
    "sage prompts": "--prefill-attention-backend sage --decode-attention-backend native",
    "sage": "--attention-backend sage"}
DTYPES = {"bf16": "", "int8": " --kv-cache-dtype int8", "fp8": " --kv-cache-dtype fp8_e4m3"}
CASES = {f"{name}, {dtype}": flags + DTYPES[dtype]
         for dtype in DTYPES for name, flags in BACKENDS.items()
         if not (dtype == "fp8" and name.startswith("sage"))}
"""All that run on a CPU: `sage` reads no pages in FP8."""
BARS = {
    "backend": Bars(max_kl=0.01, min_agreement=0.95),
    "dtype": Bars(max_kl=0.03, min_agreement=0.9)}
"""For two backends over pages of one dtype, and where the dtypes of the pages differ, too."""
DRAFTS = {"two drafts": "mtp:2,fixed", "no drafts": "off"}
ANSWERED = (
    ("native, bf16", "two drafts"), ("sage, int8", "two drafts"), ("sage, int8", "no drafts"),
    ("sage prompts, int8", "two drafts"), ("native, int8", "two drafts"),
    ("native, bf16", "no drafts"), ("sage, bf16", "two drafts"))
"""Of the demo model's tasks."""
READ = ("native, bf16", "native, int8", "sage prompts, int8", "sage prompts, bf16", "native, fp8")
"""Of questions, which are prompts alone."""
FOUND = ("native, bf16", "sage, int8", "native, int8", "native, fp8", "sage, bf16")
"""Of needles."""
WINDOWED = (("native", "bfloat16", 3), ("sage", "int8", 1), ("sage", "int8", 3),
            ("native", "int8", 3))
"""Backend of prompts and decodes, pages, rows of a decode."""


class Cases:
    """The file of results."""

    def __init__(self, path: Path, **setting: Any) -> None:
        self.path = path
        self.told: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {
            **setting, "processor": _processor(), "cases": {}}

    def run(self, name: str, make: Callable[[], Any]) -> Any:
        """What the case gave, now or before."""
        if name not in self.told["cases"]:
            self.told["cases"][name] = make()
            self.save()
        return self.told["cases"][name]

    def save(self) -> None:
        self.path.write_text(json.dumps(self.told, indent=1) + "\n")


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(": ")[1] for line in lines if line.startswith("model name")), "?")


# --- all pairs -----------------------------------------------------------------------------------

def pairs(model: str, out: Path, names: Sequence[str]) -> None:
    """Each of these cases against every other."""
    heard: dict[str, list[Heard]] = {}
    for name in names:
        flags = CASES[name]
        parsed = parse("pairs", [*([model] if model else []), *flags.split(), "--device", "cpu"],
                       CompareOptions)
        texts = [own.text for own in next(iter(heard.values()))] if heard else None
        with served_side(flags, parsed) as url:
            heard[name] = asyncio.run(heard_from(url, parsed, PROMPTS, texts))
        print(f"{name}: heard", flush=True)
    rows = []
    for i, a in enumerate(names):
        for b in names[i + 1:]:
            rows.append({"a": a, "b": b, **pair_row(heard[a], heard[b], bars_of(a, b))})
    out.write_text(json.dumps({
        "model": Path(model).name or "demo", "prompts": len(PROMPTS), "processor": _processor(),
        "bars": {name: bars._asdict() for name, bars in BARS.items()}, "pairs": rows},
        indent=1) + "\n")
    bad = [row for row in rows if row["faults"]]
    print(f"{len(rows)} pairs, {len(bad)} beyond their bars")
    for row in bad:
        print(row["a"], "|", row["b"], "|", "; ".join(row["faults"]))


def bars_of(a: str, b: str) -> Bars:
    return BARS["backend" if a.split(", ")[1] == b.split(", ")[1] else "dtype"]


def pair_row(a: Sequence[Heard], b: Sequence[Heard], bars: Bars) -> dict[str, Any]:
    """Figures of two that heard the same."""
    result = compared(a, b, bars)
    keep = ("positions", "mean_kl", "largest_kl", "largest_difference", "agreement")
    return {"equal_answers": result["equal_answers"], "faults": result["faults"],
            **{part: {key: _short(result["parts"][part][key]) for key in keep} for part in PARTS}}


def _short(value: float | None) -> float | None:
    return value if value is None or isinstance(value, int) else float(f"{value:.4g}")


# --- scores and needles ---------------------------------------------------------------------------

def evaluated(words: Sequence[str], on_stdout: bool = False) -> dict[str, Any]:
    """`actorium eval ...` as a process of its own: its report."""
    code = "import sys; from actorium.tools.cli import main; sys.exit(main(sys.argv[1:]))"
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        done = subprocess.run(
            [sys.executable, "-c", code, "eval", *words,
             *(["--json"] if on_stdout else ["--json", str(report)])],
            check=True, stdout=subprocess.PIPE, text=True)
        found: dict[str, Any] = json.loads(
            done.stdout.splitlines()[-1] if on_stdout else report.read_text())
    return found


def scores(model: str, out: Path, count: int | None) -> None:
    """Of the demo model's tasks, with drafts and without, or of the questions."""
    cases = Cases(out, model=Path(model).name or "demo")
    asked: dict[str, list[str]] = {}
    for name in READ if model else ():
        asked[name] = ["questions", model, *CASES[name].split(),
                       *([] if count is None else ["--count", str(count)])]
    for name, drafts in () if model else ANSWERED:
        asked[f"{name}, {drafts}"] = ["demo", *CASES[name].split(), "--speculative", DRAFTS[drafts],
                                      "--count", str(count or 100)]
    for name, argv in asked.items():
        own = cases.run(name, functools.partial(score_of, argv))
        print(f"{name}: {own['score']:.4f}", flush=True)


def score_of(argv: Sequence[str]) -> dict[str, Any]:
    """Of `actorium eval demo` or `questions`."""
    return score_row(evaluated([*argv, "--device", "cpu"], argv[0] == "demo"))


def score_row(result: dict[str, Any]) -> dict[str, Any]:
    """Of either evaluation."""
    score = float(result["score"] if "score" in result else result["share"])
    count = int(result["count"])
    return {"score": score, "count": count,
            "standard_error": round(math.sqrt(score * (1 - score) / count), 5),
            "seconds": round(result["seconds"], 1)}


def needle(model: str, out: Path, lengths: str, trials: int, picture: Path | None) -> None:
    """The grid of each case."""
    cases = Cases(out, model=Path(model).name or "demo", trials=trials)
    for name in FOUND:
        words = ["needle", *([model] if model else []), *CASES[name].split(), "--device", "cpu",
                 "--trials", str(trials), "--parallel", "4", "--lengths", *lengths.split(",")]
        own = cases.run(name, functools.partial(needle_of, words))
        print(f"{name}: {own['right']} of {own['count']}", flush=True)
    if picture:
        draw(cases.told, picture)


def needle_of(words: Sequence[str]) -> dict[str, Any]:
    """The grid of one case."""
    result = evaluated(words)
    keep = ("score", "right", "count", "errors", "seconds", "style")
    return {**{key: result[key] for key in keep}, "cells": [
        {key: one[key] for key in ("length", "depth", "tokens", "right", "count")}
        for one in result["cells"]]}


def draw(told: dict[str, Any], to: Path) -> None:
    """A grid of depths and lengths for each case."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(told["cases"]), sharey=True, layout="constrained",
                                   figsize=(2.6 * len(told["cases"]) + 0.6, 3), squeeze=False)
    for axis, (name, own) in zip(axes[0], told["cases"].items(), strict=True):
        lengths = sorted({one["length"] for one in own["cells"]})
        depths = sorted({one["depth"] for one in own["cells"]})
        share = {(one["depth"], one["length"]): one["right"] / one["count"]
                 for one in own["cells"]}
        axis.imshow([[share[depth, length] for length in lengths] for depth in depths],
                    vmin=0, vmax=1, cmap="RdYlGn", aspect="auto")
        for y, depth in enumerate(depths):
            for x, length in enumerate(lengths):
                axis.text(x, y, f"{100 * share[depth, length]:.0f}", ha="center", va="center",
                          fontsize=8)
        axis.set_title(f"{name}: {own['right']} of {own['count']}", fontsize=9)
        axis.set_xticks(range(len(lengths)), map(str, lengths), fontsize=8)
        axis.set_yticks(range(len(depths)), [f"{100 * depth:.0f} %" for depth in depths],
                        fontsize=8)
        axis.set_xlabel("tokens of the prompt", fontsize=8)
    axes[0][0].set_ylabel("depth", fontsize=8)
    figure.suptitle(f"needles found by {told['model']}, %", fontsize=10)
    figure.savefig(to, dpi=110)


# --- questions, read by decodes -------------------------------------------------------------------

class WindowReader:
    """A `RatedModel` that reads a question as a prompt, and its options by decodes: of `rows`
    tokens at a time, the last one and drafts that are right."""

    def __init__(self, model: Model, tokenizer: Tokenizer, cache: torch.dtype, rows: int) -> None:
        self.name, self.model, self.tokenizer, self.rows = "windows", model, tokenizer, rows
        self.cache = cache
        self.most = 16
        """Pages of a sequence."""
        self.pools = make_pools(model.shape, [4 * self.most + 1] * len(model.shape.groups), PAGE,
                                cache, CPU)

    @torch.inference_mode()
    async def ratings(self, prompt: str, continuations: Sequence[str]) -> list[Rating]:
        """At most four continuations."""
        before = self.tokenizer.encode(prompt).ids
        wholes = [self.tokenizer.encode(prompt + text).ids for text in continuations]
        assert len(wholes) <= 4 and all(ids[:len(before)] == before for ids in wholes)
        if len(before) > 1:
            self._step([(0, 0, before[:-1])], extend=True)
        for pool in self.pools:
            for own in pool.tensors:
                sequences = own[PAGE:].view(4, self.most * PAGE, *own.shape[1:])
                sequences[1:] = sequences[:1]
        told = [0.0] * len(wholes)
        rests = [ids[len(before) - 1:] for ids in wholes]
        for at in range(0, max(map(len, rests)) - 1, self.rows):
            # Behind the end of an option: any tokens, which nobody asks about.
            rows = [(i, len(before) - 1 + at, (rest[at:at + self.rows] + [0] * self.rows
                                               )[:self.rows]) for i, rest in enumerate(rests)]
            found = self._step(rows, extend=False).view(len(rests), self.rows, -1)
            for i, rest in enumerate(rests):
                wanted = rest[at + 1:at + 1 + self.rows]
                told[i] += sum(float(found[i, j, token]) for j, token in enumerate(wanted))
        return [Rating(total, len(rest) - 1, len(text))
                for total, rest, text in zip(told, rests, continuations, strict=True)]

    def _step(self, rows: list[tuple[int, int, list[int]]], extend: bool) -> torch.Tensor:
        """(sequence, tokens before, tokens) -> log-probabilities of all rows, f32[T, vocabulary]"""
        places = torch.cat([torch.arange(start, start + len(ids)) for _, start, ids in rows])
        tables = torch.arange(1, 4 * self.most + 1, dtype=torch.int32).view(4, self.most)
        index = torch.cat([
            tables[i].long()[place // PAGE] * PAGE + place % PAGE
            for i, start, ids in rows for place in [torch.arange(start, start + len(ids))]])
        chunks = [ExtendRow(i + 1, start, len(ids), tables[i]) for i, start, ids in rows]
        lens = torch.tensor([start + len(ids) for _, start, ids in rows], dtype=torch.int32)
        batch = ForwardBatch(
            tokens=torch.tensor([token for _, _, ids in rows for token in ids]), positions=places,
            kv_index=index, extends=chunks if extend else [],
            extend_tokens=len(places) if extend else 0, decode_rows=0 if extend else len(rows),
            decode_pages=None if extend else tables[:len(rows)],
            decode_kv_lens=None if extend else lens, max_kv_len=int(lens.max()),
            logit_rows=torch.arange(1 if extend else len(places)),
            decode_q_len=1 if extend else self.rows)
        hidden = self.model.forward([batch] * len(self.pools), self.pools)
        return self.model.logits(hidden).float().log_softmax(-1)


def windows(path: str, out: Path, count: int | None) -> None:
    """The questions by each backend, dtype and width of a window."""
    cases, asker = Cases(out, model=Path(path).name), QuestionAsker(method=ChoiceMethod.CLOZE)
    tokenizer = load_tokenizer(resolve(path))
    questions = read_lines(OWN_QUESTIONS)[:count]
    model = load_model(resolve(path), Config(model=ModelConfig(model=path)), CPU, lambda *_: None)
    assert isinstance(model, Model)
    for name, dtype, rows in WINDOWED:
        own = make_backend(name, needs_of(model.shape, "cpu", dtype, PAGE, rows - 1))
        model.attention = StepAttention(own, own)
        reader = WindowReader(model, tokenizer, TORCH_DTYPES[dtype], rows)

        async def ask(reader: WindowReader = reader) -> list[ChoiceResult]:
            return [await asker.ask(cast(RatedModel, reader), one) for one in questions]

        def score(ask: Callable[[], Any] = ask) -> dict[str, Any]:
            begin = time.perf_counter()
            found: list[ChoiceResult] = asyncio.run(ask())
            return score_row(result_object(found, {}, time.perf_counter() - begin))

        case = f"{name}, {dtype}, {'one token' if rows == 1 else 'two drafts'}"
        print(f"{case}: {cases.run(case, score)['score']:.4f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("part", choices=["pairs", "scores", "windows", "needle"])
    parser.add_argument("model", help='"": the demo model')
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--png", type=Path)
    parser.add_argument("--cases", help="of pairs, with \"; \" between them; default: all")
    parser.add_argument("--count", type=int)
    parser.add_argument("--lengths", default="512,1024,2048")
    parser.add_argument("--trials", type=int, default=3)
    given = parser.parse_args()
    if given.part == "pairs":
        pairs(given.model, given.json, given.cases.split("; ") if given.cases else list(CASES))
    elif given.part == "scores":
        scores(given.model, given.json, given.count)
    elif given.part == "windows":
        windows(given.model, given.json, given.count)
    else:
        needle(given.model, given.json, given.lengths, given.trials, given.png)


if __name__ == "__main__":
    main()
