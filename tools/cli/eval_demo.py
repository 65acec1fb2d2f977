"""`actorium eval demo`: scores the model's answers to held-out items of the demo tasks."""

from __future__ import annotations

import json

from msgspec import Struct

from actorium.actors.errors import BadConfig
from actorium.actors.launcher.preflight import check_machine
from actorium.actors.params import SamplingParams
from actorium.tools.cli.command_line import parse
from actorium.tools.cli.engines import for_batches, own_engine
from actorium.tools.evaluation.demo_scores import as_dict, evaluate, score_table

ABOUT = """Score held-out items of the demo tasks by exact match, through the engine. Exit code 1
when --least is not reached."""


class EvalDemoOptions(Struct, frozen=True, kw_only=True):
    """What to ask."""

    count: int = 50
    """Items of each task."""
    max_tokens: int = 256
    """Tokens of an answer, at the most."""
    temperature: float = 0.0
    """0 = greedy."""
    least: float = 0.0
    """Share (0..1) of right answers to reach."""
    json: bool = False
    """Print an object instead of a table."""


def run(_kind: str, argv: list[str]) -> int:
    """Entry of the command."""
    parsed = parse("actorium eval demo [MODEL]", argv, EvalDemoOptions, ABOUT,
                   checks=[check_machine])
    options = parsed.options
    if options.count < 1:
        raise BadConfig(f"--count: must be at least 1, got {options.count}", "count")
    params = SamplingParams(temperature=options.temperature, max_tokens=options.max_tokens)
    try:
        params.check()
    except ValueError as error:
        name, _, what = str(error).partition(": ")
        raise BadConfig(f"{parsed.written.get(name, name)}: {what}", name) from None

    with own_engine(for_batches(parsed.config)) as engine:
        result = evaluate(engine.client, options.count, params)
    print(json.dumps(as_dict(result)) if options.json else score_table(result))
    return 0 if result.share >= options.least else 1
