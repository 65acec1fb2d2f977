"""Logits processors see each row's own tokens, however rows are batched, cut, drafted and computed
again; and cost nothing where none is named."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from helpers_graphs import with_graphs
from helpers_kinds import write_kind
from helpers_plugins import EXAMPLE
from helpers_speculation import Guess, Hand, Work, make_runner, tokens_of
from helpers_worker import CPU, Output, Ring
from torch import Tensor
from transformers import NoRepeatNGramLogitsProcessor

from actorium.actors.config.tree import Config, ModelConfig
from actorium.actors.params import ProcessorCall, ResolvedParams
from actorium.actors.plugins.logits_processors import LogitsProcessor, ProcessedRows
from actorium.gpu.models.registry import load_model
from actorium.gpu.step.logits_processing import LogitsProcessing
from actorium.gpu.step.staging import DeviceArrays, HostArrays
from actorium.gpu.step.tables import SlotTables

VOCAB_STEP = 7


class Witness:
    """Adds to each logit a number that depends on all that a processor may see, and writes down
    what it saw."""

    arguments = ("weight",)

    def __init__(self) -> None:
        self.seen: set[tuple[float, int, tuple[int, ...]]] = set()

    def check(self, args: Any) -> None:
        pass

    def __call__(self, logits: Tensor, rows: ProcessedRows) -> Tensor:
        for i, args in enumerate(rows.args):
            tokens = rows.tokens[i].tolist()
            length, prompt = int(rows.lengths[i]), int(rows.prompt_lengths[i])
            assert 0 < prompt <= length and set(tokens[length:]) <= {-1} and min(
                tokens[:length]) >= 0
            self.seen.add((args["weight"], prompt, tuple(tokens[:length])))
            favourite = (sum((at + 1) * token for at, token in enumerate(tokens[:length])) + prompt
                         ) % logits.shape[1]
            logits[i, favourite] += args["weight"]
        return logits


class Reversed:
    """Turns the order of the vocabulary round: not the same before another as after it."""

    arguments = ()

    def check(self, args: Any) -> None:
        pass

    def __call__(self, logits: Tensor, rows: ProcessedRows) -> Tensor:
        return logits.flip(1)


def named(*calls: tuple[str, dict[str, Any]], **params: Any) -> ResolvedParams:
    return ResolvedParams(**{"max_tokens": 16, "temperature": 0.0} | params, processors=tuple(
        ProcessorCall(name, args) for name, args in calls))


WITNESS, REVERSED = ("witness", {"weight": 30.0}), ("reversed", {})
PROMPTS = [[3, 14, 15, 92], [65], list(range(40, 75)), [8, 97, 9, 3, 2], [7] * 17, [20, 21, 22]]
WORK = Work(PROMPTS, [
    named(WITNESS), ResolvedParams(max_tokens=16, temperature=0.0), named(WITNESS, temperature=1.0),
    named(REVERSED, WITNESS, temperature=0.7, repetition_penalty=1.4),
    named(WITNESS, REVERSED, logprobs=2),
    named(("witness", {"weight": 5.0}), temperature=1.0, top_k=20)])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("attention")
    write_kind(path, "attention")
    return load_model(path, Config(model=ModelConfig(max_model_len=96)), CPU, lambda *_: None)


@pytest.fixture
def witness() -> Witness:
    return Witness()


@pytest.fixture
def plugged(witness: Witness, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every runner has the processors."""
    processors: dict[str, LogitsProcessor] = {"witness": witness, "reversed": Reversed()}
    monkeypatch.setattr("actorium.gpu.step.runner.LogitsProcessing",
                        lambda _, tables: installed(processors, tables))


def installed(processors: dict[str, Any], tables: SlotTables) -> LogitsProcessing:
    """These processors, over tables as an engine with some has them."""
    tables.keep_history()
    return LogitsProcessing(processors, tables)


@pytest.mark.usefixtures("plugged")
def test_rows_see_the_tokens_of_their_own_sequence(model: Any, witness: Witness) -> None:
    outputs = WORK.plain(model)
    for prompt, params, out in zip(PROMPTS, WORK.params, outputs, strict=True):
        seen = {(prompt_len, tokens) for weight, prompt_len, tokens in witness.seen
                if params.processors and tokens[:prompt_len] == tuple(prompt)}
        whole = (*prompt, *out.tokens)
        assert len(out.tokens) == 16
        assert seen == {(len(prompt), whole[:size]) for size in range(
            len(prompt), len(whole))} if params.processors else not seen


@pytest.mark.usefixtures("plugged")
@pytest.mark.parametrize("arrays", [HostArrays, DeviceArrays])
def test_each_alone_gives_the_same(model: Any, arrays: Any) -> None:
    together = WORK.plain(model, {"arrays": arrays})
    for i, (prompt, params) in enumerate(zip(PROMPTS, WORK.params, strict=True)):
        ring = Ring(make_runner(model, 0, arrays=arrays))
        ring.submit(prompt, params, i + 1)
        ring.submit(prompt, msgspec.structs.replace(params, processors=()), i + 1)
        alone, without = ring.run()
        assert alone.tokens == together[i].tokens
        assert (without.tokens != alone.tokens) == bool(params.processors)


@pytest.mark.usefixtures("plugged")
@pytest.mark.parametrize("arrays", [HostArrays, DeviceArrays])
@pytest.mark.parametrize("drafts", [1, 4])
def test_drafts_change_nothing(model: Any, drafts: int, arrays: Any) -> None:
    want = WORK.plain(model)
    for right in (lambda seed, at: True, lambda seed, at: (seed * 31 + at * 17) % 5 < 3,
                  lambda seed, at: False):
        ring, out = WORK.guessed(model, want, drafts, right, runner={"arrays": arrays})
        assert tokens_of(out) == tokens_of(want)


@pytest.mark.usefixtures("plugged", "as_on_a_device")
def test_layers_from_graphs_change_nothing(model: Any) -> None:
    """The kernels' tables of a device; the graphs' logits are sampled outside of them."""
    want = tokens_of(WORK.plain(model, {"arrays": DeviceArrays}))
    runner = make_runner(model, 0, arrays=DeviceArrays)
    graphs = with_graphs(runner, [1, 2, 4, 8])
    assert tokens_of(WORK.ring(runner).run()) == want
    assert graphs.replays > 10


@pytest.mark.usefixtures("plugged")
def test_preemption_and_chunks_change_nothing(model: Any) -> None:
    want = tokens_of(WORK.plain(model))
    for slots, ring in ((9, {"force_preempt_every": 3}), (9, {"budget": 8}),
                        (3, {"force_preempt_every": 4, "overlap": False})):
        assert tokens_of(WORK.plain(model, {"slots": slots}, **ring)) == want


@pytest.mark.usefixtures("plugged")
def test_a_new_worker_goes_on_from_the_tokens(model: Any) -> None:
    """As after a death: what was emitted comes back with the admission."""
    (whole,) = Work([PROMPTS[0]], [named(WITNESS)]).plain(model)
    hand = Hand(make_runner(model, 0))
    seq = hand.admit([*PROMPTS[0], *whole.tokens[:5]], named(WITNESS), 0, len(PROMPTS[0]))
    while not seq.finish:
        hand.decode(0)
    assert seq.tokens == [*PROMPTS[0], *whole.tokens]


def test_nothing_is_kept_or_run_where_none_is_named(model: Any,
                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    for cls, name in ((LogitsProcessing, "apply"), (SlotTables, "note_sampled")):
        monkeypatch.setattr(cls, name, lambda *_: pytest.fail("a processor's work was done"))
    runner = make_runner(model, 2)
    Work(PROMPTS, [ResolvedParams(max_tokens=4)] * len(PROMPTS)).ring(runner).run()
    assert runner.tables.history is None


# --- processors with faults -----------------------------------------------------------------------

def raises(logits: Tensor, rows: ProcessedRows) -> Tensor:
    logits[:] = rows.tokens[:] = rows.lengths[:] = 0
    raise RuntimeError("what it says is nobody's business")


def leaves(logits: Tensor, rows: ProcessedRows) -> Tensor:
    raise SystemExit


FAULTS = {"raises": (raises, "raises: raised RuntimeError"),
          "leaves": (leaves, "leaves: raised SystemExit"),
          "none": (lambda logits, rows: None, "none: must return floating-point logits of"),
          "narrow": (lambda logits, rows: logits[:, 1:], "narrow: must return floating-point"),
          "mask": (lambda logits, rows: logits > 0, "mask: must return .* got torch.bool of"),
          "nan": (lambda logits, rows: logits.fill_(float("nan")), "nan: its largest logit is not"),
          "inf": (lambda logits, rows: logits + float("inf"), "inf: its largest logit is not"),
          "low": (lambda logits, rows: logits.fill_(-float("inf")), "low: its largest logit is"),
          "lost": (None, "lost: is not installed any longer")}


@pytest.mark.parametrize("arrays", [HostArrays, DeviceArrays])
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_ends_its_own_request_alone(model: Any, witness: Witness, name: str,
                                            arrays: Any) -> None:
    processors = {"witness": witness} | {key: own for key, (own, _) in FAULTS.items() if own}
    good = [named(WITNESS), ResolvedParams(max_tokens=16, temperature=0.0)]

    def run(more: list[ResolvedParams], **how: Any) -> list[Output]:
        runner = make_runner(model, 0, arrays=arrays)
        runner.processing = installed(processors, runner.tables)
        return Work(PROMPTS[:2 + len(more)], good + more).ring(runner, **how).run()

    want = tokens_of(run([]))
    for overlap in (True, False):
        got = run([named((name, {})), named(WITNESS, (name, {}), temperature=1.0),
                   named((name, {}), WITNESS)], overlap=overlap)
        assert tokens_of(got[:2]) == want
        for out in got[2:]:
            assert out.finish == "error" and not out.tokens
            assert re.match(f"logits_processors: {FAULTS[name][1]}", out.error or "")


def test_one_that_cannot_work_with_one_of_its_rows_fails_that_one(model: Any) -> None:
    """A call is for the rows of several requests: only the one whose arguments, or tokens, it
    cannot work with fails, when it comes to them."""
    def picky(logits: Tensor, rows: ProcessedRows) -> Tensor:
        logits.mul_(-1)  # in place, before it fails
        for args, length, prompt in zip(rows.args, rows.lengths, rows.prompt_lengths, strict=True):
            assert int(length - prompt) < args["most"]
        return logits

    def run(*most: int) -> list[Output]:
        runner = make_runner(model, 0)
        runner.processing = installed({"picky": picky}, runner.tables)
        params = [named(("picky", {"most": own})) for own in most]
        return Work(PROMPTS[:3], params).ring(runner).run()

    want, got = run(99, 99, 99), run(99, 5, 99)
    assert tokens_of([got[0], got[2]]) == tokens_of([want[0], want[2]])
    assert got[1].error == "logits_processors: picky: raised AssertionError"
    assert got[1].tokens == want[1].tokens[:5]


@pytest.mark.parametrize("arrays", [HostArrays, DeviceArrays])
@pytest.mark.parametrize("fails", [raises, lambda logits, rows: logits * float("nan")])
def test_what_fails_behind_a_wrong_draft_fails_nothing(model: Any, fails: Any, arrays: Any) -> None:
    """A draft is no token before it is accepted: what a processor does with one that is wrong does
    not count. Behind an accepted one it does."""
    faulty: Callable[[tuple[int, ...]], bool]

    def careful(logits: Tensor, rows: ProcessedRows) -> Tensor:
        for row, (text, size) in enumerate(zip(rows.tokens, rows.lengths, strict=True)):
            if faulty(tuple(text[:size].tolist())):
                logits[row] = fails(logits[row:row + 1], rows)[0]
        return logits

    def guessed(right: Callable[[int, int], bool]) -> list[Output]:
        runner = make_runner(model, 3, guess := Guess(right), arrays=arrays)
        runner.processing = installed({"careful": careful}, runner.tables)
        guess.tables = runner.tables
        guess.wholes = {i + 1: list(whole) for i, whole in enumerate(wholes)}
        return Work(PROMPTS, [named(("careful", {}))] * len(PROMPTS)).ring(
            runner, speculative="mtp:3,fixed").run()

    want = Work(PROMPTS, [named()] * len(PROMPTS)).plain(model)
    wholes = [(*prompt, *out.tokens) for prompt, out in zip(PROMPTS, want, strict=True)]
    texts = {whole[:size] for whole in wholes for size in range(len(whole))}
    faulty = lambda text: text not in texts  # noqa: E731
    assert tokens_of(guessed(lambda seed, at: at % 3 > 0)) == tokens_of(want)
    faulty = wholes[0][:len(PROMPTS[0]) + 6].__eq__
    first, *others = guessed(lambda seed, at: True)
    assert tokens_of(others) == tokens_of(want[1:])
    assert (first.error or "").startswith("logits_processors: careful: ")
    assert first.tokens == want[0].tokens[:len(first.tokens)] and len(first.tokens) <= 6


# --- the example of docs/plugins.md ---------------------------------------------------------------

@pytest.fixture
def no_repeated_ngrams(monkeypatch: pytest.MonkeyPatch) -> LogitsProcessor:
    monkeypatch.syspath_prepend(str(EXAMPLE))
    from actorium_example.no_repeated_ngrams import (  # type: ignore[import-not-found]
        NO_REPEATED_NGRAMS,
    )

    monkeypatch.delitem(sys.modules, "actorium_example")
    processor: LogitsProcessor = NO_REPEATED_NGRAMS
    return processor


def test_the_example_does_what_transformers_does(no_repeated_ngrams: LogitsProcessor) -> None:
    torch.manual_seed(1)
    for length, size in ((1, 2), (2, 2), (9, 2), (30, 3), (40, 5), (3, 5)):
        tokens = torch.randint(0, 4, (6, length))
        logits = torch.randn(6, 11)
        want = NoRepeatNGramLogitsProcessor(size)(tokens, logits.clone())
        padded = torch.nn.functional.pad(tokens, (0, VOCAB_STEP), value=-1)
        lengths = torch.full((6,), length)
        got = no_repeated_ngrams(logits.clone(), ProcessedRows(
            [{"ngram_size": size}] * 6, padded, lengths, lengths))
        assert torch.equal(got, want)


def test_the_example_in_the_worker(model: Any, no_repeated_ngrams: LogitsProcessor) -> None:
    def run(sizes: list[int]) -> list[Output]:
        runner = make_runner(model, 0)
        runner.processing = installed({"own": no_repeated_ngrams}, runner.tables)
        return Work([[7, 7, 7]] * len(sizes), [
            named(("own", {"ngram_size": size}), max_tokens=60, logit_bias={1: 9.0, 2: 9.0})
            if size else named(max_tokens=60, logit_bias={1: 9.0, 2: 9.0})
            for size in sizes]).ring(runner).run()

    for size, out in zip(sizes := [0, 2, 3], run(sizes), strict=True):
        tokens = [7, 7, 7, *out.tokens]
        for n in (2, 3):
            ngrams = [tuple(tokens[i:i + n]) for i in range(2, len(tokens) - n + 1)]
            assert (len(set(ngrams)) == len(ngrams)) == (0 < size <= n)
