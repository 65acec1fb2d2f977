"""What structured output costs: an engine with and without, by turns.

Every request of a round emits the same number of tokens: with a grammar, of a JSON value that
cannot end sooner; without, past the end of sequence. A ratio is the median of those of rounds next
to each other. Beside the time by the clock stands the processor time of each actor, which other
work on the machine changes less.
"""

from __future__ import annotations

import itertools
import json
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from harness import Processors, Row, Rows, ratios, scenario, take_turns

from actorium import Engine, SamplingParams
from actorium.actors.client.client import Client, Request
from actorium.actors.params import Structured
from actorium.actors.structured.grammar import GrammarVocabulary, json_grammar

SCHEMA = {"type": "array", "minItems": 1000, "items": {
    "type": "object", "properties": {
        "name": {"type": "string", "maxLength": 40}, "size": {"type": "integer"},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3}},
    "required": ["name", "size", "tags"], "additionalProperties": False}}
SETTINGS: dict[str, dict[str, Any]] = {
    "overlap": {"speculative": "off"}, "no overlap": {"speculative": "off", "overlap": False},
    "mtp:2": {"speculative": "mtp:2,fixed"}}
MODES = [*SETTINGS]
ACTORS = ("scheduler", "worker-0", "detokenizer", "tokenizer")


def requests(batch: int, tokens: int, first: int, wanted: Structured | None) -> list[Request]:
    return [Request(prompt=f"Item {seed}:", params=SamplingParams(
        temperature=1.0, seed=seed, max_tokens=tokens, structured=wanted,
        ignore_eos=wanted is None))
        for seed in range(first, first + batch)]


def seconds(client: Client, work: list[Request], tokens: int) -> tuple[float, float]:
    """Seconds of a round from the first request to the last end, and the share of its tokens that
    were accepted drafts."""
    start, accepted = time.perf_counter(), 0
    for _, found in client.run(work):
        assert not isinstance(found, Exception), found
        assert len(found[0].token_ids) == tokens, found[0].finish_reason
        accepted += found[0].usage.accepted_tokens
    return time.perf_counter() - start, accepted / tokens / len(work)


@scenario
def costs(model: str = "", batch: int = 32, tokens: int = 64, rounds: int = 7,
          modes: list[str] = MODES) -> Rows:
    """Time and processor time of a token with a schema, beside those without, by turns.

    model: default the demo model; tokens: of each request. The first row is of the scheduler alone.
    """
    demo = Path(__file__).parents[2] / "tools" / "demo" / "demo_model" / "tokenizer.json"
    yield masks(demo, 1920, 2, batch)
    for name in modes:
        yield {"mode": name, **measured(model, batch, tokens, rounds, SETTINGS[name])}


def measured(model: str, batch: int, tokens: int, rounds: int, settings: dict[str, Any]) -> Row:
    """Both kinds of requests by turns, after a round of each to get warm."""
    wanted = Structured(json_schema=json.dumps(SCHEMA))
    seeds = itertools.count(0, batch)
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="act") as base, \
            Engine(model, run_dir=base, max_num_seqs=batch, **settings) as engine:
        processors = Processors({one.role: one.pid for one in engine.client.status().actors
                                 if one.role in ACTORS})

        def once(grammar: Structured | None) -> tuple[float, float, dict[str, float]]:
            work = requests(batch, tokens, next(seeds), grammar)
            processors.spent()
            spent, accepted = seconds(engine.client, work, tokens)
            return spent, accepted, processors.spent()

        found = take_turns({"plain": lambda: once(None), "structured": lambda: once(wanted)},
                           rounds + 1)
    each = 1e6 / batch / tokens
    rows = {name: own[1:] for name, own in found.items()}
    times = {name: [spent for spent, _, _ in own] for name, own in rows.items()}
    sums = [median(sum(cpu.values()) for _, _, cpu in own) for own in rows.values()]
    return {"ratio": median(ratios(times["plain"], times["structured"])),
            "cpu_ratio": sums[1] / sums[0],
            "accepted_drafts": {name: median(share for _, share, _ in own)
                                for name, own in rows.items()},
            "us_per_token": {name: median(own) * each for name, own in times.items()},
            "cpu_us_per_token": {name: {role: median(cpu[role] for _, _, cpu in own) * each
                                        for role in own[0][2]} for name, own in rows.items()}}


def masks(tokenizer: Path, size: int, eos: int, batch: int, steps: int = 64) -> Row:
    """Microseconds a row in the scheduler alone: taking a token, and the next mask."""
    vocabulary = GrammarVocabulary(tokenizer, size, [eos])
    grammar = json_grammar(json.dumps(SCHEMA))
    matchers = [vocabulary.matcher(grammar) for _ in range(batch)]
    draw, took = np.random.default_rng(0), []
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
    return {"vocabulary": size, "row_us": round(1e6 * median(took) / batch, 2),
            "worst_row_us": round(1e6 * max(took) / batch, 2)}
