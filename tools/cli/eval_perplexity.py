"""`actorium eval perplexity`: how well a model predicts a text."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from actorium.actors.errors import BadConfig
from actorium.actors.launcher.preflight import check_machine
from actorium.tools.cli.command_line import parse
from actorium.tools.cli.eval_model import (
    EvalModelOptions,
    on_model,
    progress,
    setting_of,
    write_reports,
)
from actorium.tools.evaluation.perplexity import (
    perplexity_page,
    perplexity_table,
    run_perplexity,
)
from actorium.tools.evaluation.rated_model import RatedModel

ABOUT = """How well a model predicts a text: perplexity of its tokens, and bits per byte. A server
at --base-url needs /tokenize, and /v1/completions with echo and logprobs (vLLM and this engine have
both). Exit code 1 above --max-perplexity."""


class EvalPerplexityOptions(EvalModelOptions, frozen=True, kw_only=True):
    """The text, whom to ask, and where the report goes."""

    ALIASES: ClassVar[dict[str, tuple[str, ...]]] = {
        "parallel": EvalModelOptions.ALIASES["parallel"], "window": ("ctx-size",)}

    data: str | None = None
    """A file of text, in UTF-8."""
    window: int = 512
    """Tokens that are read at once."""
    stride: int | None = None
    """New tokens of each window. Default: half a window."""
    max_tokens: int | None = None
    """Read so many tokens of the file; default: all."""
    max_perplexity: float | None = None
    """What it may be at the most."""


def run(kind: str, argv: list[str]) -> int:
    """Entry of the command."""
    parsed = parse(f"actorium eval {kind} [MODEL]", argv, EvalPerplexityOptions, ABOUT,
                   checks=[check_machine])
    options = parsed.options
    options.check_common()
    stride = options.window // 2 if options.stride is None else options.stride
    if options.window < 2:
        raise BadConfig(f"--window: must be at least 2, got {options.window}", "window")
    if not 1 <= stride < options.window:
        raise BadConfig(f"--stride: must be between 1 and {options.window - 1}, got {stride}",
                        "stride")
    if options.max_tokens is not None and options.max_tokens < 2:
        raise BadConfig(f"--max-tokens: must be at least 2, got {options.max_tokens}", "max_tokens")
    text = _text(options.data)

    async def work(model: RatedModel) -> dict[str, Any]:
        found = await run_perplexity(model, text, options.window, stride, options.max_tokens,
                                     options.parallel, progress(len(text)))
        return {**setting_of(parsed, kind, model), "data": options.data,
                "window": options.window, "stride": stride, **found}

    result = on_model(parsed, work)
    print(perplexity_table(result))
    write_reports(options, result, perplexity_page)
    bound = options.max_perplexity
    return 0 if bound is None or result["perplexity"] <= bound else 1


def _text(file: str | None) -> str:
    """Raises `BadConfig`."""
    if file is None:
        raise BadConfig("--data: a file of text is needed", "data")
    try:
        text = Path(file).read_text(encoding="utf-8")
    except OSError as error:
        raise BadConfig(f"--data: cannot read {file}: {error.strerror}", "data") from None
    except UnicodeDecodeError as error:
        raise BadConfig(f"--data: {file} is not UTF-8: {error.reason}", "data") from None
    if len(text.split()) < 2:
        raise BadConfig(f"--data: {file} holds no text", "data")
    return text
