"""`actorium eval pictures`: questions about small drawn pictures."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

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
from actorium.tools.evaluation.picture_scores import (
    ask_pictures,
    picture_object,
    picture_page,
    picture_table,
)
from actorium.tools.evaluation.rated_model import RatedModel
from actorium.tools.pictures import PICTURE_MODEL
from actorium.tools.pictures.picture_questions import COUNT, held_out

ABOUT = """Small drawn pictures with questions after colours, counts and places, each with an answer
of one word. Patches in a wrong order, a wrong axis of rope, exchanged channels, a wrong
normalisation, pictures in a wrong order or rows in wrong places cost many answers. Exit code 1 if
--min-score is not reached, or a question could not be asked."""


class EvalPicturesOptions(EvalModelOptions, frozen=True, kw_only=True):
    """How many to ask, whom, and where the report goes."""

    ALIASES: ClassVar[dict[str, tuple[str, ...]]] = EvalModelOptions.ALIASES

    count: int = COUNT
    """Pictures (or pairs of them) with a question each; the first ones are the same whatever the
    count."""
    min_score: float = 0.0
    """Share (0..1) of right answers to reach."""


def run(kind: str, argv: list[str]) -> int:
    """Entry of the command."""
    parsed = parse(f"actorium eval {kind} [MODEL]", argv, EvalPicturesOptions, ABOUT,
                   checks=[check_machine])
    options = parsed.options
    options.check_common()
    if options.count < 1:
        raise BadConfig(f"--count: must be at least 1, got {options.count}", "count")
    if not 0 <= options.min_score <= 1:
        raise BadConfig(f"--min-score: must be between 0 and 1, got {options.min_score}",
                        "min_score")
    items = held_out(options.count, options.seed)
    parsed = _with_own_model(parsed)

    async def work(model: RatedModel) -> dict[str, Any]:
        results, seconds = await ask_pictures(model, items, options.parallel,
                                              progress(len(items)))
        return picture_object(results, setting_of(parsed, kind, model), seconds)

    result = on_model(parsed, work)
    print(picture_table(result))
    write_reports(options, result, lambda found: picture_page(found, items))
    return 0 if result["score"] >= options.min_score and not result["errors"] else 1


def _with_own_model(parsed: Parsed[EvalPicturesOptions]) -> Parsed[EvalPicturesOptions]:
    """With the model that comes with actorium, unless another is named."""
    config = parsed.config
    if config.model.model or parsed.options.base_url is not None or "name" in parsed.written:
        return parsed
    return parsed._replace(config=msgspec.structs.replace(
        config, model=msgspec.structs.replace(config.model, model=str(PICTURE_MODEL))))
