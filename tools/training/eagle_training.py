"""Trains an EAGLE-3 head for a chat model, on a CPU, from conversations that the model writes.

    python -m actorium.tools.training.eagle_training texts --model DIR --texts FILE [--count N]
    python -m actorium.tools.training.eagle_training train --model DIR --texts FILE --out HEAD
    python -m actorium.tools.training.eagle_training check --model DIR --texts FILE --out HEAD

`texts` has the model write conversations, `train` trains the head on all but the last of them, and
`check` answers these with an engine that drafts by the head, and prints what was accepted.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path

import torch

from actorium.actors.models.model_dir import resolve
from actorium.tools.training.eagle_texts import HELD_OUT, measured, read_texts, write_texts
from actorium.tools.training.trainer import Trainer

_RATE = 2e-3


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m actorium.tools.training.eagle_training",
                                     description=(__doc__ or "").splitlines()[0])
    kinds = parser.add_subparsers(dest="work", required=True)
    for name in ("texts", "train", "check"):
        own = kinds.add_parser(name)
        own.add_argument("--model", default="", help="directory or name of the chat model")
        own.add_argument("--texts", type=Path, required=True, help="file of conversations")
        own.add_argument("--seed", type=int, default=1)
        if name == "texts":
            own.add_argument("--count", type=int, default=1000, help="questions that are asked for")
            own.add_argument("--questions", type=Path, help="file of questions, a JSON string a "
                             "line; by default the model writes them")
            continue
        own.add_argument("--out", type=Path, required=True, help="folder of the head")
        if name == "train":
            own.add_argument("--minutes", type=float, default=10.0, help="wall time")
            own.add_argument("--drafted", type=int, default=4096,
                             help="tokens of the drafts' vocabulary")
            own.add_argument("--threads", type=int, default=1)
        else:
            own.add_argument("--drafts", type=int, default=3)
            own.add_argument("--temperature", type=float, default=0.0)
    args = parser.parse_args()
    model = resolve(args.model)
    if args.work == "texts":
        questions = args.questions.read_text().splitlines() if args.questions else ()
        write_texts(model, args.texts, args.count, args.seed, list(map(json.loads, questions)))
    elif args.work == "train":
        _train(model, args)
    else:
        print(json.dumps(measured(model, args.out, read_texts(args.texts)[-HELD_OUT:], args.drafts,
                                  args.temperature), indent=2))


def _train(model: Path, args: argparse.Namespace) -> None:
    from actorium.tools.training import eagle_net  # takes seconds

    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    texts = read_texts(args.texts)[:-HELD_OUT]
    teacher, targets = eagle_net.Teacher(model), eagle_net.frequent_tokens(texts, args.drafted)
    batches, net = teacher.batches(texts), eagle_net.new_net(teacher, targets)
    print(f"{sum(own.numel() for own in net.parameters())} parameters, {len(texts)} conversations",
          flush=True)
    loss = partial(eagle_net.draft_loss, teacher, net, targets)
    trainer = Trainer(net, loss, eagle_net.shuffled(batches, args.seed), matrix_rate=_RATE)
    trainer.train(args.minutes, 0.0, partial(eagle_net.save_head, teacher, net, targets, args.out))


if __name__ == "__main__":
    main()
