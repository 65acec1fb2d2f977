"""A ring of scheduler and null worker that knows grammars."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
from helpers_scheduler import CLIENT, Ring, column

import actorium
from actorium.actors.config.tree import Config
from actorium.actors.core import Context
from actorium.actors.messages import Masks, StepPlan, Submit, TokenRules, ToWorker
from actorium.actors.params import ResolvedParams, TextParams
from actorium.actors.scheduler.core import SchedulerCore
from actorium.actors.structured.grammar import (
    GrammarVocabulary,
    ebnf_grammar,
    json_grammar,
    regex_grammar,
)

MODEL = Path(actorium.__file__).parent / "tools" / "demo" / "demo_model"
SIZE, EOS = 1920, 2
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 99},
                                           "b": {"enum": ["x", "yy", "zzz"]}},
          "required": ["a", "b"], "additionalProperties": False}
GRAMMARS = [json_grammar(json.dumps(SCHEMA)), regex_grammar("[a-f]{2,9}(-[0-9]{1,4}){0,3}"),
            ebnf_grammar('start: "(" start* ")" | /[a-z]/'), regex_grammar(r"[^\n]{1,200}")]


@cache
def vocabulary() -> GrammarVocabulary:
    return GrammarVocabulary(MODEL / "tokenizer.json", SIZE, [EOS])


def follows(grammar: str, tokens: list[int], ended: bool) -> bool:
    """Whether the grammar allows these tokens; ended: and an end here, which is the last."""
    matcher = vocabulary().matcher(grammar)
    if not matcher.accept(tokens):
        return False
    return not ended or (tokens[-1] == EOS and matcher.over)


def says(grammar: str, text: str) -> bool:
    """Whether the grammar allows the text, spelt letter by letter, and an end behind it."""
    words = vocabulary()
    matcher = words.matcher(grammar)
    for char in text:
        if matcher.over or not matcher.accept(words._tokens.tokenize_str(char)):
            return False
    return bool(matcher.inner.is_accepting())


class MaskedRing(Ring):
    """`Ring`, whose scheduler can read grammars."""

    def __init__(self, settings: Config, **more: Any) -> None:
        super().__init__(settings, start=False, **more)
        self.settings = settings
        self.scheduler = SchedulerCore(Context(settings, Path("/nowhere"), "scheduler", 3, 0),
                                       load=vocabulary)
        self.followed = 0
        """Plans whose masks came behind them."""
        self.start()

    def structured(self, grammar: str, prompt: int = 5, max_tokens: int = 16, n: int = 1,
                   seed: int | None = None, deadline: float | None = None,
                   rules: TokenRules | None = None, min_tokens: int = 0) -> str:
        """Submit a request with a grammar, or with token rules."""
        number = len(self.submits)
        submit = Submit(
            rid=f"g{number}", client=CLIENT, prompt=column(list(range(prompt))), n=n,
            params=ResolvedParams(max_tokens=max_tokens, masked=True, eos_ids=(EOS,),
                                  min_tokens=min_tokens),
            text=TextParams(), seed=number if seed is None else seed, deadline=deadline,
            grammar=grammar, rules=rules)
        self.submits[submit.rid] = submit
        self.tell(submit)
        return submit.rid

    @property
    def in_flight(self) -> int:
        held = self.worker._held is not None
        return sum(isinstance(plan, StepPlan) for plan in self.plans) + held + len(self.results)

    def work(self) -> bool:
        """A plan; masks that follow on the one that was run before count as part of it."""
        if not self.plans:
            return False
        message = self.plans.popleft()
        self.followed += isinstance(message, Masks)
        frame = msgspec.msgpack.encode(message)
        self.worker.on_message(msgspec.msgpack.decode(frame, type=ToWorker), self.now)
        self.worked += 1
        self.results += [send.message for send in self.worker.on_wake(self.now)]
        return True


