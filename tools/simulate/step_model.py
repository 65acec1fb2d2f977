"""How long a worker's step takes, as a sum: what a simulated worker goes by, and how to fit it.

seconds = base + prompt x prompt tokens + sequence x decoding sequences + context x tokens that
their attention reads + pair x (prompt token, earlier token) pairs. The first four are what serving
studies find a step to be made of (Agrawal et al., "Vidur", MLSys 2024, has tables and forests where
this has a line); the pairs matter for long prompts only. `inward` and `outward` are what a request
and its tokens spend on their ways between client and scheduler: HTTP, tokenizer, router,
detokenizer. Pure, but for a file that is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
from msgspec import Struct

from actorium.actors.errors import BadConfig

FLAG = "--step-model"


class StepSeconds(Struct, frozen=True, forbid_unknown_fields=True):
    base: float
    prompt: float
    sequence: float
    context: float
    pair: float = 0.0
    inward: float = 0.0
    """Delay from a client to the scheduler."""
    outward: float = 0.0
    """Delay from the scheduler to a client."""
    about: str = ""
    """What was measured."""

    def seconds(self, prompt: int, sequences: int, context: float, pairs: float) -> float:
        """Returns the seconds of a step with so many prompt tokens, decoding sequences, tokens that
        these read, and pairs."""
        return (self.base + self.prompt * prompt + self.sequence * sequences
                + self.context * context + self.pair * pairs)


class StepSums(Struct, frozen=True):
    """What a number of steps did, and how long they took together."""

    steps: int
    prompt: int
    sequences: int
    context: float
    pairs: float
    seconds: float


def model_of(numbers: Sequence[float], about: str = "") -> StepSeconds:
    """The model with these seconds, four to seven, in the order of its fields."""
    base, prompt, sequence, context, pair, inward, outward = [*numbers, 0.0, 0.0, 0.0][:7]
    return StepSeconds(base, prompt, sequence, context, pair, inward, outward, about)


def parse_step_model(text: str) -> StepSeconds:
    """Parses `--step-model`: four to seven numbers, or a JSON file with the fields of
    `StepSeconds`.

    Raises `BadConfig`."""
    path = Path(text).expanduser()
    if path.is_file():
        try:
            model = msgspec.json.decode(path.read_bytes(), type=StepSeconds)
        except msgspec.MsgspecError as error:
            raise BadConfig(f"{FLAG}: {path}: {error}", "step_model") from None
    else:
        try:
            numbers = [float(word) for word in text.split(",")]
        except ValueError:
            numbers = []
        if not 4 <= len(numbers) <= 7:
            raise BadConfig(f"{FLAG}: must be a JSON file, or base,prompt,sequence,context"
                            f"[,pair[,inward[,outward]]] in seconds, got {text!r}", "step_model")
        model = model_of(numbers)
    values = [model.base, model.prompt, model.sequence, model.context, model.pair, model.inward,
              model.outward]
    if not all(0 <= value < 1e6 for value in values) or not model.base + model.sequence:
        raise BadConfig(f"{FLAG}: must be seconds, none negative, and a step must take some time, "
                        f"got {values}", "step_model")
    return model


def fit_step_model(measured: Sequence[StepSums], about: str) -> StepSeconds:
    """The model of least relative squared error, no coefficient negative.

    Non-negative least squares by active sets: the coefficient that is most negative is held at 0
    until none is (five columns; not Lawson and Hanson's full method, which may let one back in).
    """
    rows = np.array([(each.steps, each.prompt, each.sequences, each.context, each.pairs)
                     for each in measured], float)
    seconds = np.array([each.seconds for each in measured])
    rows /= seconds[:, None]
    used = [column for column in range(rows.shape[1]) if rows[:, column].any()]
    found = np.zeros(rows.shape[1])
    while used:
        scale = rows[:, used].max(axis=0)
        part = np.linalg.lstsq(rows[:, used] / scale, np.ones(len(rows)), rcond=None)[0] / scale
        found[:] = 0
        found[used] = part
        if (part >= 0).all():
            break
        used.pop(int(np.argmin(part * scale)))
    return model_of(found.tolist(), about)
