"""A logits processor: no sequence of n tokens occurs twice in prompt and completion together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from actorium.actors.plugins.logits_processors import ProcessedRows

if TYPE_CHECKING:
    from torch import Tensor

MOST = 64


class NoRepeatedNgrams:
    """Bars each token that would complete a sequence of `ngram_size` tokens that was there."""

    arguments = ("ngram_size",)

    def check(self, args: Mapping[str, Any]) -> None:
        size = args.get("ngram_size")
        if isinstance(size, bool) or not isinstance(size, int) or not 2 <= size <= MOST:
            raise ValueError(f"ngram_size: must be a number between 2 and {MOST}, got {size!r}")

    def __call__(self, logits: Tensor, rows: ProcessedRows) -> Tensor:
        sizes = [args["ngram_size"] for args in rows.args]
        for size in set(sizes):
            # All rows of one size at once: a loop over rows would cost a launch for each.
            own = rows.lengths.new_tensor([i for i, each in enumerate(sizes) if each == size])
            logits[own] = _barred(logits[own], rows.tokens[own], rows.lengths[own], size)
        return logits


def _barred(logits: Tensor, tokens: Tensor, lengths: Tensor, size: int) -> Tensor:
    """logits [R, V], tokens [R, L], lengths [R]; size: of the sequences."""
    import torch  # not at the top: the tokenizer's process, which has no torch, imports this, too

    if tokens.shape[1] < size:
        return logits
    begins = lengths[:, None] - (size - 1) + torch.arange(size - 1, device=tokens.device)
    last = tokens.gather(1, begins.clamp(min=0))
    ngrams = tokens.unfold(1, size, 1)
    # Behind a row's tokens there is -1, which is the end of no sequence that was there.
    repeats = (ngrams[:, :, :-1] == last[:, None]).all(2) & (ngrams[:, :, -1] >= 0)
    repeats &= lengths[:, None] >= size
    barred = torch.zeros_like(logits).scatter_reduce_(
        1, ngrams[:, :, -1].clamp(min=0), repeats.to(logits.dtype), "amax")
    return logits.masked_fill(barred > 0, float("-inf"))


NO_REPEATED_NGRAMS = NoRepeatedNgrams()
