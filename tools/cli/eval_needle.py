"""`actorium eval needle`: finds a sentence in a long text, by depth and length."""

from __future__ import annotations

from typing import Any, ClassVar

from actorium.actors.errors import BadConfig
from actorium.actors.launcher.preflight import check_machine
from actorium.tools.cli.command_line import Parsed, parse
from actorium.tools.cli.eval_model import (
    EvalModelOptions,
    on_model,
    progress,
    setting_of,
    write_reports,
)
from actorium.tools.evaluation.needle_test import (
    CASES,
    needle_object,
    needle_page,
    needle_table,
    run_needle,
)
from actorium.tools.evaluation.rated_model import RatedModel

ABOUT = """A needle in a haystack: a sentence with a number at each depth of texts of each length,
and a question after it. Exit code 1 if --min-score is not reached, or a prompt could not be
answered."""


class EvalNeedleOptions(EvalModelOptions, frozen=True, kw_only=True):
    """The grid, whom to ask, and where the report goes."""

    ALIASES: ClassVar[dict[str, tuple[str, ...]]] = {
        "parallel": EvalModelOptions.ALIASES["parallel"]}

    lengths: list[int] = []
    """Tokens of the prompts, about. Default: 256 512 1024; of pairs 100 300 500."""
    depths: list[float] = []
    """Where the sentence is: 0 = at the beginning, 1 = at the end. Default: 0 0.25 0.5 0.75 1."""
    trials: int = 3
    """Prompts for each depth and length."""
    style: str | None = None
    """text: filler text to go on from | chat: the same as a conversation | pairs: the demo model's
    own task, up to some 530 tokens. Default: pairs for the demo model, else text."""
    min_score: float = 0.0
    """Share (0..1) of needles to find."""


def run(kind: str, argv: list[str]) -> int:
    """Entry of the command."""
    parsed = parse(f"actorium eval {kind} [MODEL]", argv, EvalNeedleOptions, ABOUT,
                   checks=[check_machine])
    options = parsed.options
    options.check_common()
    style = _style(parsed)
    lengths = options.lengths or ([100, 300, 500] if style == "pairs" else [256, 512, 1024])
    depths = options.depths or [0.0, 0.25, 0.5, 0.75, 1.0]
    _check(options, lengths, depths)
    total = len(lengths) * len(depths) * options.trials

    async def work(model: RatedModel) -> dict[str, Any]:
        results, seconds = await run_needle(model, style, lengths, depths, options.trials,
                                            options.seed, options.parallel, progress(total))
        setting = {**setting_of(parsed, kind, model), "style": style, "trials": options.trials}
        return needle_object(results, setting, seconds)

    result = on_model(parsed, work)
    print(needle_table(result))
    write_reports(options, result, needle_page)
    return 0 if result["score"] >= options.min_score and not result["errors"] else 1


def _style(parsed: Parsed[EvalNeedleOptions]) -> str:
    """Raises `BadConfig`."""
    options = parsed.options
    if options.style is None:
        demo = not parsed.config.model.model and options.base_url is None \
            and "name" not in parsed.written
        return "pairs" if demo else "text"
    if options.style not in CASES:
        raise BadConfig(f"--style: must be {', '.join(CASES)}, got {options.style!r}", "style")
    return options.style


def _check(options: EvalNeedleOptions, lengths: list[int], depths: list[float]) -> None:
    if min(lengths) < 1:
        raise BadConfig(f"--lengths: must be at least 1, got {min(lengths)}", "lengths")
    if not all(0 <= depth <= 1 for depth in depths):
        raise BadConfig("--depths: must be between 0 and 1", "depths")
    if options.trials < 1:
        raise BadConfig(f"--trials: must be at least 1, got {options.trials}", "trials")
    if not 0 <= options.min_score <= 1:
        raise BadConfig(f"--min-score: must be between 0 and 1, got {options.min_score}",
                        "min_score")
