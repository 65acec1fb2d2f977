"""The means of keys that `SageAttention` takes off: measured once, before the first request.

Keys of many models carry a bias, of their projection or of what the layer before always says, that
is larger than what tells them apart. It is measured as the mean of the keys of one prompt, of
tokens from all over the vocabulary, by the reference's attention. So it follows from the model
alone: the same for every rank, request, restart and order of requests. Pages hold keys as they are
and outlive it; any other mean would do as well, only coarser.
"""

from __future__ import annotations

import logging

import numpy as np
import torch

from actorium.actors.messages import Admit, StepPlan
from actorium.actors.params import ResolvedParams
from actorium.gpu.attention.attention_backend import TorchAttention
from actorium.gpu.attention.backend_choice import StepAttention
from actorium.gpu.attention.sage_attention import SageAttention
from actorium.gpu.models.registry import Model
from actorium.gpu.step.runner import ModelRunner

LOG = logging.getLogger("actorium.attention")
TOKENS = 256
GOLDEN = 0x9E3779B1
"""2**32 / the golden ratio: its multiples spread evenly."""


def measured_tokens(vocab: int, count: int) -> np.ndarray:
    """i32[count]: tokens spread evenly over a vocabulary, in no order."""
    spread = (np.arange(1, count + 1, dtype=np.uint64) * GOLDEN) & 0xFFFFFFFF
    return (spread * vocab >> 32).astype(np.int32)


@torch.inference_mode()
def measure_key_means(runner: ModelRunner, most: int) -> None:
    """Tells the model's backends of means, where they want some: over pages that hold codes they
    do not. Nothing else is left behind. No page may be in use, and the tables must be empty. most:
    tokens of a step."""
    model, t = runner.model, runner.tables
    assert isinstance(model, Model)
    told = {id(own): own for own in model.attention if isinstance(own, SageAttention)}
    room = min(pool.pages for pool in runner.pools) - 1
    count = min(TOKENS, most, t.max_len - 1, room * t.page_size)
    if not told or count < 1 or runner.pools[0].layers[0].dtype is torch.int8:
        return
    table = np.arange(1, 1 + -(-count // t.page_size), dtype=np.int32)
    ids, asked = measured_tokens(t.vocab, count), model.attention
    model.attention = StepAttention(TorchAttention(), TorchAttention(), model.attention.pages)
    try:
        runner.run(StepPlan(0, 0, admit=[Admit(
            1, ids.tobytes(), count, 0, np.tile(table, t.groups).tobytes(),
            ResolvedParams(max_tokens=1), 1)], extend=np.array([[1, count]], np.int32).tobytes()))
    finally:
        model.attention = asked
    runner.run(StepPlan(0, 0, release=np.array([1], np.int32).tobytes()))
    for pool in runner.pools:
        for layer in pool.layers:
            rows = layer[t.page_size:t.page_size + count, :layer.shape[1] // 2]
            for own in told.values():
                own.means.tell(layer, rows.double().mean(0))
    LOG.info("means of keys: of %d tokens", count)
