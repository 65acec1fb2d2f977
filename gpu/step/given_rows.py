"""Prompts given as embeddings: from the bytes of an admission to rows of a step."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from actorium.actors.config.tree import Config
from actorium.actors.errors import BadConfig
from actorium.actors.messages import PromptEmbeds
from actorium.gpu.families.model_shape import ModelShape
from actorium.gpu.step.batch import ForwardBatch, ImageRows

TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class GivenRows(NamedTuple):
    """What takes the place of the embeddings of a prompt in a slot."""

    first: int
    """The token that the first row stands for: those before it are in pages."""
    embeds: PromptEmbeds

    def chunk(self, start: int, count: int) -> Tensor:
        """[n, hidden], on the host: of the tokens from `start` on. n: as many of `count` as are the
        prompt's; the others have been emitted."""
        width = self.embeds.row_bytes
        data = self.embeds.data[(start - self.first) * width:(start - self.first + count) * width]
        rows = torch.frombuffer(bytearray(data), dtype=TYPES[self.embeds.dtype]) if data \
            else torch.empty(0, dtype=TYPES[self.embeds.dtype])
        return rows.view(-1, self.embeds.hidden)


def take_rows(batch: ForwardBatch, given: dict[int, GivenRows]) -> ImageRows | None:
    """Returns what a step has of prompts given as embeddings, on its device; None without any.
    given: by slot; prompts that the step computes to their end leave it."""
    places, rows, at = list[Tensor](), list[Tensor](), 0
    for row in batch.extends:
        if (own := given.get(row.slot)) is not None:
            rows.append(own.chunk(row.start, row.count))
            places.append(torch.arange(at, at + len(rows[-1])))
            if row.start + row.count >= own.first + own.embeds.rows:
                del given[row.slot]
        at += row.count
    if not rows:
        return None
    device = batch.tokens.device
    return ImageRows(torch.cat(places).to(device), torch.cat(rows).to(device))


def check_prompt_embeds(config: Config, shape: ModelShape) -> None:
    """Raises `BadConfig` where prompts are to be taken as embeddings and the model reads their
    token ids as well."""
    if not config.model.enable_prompt_embeds:
        return
    why = "transformers' classes run this model" if shape.by_transformers else \
        f"every layer of {shape.architecture} reads token ids" if shape.token_inputs else ""
    if why:
        raise BadConfig(f"enable_prompt_embeds: {why}", "model.enable_prompt_embeds")
