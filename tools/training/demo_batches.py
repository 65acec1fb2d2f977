"""Tokenizer and training batches for the demo model."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from actorium.tools.demo.demo_stories import ANIMALS, CITIES, COLORS, NAMES, PLACES, TRAITS, WORDS
from actorium.tools.demo.demo_tasks import (
    MAX_PAIRS,
    TASKS,
    TaskItem,
    find,
    generate,
    is_held_out,
    lookup_answer,
    lookup_item,
    lookup_pairs,
    small_talk,
    tell,
)
from actorium.tools.training.trainer import (
    END_OF_TEXT,
    END_OF_TURN,
    token_id,
    trained_tokenizer,
)

TURN = "<|im_start|>"
VOCAB = 2048

CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)

SYSTEMS = (
    "You are a helpful assistant.",
    "You are a tiny demo model.",
    "Be brief.",
    "Answer the question.",
)

# Sums are the shortest and the hardest to learn, so they come more often and count for more.
_SHORT_TASKS = ("add",) * 5 + ("sort",) * 3 + ("reverse",) + ("copy",) * 3 + ("json",)
_WEIGHTS = {"add": 2.0}
_STORY_WEIGHT = 1.0
_TEXTS = 0.35
"""Share of the steps with a batch of stories and dialogues."""
_SUMS = 0.3
"""Share of bare sums among the batches that are drills early in training."""

BATCH_TOKENS = 2048
"""Tokens of a batch, in rows of 64 to 1024."""

_DRILL_END = 0.25
"""Share of training until drills, at first all, are replaced by recall."""


def build_tokenizer(seed: int) -> Tokenizer:
    """Trains a tokenizer on generated items."""
    return trained_tokenizer(_corpus(seed), (END_OF_TEXT, TURN, END_OF_TURN), VOCAB)


def _corpus(seed: int) -> Iterator[str]:
    for item in generate(seed, 3000):
        if item.task != "copy":
            yield item.prompt
            yield item.answer
    for word in (*ANIMALS, *WORDS, *NAMES, *CITIES, *COLORS, *TRAITS, *PLACES):
        for _ in range(60):
            yield f"{word} {word}"
    for question, answer in small_talk():
        yield from (question, answer, answer)
    for text in SYSTEMS:
        yield from (f"{text}\nsystem\nuser\nassistant\n",) * 50


class TrainingSample(NamedTuple):
    """One training sequence: token ids, and for each the weight of predicting it."""

    ids: list[int]
    weights: list[float]


class TrainingBatch(NamedTuple):
    """ids [B, T], right-padded; flat positions that predict, their targets and weights [N]."""

    ids: Tensor
    where: Tensor
    targets: Tensor
    weights: Tensor


def part_of(batch: TrainingBatch, rank: int, size: int) -> TrainingBatch:
    """Returns rank's of `size` parts of a batch, by rows; their positions together are the batch's.
    """
    parts = batch.ids.chunk(size)
    first = rank * parts[0].numel()
    at = batch.where - first
    mine = (at >= 0) & (at < parts[rank].numel()) & (batch.weights > 0)
    return TrainingBatch(parts[rank], *_even(at[mine], batch.targets[mine], batch.weights[mine]))


def _even(where: Tensor, targets: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Pads to a multiple of 128 positions without weight: shapes that recur are planned once."""
    more = -len(where) % 128
    return F.pad(where, (0, more)), F.pad(targets, (0, more)), F.pad(weights, (0, more))


def question_text(prompt: str, system: str | None = None) -> str:
    """Returns a conversation of one user message, open for the assistant's answer."""
    head = f"{TURN}system\n{system}{END_OF_TURN}\n" if system else ""
    return f"{head}{TURN}user\n{prompt}{END_OF_TURN}\n{TURN}assistant\n"


class TextSource:
    """Draws training batches; nothing it returns is in the held-out partition."""

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        self.tokenizer = tokenizer
        self.rng = random.Random(f"batches-{seed}")
        self.talk = small_talk()
        self.pad = token_id(tokenizer, END_OF_TEXT)

    def step(self, progress: float) -> list[TrainingBatch]:
        """Returns the batches of one optimizer step, each of `BATCH_TOKENS` tokens.

        progress: 0 at the start of training, 1 at its end; recall contexts grow with it.
        """
        chance = self.rng.random
        drill = chance() < 1 - progress / _DRILL_END
        sums = chance() < _SUMS
        if drill:
            batches = [self._drills()]
        else:
            batches = [self._packed(128, self._sum) if sums else self._recalls(progress)]
        batches.append(self._alone() if chance() < 0.5 else self._packed(256, self._short))
        if chance() < _TEXTS:
            batches.append(self._packed(256, self._text))
        return batches

    def drafts(self, progress: float) -> list[TrainingBatch]:
        """Returns the same for the MTP layer: mostly running text, which is what drafting is used
        on."""
        texts = [self._packed(256, self._text) for _ in range(3)]
        other = self._packed(256, self._short) if self.rng.random() < 0.7 else self._recalls(1.0)
        return [*texts, other]

    def _text(self) -> TrainingSample:
        draw = (self._dialogue, self._story, self._raw_story)
        return self.rng.choices(draw, (3, 4, 1))[0]()

    def _draw(self, task: str) -> TaskItem:
        while True:
            item = TASKS[task](self.rng)
            if not is_held_out(item):
                return item

    def _chat(self, turns: list[tuple[str, str, float]]) -> TrainingSample:
        ids: list[int] = []
        weights: list[float] = []
        system = self.rng.choice(SYSTEMS) if self.rng.random() < 0.12 else None
        for prompt, answer, weight in turns:
            asked = self.tokenizer.encode(question_text(prompt, system)).ids
            said = self.tokenizer.encode(f"{answer}{END_OF_TURN}\n").ids
            ids += asked + said
            # The newline after the turn belongs to the template, not to the answer.
            weights += [0.0] * len(asked) + [weight] * (len(said) - 1) + [0.0]
            system = None
        return TrainingSample(ids, weights)

    def _turn(self) -> tuple[str, str, float]:
        if self.rng.random() < 0.05:
            return (*self.rng.choice(self.talk), 0.5)
        item = self._draw(self.rng.choice(_SHORT_TASKS))
        return item.prompt, item.answer, _WEIGHTS.get(item.task, 1.0)

    def _short(self) -> TrainingSample:
        return self._chat([self._turn()])

    def _sum(self) -> TrainingSample:
        """Returns a sum as in a chat, without its marks: three instead of one."""
        item = self._draw("add")
        asked = self.tokenizer.encode(f"{item.prompt}\n").ids
        said = self.tokenizer.encode(f"{item.answer}\n").ids
        return TrainingSample(asked + said, [0.0] * len(asked) + [1.0] * len(said))

    def _dialogue(self) -> TrainingSample:
        return self._chat([self._turn() for _ in range(self.rng.randint(2, 4))])

    def _story(self) -> TrainingSample:
        item = self._draw("story")
        return self._chat([(item.prompt, item.answer, _STORY_WEIGHT)])

    def _raw_story(self) -> TrainingSample:
        text = tell(self.rng, self.rng.choice(ANIMALS))
        ids = self.tokenizer.encode(text + END_OF_TEXT).ids
        return TrainingSample(ids, [0.0] + [_STORY_WEIGHT] * (len(ids) - 1))

    def _drills(self) -> TrainingBatch:
        """Returns lines of repeated tokens, and pairs in two orders: copying is learned from these
        first."""
        length = self.rng.choice((64, 128))
        draw = (self._line, self._pairs)
        rows = [self.rng.choices(draw, (3, 2))[0](length) for _ in range(BATCH_TOKENS // length)]
        return self._batch(length, rows)

    def _line(self, length: int) -> TrainingSample:
        """Returns words, or any tokens, until the row is full."""
        rng, count = self.rng, self.rng.randint(2, length // 2)
        if rng.random() < 0.5:
            once = self.tokenizer.encode("".join(f" {rng.choice(WORDS)}" for _ in range(count))).ids
        else:
            once = [rng.randrange(3, self.tokenizer.get_vocab_size()) for _ in range(count)]
        ids = (once * (length // len(once) + 1))[:length]
        return TrainingSample(ids, [0.0] * len(once) + [0.5] * (len(ids) - len(once)))

    def _pairs(self, length: int) -> TrainingSample:
        rng = self.rng
        pairs = list(lookup_pairs(rng, rng.randint(2, length // 6)).items())
        again = rng.sample(pairs, len(pairs))
        ids: list[int] = []
        weights: list[float] = []
        for order, weight in ((pairs, 0.0), (again, 1.0)):
            for thing, animal in order:
                ids += self.tokenizer.encode(f" {thing} {animal},").ids
                weights += [0.0] * (len(ids) - len(weights) - 2) + [weight, 0.0]
        return TrainingSample(ids, weights)

    def _recalls(self, progress: float) -> TrainingBatch:
        """Returns long contexts, each with several questions: one answer each would teach too
        little."""
        shares = (2, 4, 3, 2) if progress > 0.6 else (6, 4, 1, 0)
        length = self.rng.choices((128, 256, 512, 1024), shares)[0]
        questions = min(16, length // 40)
        most = min(MAX_PAIRS, int((length - 24 - 18 * questions) / 3.1))
        counts = (self.rng.randint(questions, most) for _ in range(BATCH_TOKENS // length))
        return self._batch(length, [self._lookup(count, questions) for count in counts])

    def _lookup(self, count: int, questions: int) -> TrainingSample:
        while True:
            pairs = lookup_pairs(self.rng, count)
            keys = self.rng.sample(list(pairs), questions)
            first = lookup_item(pairs, keys[0])
            if not is_held_out(first):
                break
        turns = [(first.prompt, first.answer, 1.0)]
        turns += [(find(key), lookup_answer(key, pairs[key]), 1.0) for key in keys[1:]]
        return self._chat(turns)

    def _alone(self) -> TrainingBatch:
        return self._batch(64, [self._short() for _ in range(BATCH_TOKENS // 64)])

    def _packed(self, length: int, draw: Callable[[], TrainingSample]) -> TrainingBatch:
        """Returns rows filled with samples, one after the other."""
        rows: list[TrainingSample] = []
        for _ in range(BATCH_TOKENS // length):
            ids: list[int] = []
            weights: list[float] = []
            while len(ids) < length:
                sample = draw()
                ids += sample.ids
                weights += sample.weights
            rows.append(TrainingSample(ids, weights))
        return self._batch(length, rows)

    def _batch(self, length: int, samples: list[TrainingSample]) -> TrainingBatch:
        """Samples as rows of `length`, cut or padded."""
        ids = torch.full((len(samples), length), self.pad)
        weights = torch.zeros(len(samples), length)
        for row, sample in enumerate(samples):
            size = min(length, len(sample.ids))
            ids[row, :size] = torch.tensor(sample.ids[:size])
            weights[row, :size] = torch.tensor(sample.weights[:size])
        ahead = F.pad(weights[:, 1:], (0, 1)).flatten()
        where = ahead.nonzero().squeeze(1)
        return TrainingBatch(ids, *_even(where, ids.flatten()[where + 1], ahead[where]))
