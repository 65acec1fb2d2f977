"""`actorium passes`: what each pass joins in a model, how often, and what it gains."""

from __future__ import annotations

from pathlib import Path

from actorium.actors.config.pass_names import PASSES, parse_passes
from actorium.actors.models import model_dir as models
from actorium.actors.models.obtain import with_model_path
from actorium.tools.cli.command_line import parse
from actorium.tools.cli.flags import NoOptions

ABOUT = """Load a model, and say of each pass how often it matched and how often it must, what the
rewritten layers differ by from those that were traced, and the microseconds of a layer (the mean of
the first four, attention itself left out) without the pass and with it, by tokens; and which of
them --passes auto leaves out on this machine. --load-format dummy needs config.json alone."""
TOKENS = (1, 32, 256, 2048)


def run(_command: str, argv: list[str]) -> int:
    """Entry of the command."""
    config = with_model_path(parse("actorium passes [MODEL]", argv, NoOptions, ABOUT).config)
    import torch

    from actorium.gpu.models.registry import load_model
    from actorium.gpu.passes.pass_choice import choice_text, microseconds, remembered_choice, way
    from actorium.gpu.passes.pass_manager import PassManager

    cuda = config.device.device == "cuda" or (
        config.device.device == "auto" and torch.cuda.is_available())
    if config.device.threads:
        torch.set_num_threads(config.device.threads)
    model = load_model(Path(models.resolve(config.model.model)), config,
                       torch.device("cuda" if cuda else "cpu"), lambda *_: None)
    on = parse_passes(config.device.passes)
    report, full = PassManager(model, on).install(), way(model, on)
    print(f"{len(model.layers)} layers, {report.structures} different graphs; rewritten in "
          f"{1e3 * report.seconds:.0f} ms; off by {report.error:.1g}")
    chosen = remembered_choice(model, on, config.scheduler.max_num_batched_tokens)
    print(f"--passes auto: {choice_text(chosen)}")
    print(columns("pass", "matches", "expected", *(f"us at {tokens}" for tokens in TOKENS)))
    for name in PASSES:
        cells = [str(report.matches[name]), str(report.expected[name])] if name in on else ["off"]
        if report.matches[name]:
            less = way(model, tuple(other for other in on if other != name))
            for tokens in TOKENS:
                before, after = microseconds(model, [less, full], tokens)
                cells.append(f"{before:.0f} -> {after:.0f}")
        print(columns(name, *cells))
    return 0


def columns(name: str, *cells: str) -> str:
    """A line of the table: cells stay apart however long they are."""
    return f"{name:>16}" + "".join(f"  {cell:>16}" for cell in cells)
