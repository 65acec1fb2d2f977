"""Trains the model of pictures, a tiny Qwen3-VL, from nothing on a CPU.

Usage:
    python -m actorium.tools.picture_training.train_pictures --out DIR [--minutes M] [--begin P]

First the tower alone is trained: what it makes of a cell is aligned with the embeddings of the
words that say what is in it, which takes a minute. Then the loss is that of answers, beside that of
the alignment, which fades. No run so far was long enough: 2.7 minutes
(347 steps) gave 47 of the 100 held-out items.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor, nn

from actorium.tools.demo_training.trainer import Team, Trainer, in_team
from actorium.tools.picture_training.picture_batches import (
    ASIDE,
    WORDS_SEEN,
    PictureBatch,
    PictureSource,
    build_tokenizer,
    save_tokenizer,
    spaced_words,
)
from actorium.tools.picture_training.picture_files import load, save
from actorium.tools.picture_training.picture_net import (
    PictureNet,
    PictureShape,
    init_looking,
    product,
    tower_shape,
)

_ROWS = 8
"""Conversations of a batch, of which a step has two, in each process."""
_MATRIX_RATE = 3e-3
_TURNS = 10
"""Questions of a conversation."""


class Probed(nn.Module):
    """A model with what tells, in training alone, whether cells know what is around them."""

    def __init__(self, model: PictureNet) -> None:
        super().__init__()
        self.model = model
        self.probe = product(sum(ASIDE), model.shape.hidden)

    def around(self, cells: Tensor, known: Tensor) -> Tensor:
        """Mean cross-entropy of what is around cells [B, R, hidden]; known: i64[B, R, of ASIDE]."""
        scores = self.probe(F.rms_norm(cells, cells.shape[-1:])).split(ASIDE, -1)
        return torch.stack([F.cross_entropy(own.flatten(0, 1), known[..., i].flatten())
                            for i, own in enumerate(scores)]).mean()


def picture_loss(probed: Probed, batch: PictureBatch, team: Team) -> Tensor:
    """Cross-entropy of the answers, added up over the batch, and the fading ones of rows with words
    and of what is around them in proportion to it; this process's share."""
    model = probed.model
    rows, total = model.rows(batch.pixels, batch.grids), batch.weights.sum()
    seen = batch.words[..., :WORDS_SEEN]
    if batch.alone:
        return total * alignment(model, rows[0], seen) / team.size
    logits, cells = model.looked_through(batch.ids, rows, batch.grids, batch.where, batch.turns)
    loss = (F.cross_entropy(logits, batch.targets, reduction="none") * batch.weights).sum()
    if batch.align:
        loss = loss + batch.align * total * (
            alignment(model, rows[0], seen) + alignment(model, cells, batch.words)
            + 0.5 * probed.around(cells, batch.around))
    return loss / team.size


def alignment(model: PictureNet, rows: Tensor, words: Tensor) -> Tensor:
    """How little the rows say of the words of their cells: mean of the log-probabilities' negatives
    over the words, each beside those of no other cell's. rows: [B, R, hidden]; words: i64[B, R, W],
    -1 for none."""
    normed = F.rms_norm(rows, rows.shape[-1:])
    known = words[words >= 0].unique()
    scores = F.linear(normed, model.language_model.embed_tokens.weight[known].detach())
    own = (words.unsqueeze(-1) == known).any(2).to(scores.dtype)
    return F.binary_cross_entropy_with_logits(scores, own, pos_weight=torch.tensor(4.0))


def train(out: Path, minutes: float, seed: int, begin: float, team: Team) -> None:
    """Trains, and writes a checkpoint to `out` now and then and at the end. begin: the point of the
    schedule to begin at, 0 to 1; above 0 it goes on from the checkpoint in `out`."""
    torch.manual_seed(seed)
    if begin:
        tokenizer, model = Tokenizer.from_file(f"{out}/tokenizer.json"), load(out)
    else:
        tokenizer = build_tokenizer()
        image, video = (tokenizer.encode(f"<|{kind}_pad|>").ids[0] for kind in ("image", "video"))
        vocab = -(-tokenizer.get_vocab_size() // 64) * 64
        model = PictureNet(PictureShape(tower_shape(image, video), vocab))
        init_looking(model, spaced_words(tokenizer))
        save_tokenizer(tokenizer, out, model.shape.context)
    source = PictureSource(tokenizer, f"{seed}-{begin}-{team.rank}", _ROWS, _TURNS)
    probed = Probed(model)
    trainer = Trainer(probed, lambda batch: picture_loss(probed, batch, team), source.step, team,
                      _MATRIX_RATE)
    if team.rank == 0:
        print(f"{sum(p.numel() for p in trainer.parameters)} parameters, vocabulary "
              f"{model.shape.vocab}", flush=True)
    trainer.train(minutes, begin, lambda: save(model, tokenizer, out))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--minutes", type=float, default=20.0, help="wall time of training")
    parser.add_argument("--processes", type=int, default=2, help="of one thread each")
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--meet", help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--begin", type=float, default=0.0, help="go on from the checkpoint in "
                        "--out, at this point of the schedule (0 to 1)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    in_team(lambda team: train(args.out, args.minutes, args.seed, args.begin, team),
            "actorium.tools.picture_training.train_pictures", args.processes, args.meet, args.rank)


if __name__ == "__main__":
    main()
