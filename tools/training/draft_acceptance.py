"""How many of the MTP layer's drafts the demo model accepts, offline and greedily.

Usage:
    python -m actorium.tools.training.draft_acceptance [--model DIR] [--count N]
        [--drafts K] [--json]

The model answers held-out prompts without speculation. Then the run that a speculative engine would
make over each answer is followed: K drafts, of which those up to the first wrong one are accepted;
then one token of the model's own; then the next K. The answers are the same either way, so that
one pass over the whole text yields every draft that can come up.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import Qwen3_5ForCausalLM

from actorium.actors.models.model_dir import DEMO_MODEL
from actorium.tools.demo.demo_tasks import TASKS, held_out, small_talk
from actorium.tools.training.demo_batches import question_text
from actorium.tools.training.demo_drafts import Mtp, drafts, load_drafting
from actorium.tools.training.demo_net import hidden, logits_at
from actorium.tools.training.trainer import END_OF_TEXT, END_OF_TURN, token_id

_LONGEST = 160
CHAT = "chat"
"""Kind of the small talk, beside the tasks."""


class DraftAcceptance(NamedTuple):
    """Counts of drafts by their place in a window, first to last."""

    proposed: tuple[int, ...]
    accepted: tuple[int, ...]

    @property
    def shares(self) -> tuple[float, ...]:
        """Returns accepted over proposed; a draft after a wrong one is made, and not accepted."""
        return tuple(a / max(m, 1) for a, m in zip(self.accepted, self.proposed, strict=True))

    def __add__(self, other: object) -> DraftAcceptance:
        if not isinstance(other, DraftAcceptance):
            return NotImplemented
        return DraftAcceptance(*(tuple(map(sum, zip(a, b, strict=True)))
                            for a, b in zip(self, other, strict=True)))


def walk(right: Sequence[Sequence[bool]], first: int, last: int) -> DraftAcceptance:
    """Follows the windows over one answer.

    right: by place in the window and by index of the token drafted: whether a draft of it there is
    the token. first, last: indices of the answer's first token, which no draft is for, and of its
    last one, after which nothing is drafted.
    """
    made, accepted = [0] * len(right), [0] * len(right)
    at = first
    while at < last:
        good = True
        kept = 0
        for place, tokens in enumerate(right):
            if at + 1 + place > last:
                break
            made[place] += 1
            good = good and tokens[at + 1 + place]
            kept += good
            accepted[place] += good
        at += kept + 1
    return DraftAcceptance(tuple(made), tuple(accepted))


@torch.inference_mode()
def greedy(
    model: Qwen3_5ForCausalLM, tokenizer: Tokenizer, prompts: list[str], limit: int
) -> list[list[int]]:
    """Continues each prompt greedily for at most `limit` tokens; returns the tokens added."""
    stops = {token_id(tokenizer, END_OF_TURN), token_id(tokenizer, END_OF_TEXT)}
    rows = [tokenizer.encode(prompt).ids for prompt in prompts]
    answers: list[list[int]] = [[] for _ in rows]
    live = list(range(len(rows)))
    for _ in range(limit):
        if not live:
            break
        lengths = [len(rows[i]) + len(answers[i]) for i in live]
        ids = torch.zeros((len(live), max(lengths)), dtype=torch.long)
        for at, i in enumerate(live):
            ids[at, : lengths[at]] = torch.tensor(rows[i] + answers[i])
        last: Tensor = torch.arange(len(live)) * ids.shape[1] + torch.tensor(lengths) - 1
        chosen = logits_at(model, ids, last).argmax(-1).tolist()
        for i, token in zip(live, chosen, strict=True):
            if token not in stops:
                answers[i].append(token)
        live = [i for i, token in zip(live, chosen, strict=True) if token not in stops]
    return answers


@torch.inference_mode()
def drafted(model: Qwen3_5ForCausalLM, mtp: Mtp, ids: Tensor, count: int) -> list[list[bool]]:
    """Drafts for one row of ids, [T], in the form `walk` takes."""
    outputs = drafts(model, mtp, ids[None], hidden(model, ids[None]), count)
    chosen = [model.lm_head(o[0, :-2]).argmax(-1) for o in outputs]
    return [[False, False, *(c == ids[2:]).tolist()] for c in chosen]


def measure(
    model: Qwen3_5ForCausalLM, mtp: Mtp, tokenizer: Tokenizer, prompts: list[str], count: int
) -> DraftAcceptance:
    """Measures the drafts of greedy answers to these prompts, `count` drafts at a time."""
    asked = [question_text(prompt) for prompt in prompts]
    end, total = token_id(tokenizer, END_OF_TURN), DraftAcceptance((0,) * count, (0,) * count)
    for start in range(0, len(asked), 32):
        part = asked[start : start + 32]
        for text, made in zip(part, greedy(model, tokenizer, part, _LONGEST), strict=True):
            prompt = tokenizer.encode(text).ids
            ids = torch.tensor(prompt + made + [end] * (len(made) < _LONGEST))
            total += walk(drafted(model, mtp, ids, count), len(prompt), len(ids) - 1)
    return total


def prompts_of(kind: str, count: int) -> list[str]:
    """Returns held-out prompts of a task, or questions of small talk (a closed set: trained on)."""
    if kind == CHAT:
        return [question for question, _ in small_talk()][:: max(1, len(small_talk()) // count)]
    return [item.prompt for item in held_out(kind, count)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", type=Path, default=DEMO_MODEL)
    parser.add_argument("--count", type=int, default=32, help="prompts of each kind")
    parser.add_argument("--drafts", type=int, default=2, help="drafts of a window")
    parser.add_argument("--kinds", nargs="+", choices=[*TASKS, CHAT], default=["story", CHAT])
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    model, mtp = load_drafting(args.model)
    if mtp is None:
        parser.error(f"--model: {args.model} has no MTP layer")
    tokenizer = Tokenizer.from_file(str(args.model / "tokenizer.json"))
    found = {kind: measure(model, mtp, tokenizer, prompts_of(kind, args.count), args.drafts)
             for kind in args.kinds}
    found["all"] = sum(found.values(), DraftAcceptance((0,) * args.drafts, (0,) * args.drafts))
    if args.json:
        print(json.dumps({kind: a.shares for kind, a in found.items()}))
        return
    for kind, a in found.items():
        shares = "  ".join(f"{100 * share:5.1f} %" for share in a.shares)
        print(f"{kind:<8} {shares}   of {a.proposed[0]} windows")


if __name__ == "__main__":
    main()
