"""What structured output costs: an engine with and without, by turns.

    python benchmarks/structured.py --batch 32 --output benchmarks/results/structured.json

Every request of a round emits the same number of tokens: with a grammar, of a JSON value that
cannot end sooner; without, past the end of sequence. A ratio is the median of those of rounds next
to each other. Beside the time by the clock stands the processor time of each actor, which other
work on the machine changes less.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from actorium import Engine, SamplingParams
from actorium.actors.client.client import Client, Request
from actorium.actors.params import Structured

SCHEMA = {"type": "array", "minItems": 1000, "items": {
    "type": "object", "properties": {
        "name": {"type": "string", "maxLength": 40}, "size": {"type": "integer"},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3}},
    "required": ["name", "size", "tags"], "additionalProperties": False}}
SETTINGS: dict[str, dict[str, Any]] = {
    "overlap": {"speculative": "off"}, "no overlap": {"speculative": "off", "overlap": False},
    "mtp:2": {"speculative": "mtp:2,fixed"}}


def requests(batch: int, tokens: int, first: int, wanted: Structured | None) -> list[Request]:
    """Of one round."""
    return [Request(prompt=f"Item {seed}:", params=SamplingParams(
        temperature=1.0, seed=seed, max_tokens=tokens, structured=wanted,
        ignore_eos=wanted is None))
        for seed in range(first, first + batch)]


def seconds(client: Client, work: list[Request], tokens: int) -> tuple[float, float]:
    """Of a round, from the first request sent to the last one ended; and the share of its tokens
    that were accepted drafts, which cost no step of their own."""
    start, accepted = time.perf_counter(), 0
    for _, found in client.run(work):
        assert not isinstance(found, Exception), found
        assert len(found[0].token_ids) == tokens, found[0].finish_reason
        accepted += found[0].usage.accepted_tokens
    return time.perf_counter() - start, accepted / tokens / len(work)


class Processor:
    """Processor time of an engine's actors."""

    def __init__(self, client: Client) -> None:
        self._pids = {one.role: one.pid for one in client.status().actors
                      if one.role in ("scheduler", "worker-0", "detokenizer", "tokenizer")}
        self._last = self._now()

    def _now(self) -> dict[str, float]:
        """Seconds, of all threads."""
        return {role: sum(int((task / "schedstat").read_text().split()[0])
                          for task in Path(f"/proc/{pid}/task").iterdir()) / 1e9
                for role, pid in self._pids.items()}

    def spent(self) -> dict[str, float]:
        """Seconds of each actor since the last call."""
        before, self._last = self._last, self._now()
        return {role: now - before[role] for role, now in self._last.items()}


def measure(model: str, batch: int, tokens: int, rounds: int,
            settings: dict[str, Any]) -> dict[str, Any]:
    """Both sides by turns, after a round of each to get warm."""
    wanted = Structured(json_schema=json.dumps(SCHEMA))
    base = tempfile.mkdtemp(dir="/tmp", prefix="act")
    took: dict[str, list[float]] = {"plain": [], "structured": []}
    drafts: dict[str, list[float]] = {"plain": [], "structured": []}
    cpu: dict[str, list[dict[str, float]]] = {"plain": [], "structured": []}
    try:
        with Engine(model, run_dir=base, max_num_seqs=batch, **settings) as engine:
            processor = Processor(engine.client)
            for turn in range(rounds + 1):
                for name, grammar in (("plain", None), ("structured", wanted)):
                    work = requests(batch, tokens, turn * batch, grammar)
                    processor.spent()
                    spent, accepted = seconds(engine.client, work, tokens)
                    took[name].append(spent)
                    drafts[name].append(accepted)
                    cpu[name].append(processor.spent())
    finally:
        shutil.rmtree(base, ignore_errors=True)
    plain, structured = took["plain"][1:], took["structured"][1:]
    each = 1e6 / batch / tokens
    actors = {name: {role: round(median(one[role] for one in found[1:]) * each, 2)
                    for role in found[0]} for name, found in cpu.items()}
    sums = [median(sum(one.values()) for one in cpu[name][1:]) for name in cpu]
    return {"accepted_drafts": {name: round(median(each[1:]), 3) for name, each in drafts.items()},
            "cpu_us_per_token": actors, "cpu_ratio": round(sums[1] / sums[0], 3),
            "plain_us_per_token": [round(s * 1e6 / batch / tokens, 2) for s in plain],
            "structured_us_per_token": [round(s * 1e6 / batch / tokens, 2) for s in structured],
            "ratio": round(median(b / a for a, b in zip(plain, structured, strict=True)), 3),
            "more_us_per_token": round(median(
                (b - a) * 1e6 / batch / tokens
                for a, b in zip(plain, structured, strict=True)), 2)}


def masks(tokenizer: Path, size: int, eos: int, batch: int, steps: int = 64) -> dict[str, float]:
    """Microseconds a row in the scheduler alone: taking a token, and the next mask."""
    import numpy as np

    from actorium.actors.structured.grammar import GrammarVocabulary, json_grammar

    start = time.perf_counter()
    vocabulary = GrammarVocabulary(tokenizer, size, [eos])
    loaded = time.perf_counter()
    grammar = json_grammar(json.dumps(SCHEMA))
    matchers = [vocabulary.matcher(grammar) for _ in range(batch)]
    compiled, draw, took = time.perf_counter(), np.random.default_rng(0), []
    for _ in range(steps):
        begun = time.perf_counter()
        found = vocabulary.masks([(matcher, ()) for matcher in matchers])
        masked = time.perf_counter()
        tokens = [int(draw.choice(np.flatnonzero(np.unpackbits(
            rows[0].view(np.uint8), bitorder="little")))) for rows in found]
        drawn = time.perf_counter()
        for matcher, token in zip(matchers, tokens, strict=True):
            assert matcher.accept([token]), matcher.error
        took.append(time.perf_counter() - drawn + masked - begun)
    return {"vocabulary": size, "load_ms": round(1e3 * (loaded - start), 1),
            "compile_ms": round(1e3 * (compiled - loaded), 1),
            "row_us": round(1e6 * median(took) / batch, 2),
            "worst_row_us": round(1e6 * max(took) / batch, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", default="", help="default: the demo model")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64, help="of each request")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--settings", default=",".join(SETTINGS), help="which of them")
    parser.add_argument("--output", type=Path, help="JSON")
    args = parser.parse_args()
    out: dict[str, Any] = {"model": args.model or "demo", "batch": args.batch,
                           "tokens": args.tokens, "rounds": args.rounds}
    demo = Path(__file__).parents[1] / "tools" / "demo" / "demo_model" / "tokenizer.json"
    out["masks"] = masks(demo, 1920, 2, args.batch)
    print(json.dumps(out["masks"]), flush=True)
    for name in args.settings.split(","):
        out[name] = measure(args.model, args.batch, args.tokens, args.rounds, SETTINGS[name])
        print(f"{name}: {json.dumps(out[name])}", flush=True)
    if args.output:
        args.output.write_text(json.dumps(out, indent=1) + "\n")


if __name__ == "__main__":
    main()
