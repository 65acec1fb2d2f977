"""The packaged model on the device, served as any but in fp32, beside the CPU's reference kernels:
the same tokens, by all that a step is made of."""

from __future__ import annotations

from pathlib import Path

import actorium
from actorium.gpu.worker.device import open_device

from . import models
from .child import Bench
from .plan import TINY

MODEL = Path(actorium.__file__).parent / "tools/demo/demo_model"
BATCH, CONTEXT, STEPS = 4, 40, 24


def run(bench: Bench) -> None:
    """The one row. Prompts go through segments where they fit, decodes through graphs."""
    with bench.row(TINY.name) as go:
        if not go:
            return
        said = {"load_format": "auto", "dtype": "float32"}
        there, here = (models.settings(toy, MODEL, BATCH, "off", said) for toy in (bench.toy, True))
        device, _ = models.loaded(bench, there)
        reference = open_device(here, 1, lambda phase, detail: None, {})
        got, want = (models.tokens(own.runner, BATCH, CONTEXT, bench.size(STEPS, 4), True)
                     for own in (device, reference))
        bench.same(TINY.name, got, want)
