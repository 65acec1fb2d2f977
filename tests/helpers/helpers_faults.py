"""What `actorium compare` would say of two attention backends, without servers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from helpers_models import Seq, Stepper
from torch import Tensor

from actorium.gpu.attention.attention_backend import AttentionBackend, TorchAttention
from actorium.gpu.attention.backend_choice import StepAttention
from actorium.gpu.models.decoder import Decoder
from actorium.tools.compare.comparison import Bars, ModelAnswer, Reading, compared
from actorium.tools.compare.listener import TOP

PROMPTS = [[(5 * i + 3 * n) % 89 + 5 for i in range(n)] for n in (9, 33, 70)]


def top(logprobs: Tensor, count: int = TOP) -> dict[str, float]:
    values, ids = logprobs.topk(count)
    return {str(i): float(v) for i, v in zip(ids.tolist(), values.tolist(), strict=True)}


def heard(model: Decoder, backend: AttentionBackend, kv_dtype: torch.dtype | None,
          texts: Sequence[list[int]] | None = None, prompts: Sequence[list[int]] = PROMPTS,
          new: int = 12) -> list[ModelAnswer]:
    """What a model says with this backend, as a server would: an answer of `new` tokens, token by
    token, it as part of a prompt, and its end behind a prefix that is in the pages."""
    model.attention = StepAttention(backend, backend)
    found = []
    for number, prompt in enumerate(prompts):
        steps = Stepper(model, kv_dtype=kv_dtype)
        seq, tops = Seq(list(prompt)), []
        row = steps.step([(seq, len(prompt))])[0]
        for _ in range(new):
            tops.append(top(row.log_softmax(-1)))
            seq.tokens.append(int(row.argmax()))
            row = steps.step([], [seq])[0]
        answer = seq.tokens[len(prompt):]
        whole = [*prompt, *(answer if texts is None else texts[number])]
        rows = steps.step([(Seq(list(whole)), len(whole))], every_row=True).log_softmax(-1)
        behind = Seq(list(whole))
        steps.step([(behind, len(whole) - 5)])
        last = steps.step([(behind, 5)])[0].log_softmax(-1)
        found.append(ModelAnswer(
            str(number), " ".join(map(str, answer)), Reading([*map(str, answer)], tops),
            Reading([*map(str, whole)], [None, *map(top, rows[:-1])]),
            Reading(["next"], [top(last)])))
    return found


def beside_torch(model: Decoder, backend: AttentionBackend, kv_dtype: torch.dtype | None,
                 bars: Bars, prompts: Sequence[list[int]] = PROMPTS,
                 new: int = 12) -> dict[str, Any]:
    """The comparison of torch's reference and this backend, over pages of one dtype."""
    one = heard(model, TorchAttention(), kv_dtype, None, prompts, new)
    texts = [[int(token) for token in own.decode.tokens] for own in one]
    return compared(one, heard(model, backend, kv_dtype, texts, prompts, new), bars)
