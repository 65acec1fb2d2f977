"""What training both small models has in common: their files (tokenizer, weights, configurations),
and the steps and schedules, in one process or several."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, distributed, nn

END_OF_TEXT, END_OF_TURN = "<|endoftext|>", "<|im_end|>"

# One digit at a time, so that sums align; letters apart from punctuation, so that a word is
# the same token after a space, a quote or an equals sign.
_SPLIT = r"""\p{N}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+|\s+(?!\S)|\s+"""


def trained_tokenizer(corpus: Iterable[str], special: Iterable[str], vocab: int) -> Tokenizer:
    """A byte-level BPE; any UTF-8 text round-trips."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(_SPLIT), "isolated"),
         pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, show_progress=False,
        special_tokens=[AddedToken(each, special=True, normalized=False) for each in special],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()))
    tokenizer.train_from_iterator(corpus, trainer)
    return tokenizer


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """The id of a token that must exist."""
    found = tokenizer.token_to_id(token)
    if found is None:
        raise KeyError(token)
    return found


def padded_vocabulary(tokenizer: Tokenizer) -> int:
    """Rows of the table of embeddings, a multiple of 64."""
    return -(-tokenizer.get_vocab_size() // 64) * 64


def save_tokenizer(tokenizer: Tokenizer, folder: Path, context: int, chat_template: str) -> None:
    """Writes tokenizer.json and tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    _write(folder / "tokenizer_config.json", {
        "add_bos_token": False, "add_prefix_space": False, "bos_token": None,
        "chat_template": chat_template, "clean_up_tokenization_spaces": False,
        "eos_token": END_OF_TURN, "extra_special_tokens": {}, "model_max_length": context,
        "pad_token": END_OF_TEXT, "tokenizer_class": "PreTrainedTokenizerFast", "unk_token": None})


def save_model(folder: Path, weights: Mapping[str, Tensor], **configs: dict[str, Any]) -> None:
    """Writes weights in bf16, and each of `configs` as a file of that name."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {name: p.detach().bfloat16().contiguous() for name, p in weights.items()}
    partial = folder / "model.safetensors.partial"
    save_file(state, str(partial), metadata={"format": "pt"})
    partial.replace(folder / "model.safetensors")
    for name, content in configs.items():
        _write(folder / f"{name}.json", content)


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


MATRIX_RATE = 2e-3
"""Learning rate of Muon, whose steps are equally long in all directions: at 1e-2 a batch's noise
drowns copying."""
_VECTOR_RATE = 4e-3
_GENTLE_STEPS = 20
"""Steps over which the rate rises, also after a restart: the optimizers' moments start anew."""


def rate(progress: float) -> float:
    """Returns the learning rate over its peak: short warm-up, then a cosine down to nearly nothing.
    """
    if progress < 0.02:
        return 0.05 + 0.95 * progress / 0.02
    return 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * min(1.0, (progress - 0.02) / 0.98)))


class Team(NamedTuple):
    """The number of processes and this one's rank; each takes its share of every step.

    Processes of one thread wait for one another once a step; threads do at every operation, which
    on a machine with other work costs most of the time.
    """

    rank: int
    size: int


class Weighted(Protocol):
    @property
    def ids(self) -> Tensor:
        """Tokens."""

    @property
    def weights(self) -> Tensor:
        """Weights of the positions that predict."""


Batch = TypeVar("Batch", bound=Weighted)
Begin = Callable[[Path, int, float, Team], "tuple[Trainer[Any], Callable[[], None]]"]
"""From (folder of the checkpoint, seed, share of the schedule that is over, team) to what trains a
model and what writes it."""


class Trainer(Generic[Batch]):
    """Optimizers and the step; matrices go to Muon, embeddings and norms to AdamW."""

    def __init__(
        self,
        trained: nn.Module,
        loss: Callable[[Batch], Tensor],
        draw: Callable[[float], list[Batch]],
        team: Team | None = None,
        matrix_rate: float = MATRIX_RATE,
    ) -> None:
        """loss: of this process's share of a batch, added up over its weights; draw: a step's
        batches, whose weights are those of all processes' shares."""
        self.loss, self.draw, self.team = loss, draw, team or Team(0, 1)
        named = list(trained.named_parameters())
        self.parameters = [p for _, p in named]
        matrices = [p for n, p in named if p.ndim == 2 and "embed_tokens" not in n]
        rest = [p for n, p in named if p.ndim != 2 or "embed_tokens" in n]
        self.optimizers: list[torch.optim.Optimizer] = [
            torch.optim.AdamW(rest, lr=_VECTOR_RATE, betas=(0.9, 0.98), weight_decay=0.0),
            torch.optim.Muon(
                matrices, lr=matrix_rate, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"
            ),
        ]
        self.peaks = [group["lr"] for o in self.optimizers for group in o.param_groups]
        self.steps = 0

    def step(self, progress: float) -> tuple[float, int]:
        """Takes one optimizer step; returns its loss per weighted token, and its tokens."""
        batches = self.draw(progress)
        total = sum(float(batch.weights.sum()) for batch in batches)
        loss = 0.0
        for batch in batches:
            part = self.loss(batch) / total
            part.backward()
            loss += float(part.detach())
        loss = self._all_reduce(loss)
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        groups = [group for o in self.optimizers for group in o.param_groups]
        self.steps += 1
        gently = min(1.0, self.steps / _GENTLE_STEPS)
        for group, peak in zip(groups, self.peaks, strict=True):
            group["lr"] = peak * gently * rate(progress)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return loss, sum(batch.ids.numel() for batch in batches)

    def _all_reduce(self, loss: float) -> float:
        """Sums the gradients, and the loss, of all processes."""
        if self.team.size == 1:
            return loss
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        flat = torch.cat([*(g.flatten() for g in gradients), torch.tensor([loss])])
        distributed.all_reduce(flat)
        parts = flat[:-1].split([g.numel() for g in gradients])
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part.view_as(gradient))
        return float(flat[-1])

    def train(self, minutes: float, begin: float, save: Callable[[], None],
              save_seconds: float = 60.0) -> None:
        """Steps for so many minutes from the point `begin` of the schedule, 0 to 1, and calls
        `save` in the first process now and then and at the end."""
        say = print if self.team.rank == 0 else lambda *_, **__: None
        start, used_before = time.monotonic(), time.process_time()
        steps, seen, average, next_save = 0, 0, 0.0, save_seconds
        while (share := self._agreed((time.monotonic() - start) / (60 * minutes))) < 1:
            now, used = self.step(begin + (1 - begin) * share)
            steps, seen = steps + 1, seen + used
            average = 0.95 * average + 0.05 * now if average else now
            elapsed = time.monotonic() - start
            if steps % 50 == 0:
                say(f"{elapsed:6.0f} s  step {steps}  loss {average:.4f}  {seen / elapsed:.0f} "
                    "tok/s", flush=True)
            if self.team.rank == 0 and elapsed > next_save:
                next_save = elapsed + save_seconds
                save()
        say(f"{steps} steps, {seen} tokens, {time.monotonic() - start:.0f} s, of which this "
            f"process ran {time.process_time() - used_before:.0f}", flush=True)
        if self.team.rank == 0:
            save()

    def _agreed(self, share: float) -> float:
        """Returns the first process's share of the time."""
        if self.team.size == 1:
            return share
        shared = torch.tensor([share])
        distributed.broadcast(shared, 0)
        return float(shared)


def in_team(work: Callable[[Team], None], size: int, rendezvous: str | None, rank: int) -> None:
    """Works in `size` processes of this command line; rendezvous: where they find one another."""
    if size == 1:
        return work(Team(0, 1))
    with tempfile.TemporaryDirectory() as folder:
        address, others = rendezvous or f"file://{folder}/rendezvous", []
        if rank == 0:
            command = [sys.executable, "-m", "actorium.tools.training", *sys.argv[1:]]
            others = [subprocess.Popen([*command, "--rendezvous", address, "--rank", str(i)])
                      for i in range(1, size)]
        distributed.init_process_group("gloo", init_method=address, rank=rank, world_size=size)
        try:
            work(Team(rank, size))
        finally:
            distributed.destroy_process_group()
            for other in others:
                other.wait()
