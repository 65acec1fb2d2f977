"""Speculative decoding in the worker: whatever the drafts are, the tokens are those without any."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers_kinds import write_kind
from helpers_pairs import pairs
from helpers_speculation import Guess, Hand, Work, i4, make_runner, mask, tokens_of
from helpers_worker import CPU, Output

from actorium.actors.config.tree import Config, ModelConfig, SpeculationConfig
from actorium.actors.messages import Admit, RowMask, StepPlan
from actorium.actors.params import ResolvedParams
from actorium.gpu.models.registry import load_model
from actorium.gpu.step.staging import DeviceArrays, HostArrays

GREEDY = ResolvedParams(max_tokens=14, temperature=0.0)
PROMPTS = [[3, 14, 15, 92], [65], list(range(40, 75)), [8, 97, 9, 3, 2], [7] * 17, [100, 1, 50],
           [9, 8, 7, 6, 5, 4, 3], [150, 20] * 5, [33] * 2, [44, 45, 46, 47]]
WHOLE = Work(PROMPTS, [GREEDY] * len(PROMPTS))
MIXED = [
    ResolvedParams(max_tokens=16, temperature=0.9),
    ResolvedParams(max_tokens=16, temperature=0.0),
    ResolvedParams(max_tokens=16, temperature=1.3, top_k=20),
    ResolvedParams(max_tokens=16, temperature=1.3, top_p=0.8),
    ResolvedParams(max_tokens=16, temperature=1.2, min_p=0.05),
    ResolvedParams(max_tokens=16, temperature=0.8, repetition_penalty=1.6),
    ResolvedParams(max_tokens=16, temperature=0.8, presence_penalty=1.5),
    ResolvedParams(max_tokens=16, temperature=0.0, frequency_penalty=1.8),
    ResolvedParams(max_tokens=16, temperature=1.0, logit_bias={5: 6.0, 77: -100.0}),
    ResolvedParams(max_tokens=16, temperature=1.0, eos_ids=tuple(range(40)), min_tokens=7),
    ResolvedParams(max_tokens=16, temperature=1.0, logprobs=3),
    ResolvedParams(max_tokens=16, temperature=1.4, top_k=60, top_p=0.95, min_p=0.001, logprobs=0,
             repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.7,
             logit_bias={5: 4.0, 6: 3.5}, eos_ids=tuple(range(60, 75)), min_tokens=9),
    ResolvedParams(max_tokens=20, temperature=1.0, logprobs=0, logprob_ids=(9, 120, 5, 64)),
    ResolvedParams(max_tokens=1, temperature=1.0), ResolvedParams(max_tokens=2, temperature=1.0),
    ResolvedParams(max_tokens=3, temperature=0.0, logprobs=1),
    ResolvedParams(max_tokens=5000, temperature=0.5),
]
SAMPLED = Work([*(PROMPTS[i % 5] for i in range(len(MIXED) - 1)), [65] * 75], MIXED)
"""The last one ends where the model does."""

FEW = (("attention", 1, HostArrays), ("attention", 2, DeviceArrays), ("hybrid", 4, DeviceArrays),
       ("hybrid", 16, HostArrays))
"""Both models with both kinds of tables, with few drafts and with many."""

Right = Callable[[int, int], bool]
Undrafted = Callable[[Work, Any], list[Output]]
PATTERNS: dict[str, Right] = {
    "none": lambda seed, at: False,
    "all": lambda seed, at: True,
    "some": lambda seed, at: (seed * 31 + at * 17) % 5 < 3,
}


def load(path: Path, speculative: str = "off") -> Any:
    config = Config(model=ModelConfig(max_model_len=96),
                    speculation=SpeculationConfig(speculative=speculative))
    return load_model(path, config, CPU, lambda *_: None)


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    @functools.cache
    def model_of(name: str) -> Any:
        path = tmp_path_factory.mktemp(name)
        write_kind(path, name)
        return load(path, "auto" if name in ("hybrid", "deepseek") else "off")

    return model_of


NAMES = ("attention", "windows", "hybrid", "deepseek")


@pytest.fixture(params=NAMES)
def model(request: pytest.FixtureRequest, make: Callable[[str], Any]) -> Any:
    return make(request.param)


@pytest.fixture(scope="module")
def undrafted() -> Undrafted:
    """The output of a model without drafts, which many tests ask for: made once."""
    known: dict[tuple[int, int], tuple[Any, list[Output]]] = {}

    def undrafted_output(work: Work, model: Any) -> list[Output]:
        key = id(work), id(model)
        if key not in known:
            known[key] = model, work.plain(model)
        return known[key][1]

    return undrafted_output


@pytest.fixture
def plain(make: Callable[[str], Any]) -> Any:
    """Attention alone."""
    return make("attention")


# --- the same tokens -----------------------------------------------------------------------------

@pytest.mark.parametrize(("model", "drafts"), [
    *pairs(NAMES, [1, 4]), *(pytest.param(name, rarer, marks=pytest.mark.slow)
                             for name in NAMES for rarer in (2, 3))], indirect=["model"])
def test_greedy_whatever_is_accepted(model: Any, drafts: int, undrafted: Undrafted) -> None:
    """Chunks of prompts run beside windows, and requests come while others run."""
    want = undrafted(WHOLE, model)
    for right in PATTERNS.values():
        _, got = WHOLE.guessed(model, want, drafts, right, runner={"slots": 6}, budget=24)
        assert tokens_of(got) == tokens_of(want)


def test_more_is_accepted_in_fewer_steps(plain: Any, undrafted: Undrafted) -> None:
    """13 tokens after the first, in windows of 3: 13 steps, or 5."""
    for right, steps in ((PATTERNS["none"], [1] * 13), (PATTERNS["all"], [3, 3, 3, 3, 1])):
        guess = Guess(right)
        hand = Hand(make_runner(plain, 2, guess))
        guess.tables = hand.runner.tables
        guess.wholes = {1: PROMPTS[0] + undrafted(WHOLE, plain)[0].tokens}
        seq = hand.admit(PROMPTS[0], GREEDY, 2)
        while not seq.finish:
            hand.decode(2)
        assert seq.emitted == [1, *steps]


@pytest.mark.parametrize(("name", "drafts"), [
    ("attention", 1), ("hybrid", 2), ("attention", 3), *(
        pytest.param(*rarer, marks=pytest.mark.slow)
        for rarer in (("hybrid", 1), ("attention", 2), ("hybrid", 3)))])
def test_every_mixture(make: Callable[[str], Any], name: str, drafts: int) -> None:
    """Each of 64 sequences has another set of right drafts: of two windows of three and less."""
    model, bits = make(name), 6
    work = Work([PROMPTS[0]] * (1 << bits), [ResolvedParams(max_tokens=bits + 1, temperature=0.0)]
                * (1 << bits))
    want = Work(work.prompts[:1], work.params[:1]).plain(model) * (1 << bits)
    _, got = work.guessed(model, want, drafts, runner={"slots": 33, "pages": 600},
                          right=lambda seed, at: bool(seed - 1 >> at - len(PROMPTS[0]) & 1))
    assert tokens_of(got) == tokens_of(want)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow)
                                      for seed in (1, 2))])
def test_drafts_that_change_from_step_to_step(model: Any, seed: int, undrafted: Undrafted) -> None:
    rng = random.Random(seed)
    want = undrafted(WHOLE, model)
    _, got = WHOLE.guessed(model, want, 4, lambda *_: rng.random() < 0.7,
                           lambda: rng.choice([0, 0, 1, 2, 3, 4]), {"slots": 5}, budget=24)
    assert tokens_of(got) == tokens_of(want)


@pytest.mark.parametrize(("name", "drafts", "arrays"), [
    pytest.param(name, drafts, arrays, marks=[pytest.mark.slow] * (
        (name, drafts, arrays) not in FEW))
    for name in ("attention", "hybrid") for drafts, arrays in (
        (1, HostArrays), (2, HostArrays), (2, DeviceArrays), (4, DeviceArrays), (16, HostArrays))])
def test_every_parameter_of_sampling(make: Callable[[str], Any], name: str, drafts: int,
                                     arrays: Any, undrafted: Undrafted) -> None:
    """With a seed; ends inside of windows; log-probabilities of what is emitted."""
    model = make(name)
    want = undrafted(SAMPLED, model)
    _, got = SAMPLED.guessed(model, want, drafts, PATTERNS["some"], runner={"arrays": arrays},
                             budget=40)
    assert tokens_of(got) == tokens_of(want)
    assert {out.finish for out in want} == {"stop", "length"}
    for one, other in zip(got, want, strict=True):
        same_logprobs(one, other)
    (named,) = [out for out, params in zip(got, MIXED, strict=True) if params.logprob_ids]
    assert all(np.frombuffer(part.top_ids, np.int32).reshape(-1, 4).tolist()
               == [[9, 120, 5, 64]] * (len(part.chosen) // 4) for part in named.logprobs)


def same_logprobs(one: Output, other: Output) -> None:
    for name, kind, atol in (("chosen", np.float32, 1e-5), ("top_logprobs", np.float32, 1e-5),
                             ("ranks", np.int32, 0), ("top_ids", np.int32, 0)):
        a, b = (np.concatenate([np.frombuffer(getattr(part, name), kind)
                                for part in out.logprobs] or [np.zeros(0)])
                for out in (one, other))
        np.testing.assert_allclose(a, b, atol=atol, rtol=1e-5)
    assert len(one.logprobs) == 0 or sum(
        len(part.chosen) // 4 for part in one.logprobs) == len(one.tokens)


@pytest.mark.parametrize(("model", "every", "drafts"), pairs(NAMES, [(3, 2), (5, 4)]),
                         indirect=["model"])
def test_preemptions_and_prefixes(model: Any, every: int, drafts: int, undrafted: Undrafted
                                  ) -> None:
    twice = Work(PROMPTS * 2, [GREEDY] * 2 * len(PROMPTS))
    want = undrafted(WHOLE, model) * 2
    ring, got = twice.guessed(model, want, drafts, PATTERNS["some"], budget=24,
                              force_preempt_every=every,
                              runner={"slots": 5, "pages": 60, "checkpoints": 4})
    assert tokens_of(got) == tokens_of(want)
    assert ring.preemptions >= 4
    assert any(out.cached for out in got[len(PROMPTS):])


def test_aborts(model: Any, undrafted: Undrafted) -> None:
    """The others go on, and who comes next finds nothing of those that went."""
    want, guess = undrafted(WHOLE, model), Guess(PATTERNS["some"])
    runner = make_runner(model, 3, guess, slots=4, pages=60)
    guess.tables = runner.tables
    guess.wholes = {i + 1: prompt + out.tokens
                    for i, (prompt, out) in enumerate(zip(PROMPTS, want, strict=True))}
    ring = WHOLE.ring(runner, speculative="mtp:3,fixed", budget=24)
    for number in (1, 3, 8):
        for _ in range(4):
            ring.step()
        ring.cancel(number)
    got = ring.run()
    assert [out.finish for out in got].count("abort") >= 2
    for one, other in zip(got, want, strict=True):
        if one.finish != "abort":
            assert tokens_of([one]) == tokens_of([other])
        assert one.tokens == other.tokens[:len(one.tokens)]


@pytest.mark.parametrize(("model", "page_size"), pairs(NAMES, [1, 8]), indirect=["model"])
def test_the_models_length_ends_a_window(model: Any, page_size: int) -> None:
    """96 tokens, with windows that reach beyond them."""
    prompts = [[4] * n for n in (70, 90, 93, 94, 95)]
    work = Work(prompts, [ResolvedParams(max_tokens=5000, temperature=0.0)] * 5)
    want = work.plain(model)
    _, got = work.guessed(model, want, 4, PATTERNS["all"],
                          runner={"page_size": page_size, "pages": 600})
    assert tokens_of(got) == tokens_of(want)
    assert [len(out.tokens) for out in got] == [26, 6, 3, 2, 1]


# --- the model's own drafts ----------------------------------------------------------------------

@pytest.mark.parametrize(("name", "drafts", "arrays"), [
    pytest.param(name, drafts, arrays, marks=[pytest.mark.slow] * ((name, drafts, arrays) not in (
        ("hybrid", 3, DeviceArrays), ("deepseek", 3, HostArrays))))
    for name in ("hybrid", "deepseek") for drafts in (1, 3) for arrays in (HostArrays, DeviceArrays)
])
def test_own_drafts_change_no_token(make: Callable[[str], Any], name: str, drafts: int,
                                    arrays: Any, undrafted: Undrafted) -> None:
    model = make(name)
    want = undrafted(SAMPLED, model)
    runner = make_runner(model, drafts, slots=6, mtp=True, arrays=arrays)
    ring = SAMPLED.ring(runner, budget=40, speculative=f"mtp:{drafts},fixed",
                        force_preempt_every=11)
    assert tokens_of(ring.run()) == tokens_of(want)


@pytest.mark.parametrize("name", ["hybrid", "deepseek"])
def test_drafts_after_windows_are_those_after_a_prompt(make: Callable[[str], Any],
                                                       name: str) -> None:
    """Whatever was accepted before, a sequence's next drafts are those of one that is admitted
    with the same tokens: keys and values of what was not accepted have been overwritten."""
    model, rng = make(name), random.Random(2)
    prompts = [[3, 14, 15, 92], list(range(40, 60)), [7] * 9]
    work = Work(prompts, [ResolvedParams(max_tokens=30, temperature=0.0)] * 3)
    wholes = [p + out.tokens for p, out in zip(prompts, work.plain(model), strict=True)]
    hand = Hand(make_runner(model, 3, mtp=True))
    seqs = [hand.admit(prompt, work.params[0], 3) for prompt in prompts]
    table = hand.runner.tables.drafts.tokens
    fresh = make_runner(model, 3, mtp=True, slots=40, pages=600)
    others, compared = Hand(fresh), 0
    for _ in range(8):
        for seq, whole in zip(seqs, wholes, strict=True):
            if seq.finish:
                continue
            n = len(seq.tokens)
            others.admit(seq.tokens[:-1], work.params[0], 3, prompt=seq.prompt)
            assert others.seqs[-1].tokens == seq.tokens
            assert table[seq.slot].tolist() == fresh.tables.drafts.tokens[len(others.seqs)].tolist()
            compared += 1
            for i in range(rng.randrange(4)):
                table[seq.slot, i] = whole[n + i] if n + i < len(whole) else 0
        hand.decode(3)
    assert compared > 15
    assert all(seq.tokens == whole[:len(seq.tokens)]
               for seq, whole in zip(seqs, wholes, strict=True))
    assert max(max(seq.emitted) for seq in seqs) >= 3


@pytest.mark.parametrize("name", ["hybrid", "deepseek"])
def test_prompts_are_whole_where_nothing_is_drafted(make: Callable[[str], Any], name: str) -> None:
    """In chunks, beside others, without drafts: the first drafts later miss nothing of the prompt.
    """
    model, prompt = make(name), PROMPTS[2]
    params = ResolvedParams(max_tokens=9, temperature=0.0)
    runner = make_runner(model, 2, mtp=True)
    pages = i4(*range(1, 13))
    runner.run(StepPlan(1, 1, admit=[Admit(1, i4(*prompt), len(prompt), 0, pages, params, 1)],
                        extend=i4((1, 13))))
    other = Admit(2, i4(5, 6, 7), 3, 0, i4(*range(20, 32)), params, 1)
    runner.run(StepPlan(1, 2, admit=[other], extend=i4((2, 3), (1, 10))))
    ended = runner.run(StepPlan(1, 3, decode=i4(2), extend=i4((1, len(prompt) - 23))))
    first = np.frombuffer(ended.tokens, np.int32).tolist()[0]
    result = runner.run(StepPlan(1, 4, decode=i4(1, 2), drafts=2))
    fresh = make_runner(model, 2, mtp=True)
    again = fresh.run(StepPlan(1, 1, admit=[
        Admit(1, i4(*prompt, first), len(prompt), 0, pages, params, 1)],
        extend=i4((1, len(prompt) + 1)), drafts=2))
    assert again.tokens == result.tokens[:4]
    assert fresh.tables.drafts.tokens[1].tolist() == runner.tables.drafts.tokens[1].tolist()


# --- forced acceptance ---------------------------------------------------------------------------

@pytest.mark.parametrize("arrays", [HostArrays, DeviceArrays])
def test_forced_acceptance(plain: Any, arrays: Any) -> None:
    params = ResolvedParams(max_tokens=80, temperature=1.0)
    for force, least, most in (((1.0, 0.0), 2.0, 2.0), ((0.8, 0.5), 1.9, 2.8), ((1.0,), 4, 4)):
        runner = make_runner(plain, 3, lambda slots, at, k: np.zeros((len(slots), k), np.int32),
                             arrays=arrays, force=force)
        hand = Hand(runner)
        seqs = [hand.admit([5, slot], params, 3) for slot in range(8)]
        for _ in range(15):
            hand.decode(3)
        emitted = [count for seq in seqs for count in seq.emitted[1:]]
        assert least <= float(np.mean(emitted)) <= most
        assert max(emitted) <= most + 1.2


# --- masks ---------------------------------------------------------------------------------------

def automaton(done: list[int]) -> list[int]:
    """Tokens 10..17, each at most 3 more than the one before it (mod 8); 9 ends, after an 10."""
    if not done:
        return list(range(10, 18))
    return [10 + (done[-1] - 10 + i) % 8 for i in (1, 2, 3)] + [9] * (done[-1] == 10)


@pytest.mark.parametrize("arrays", [HostArrays, DeviceArrays])
@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_a_grammar_by_masks(plain: Any, temperature: float, arrays: Any) -> None:
    """Masks of a window's rows follow from the drafts that the last result told."""
    params = ResolvedParams(max_tokens=40, temperature=temperature, masked=True, eos_ids=(9,))
    free = ResolvedParams(max_tokens=40, temperature=temperature)
    runs = []
    for drafts in (0, 1, 3):
        guess = Guess(lambda seed, at: (seed * 31 + at * 17) % 5 < 3)
        hand = Hand(make_runner(plain, drafts, guess, arrays=arrays, pages=600), automaton)
        guess.tables = hand.runner.tables
        guess.wholes = {i + 1: tokens for i, tokens in enumerate(runs[0])} if runs else {}
        seqs = [hand.admit(PROMPTS[i], free if i == 1 else params, drafts) for i in range(4)]
        while not all(seq.finish for seq in seqs):
            hand.decode(drafts, ended=drafts == 3)
        for seq in (seqs[0], *seqs[2:]):
            done = seq.tokens[seq.prompt:]
            assert all(token in automaton(done[:i]) for i, token in enumerate(done))
        assert drafts == 0 or max(max(seq.emitted) for seq in seqs) > 1
        runs.append([seq.tokens for seq in seqs])
    assert runs[1] == runs[0] and runs[2] == runs[0]


def test_masks_that_do_not_fit(plain: Any) -> None:
    masked = ResolvedParams(max_tokens=9, temperature=0.0, masked=True)
    beyond = np.zeros(224, np.uint8)
    beyond[199:] = 1
    for bad, message in (
        (mask(1, 0, [], 199), "slot 1: no token is allowed in row 0"),
        (RowMask(1, 0, np.packbits(beyond, bitorder="little").tobytes()), "no token is allowed"),
        (mask(1, 0, [3], 64), "slot 1: 8 bytes are no mask of 199 tokens"),
        (mask(1, 1, [3], 199), "slot 1: row 1 is not sampled"),
        (mask(2, 0, [3], 199), "slot 2: row 0 is not sampled"),
    ):
        runner = make_runner(plain, 2)
        admit = Admit(1, i4(5, 6, 7), 3, 0, i4(3), masked, 1)
        with pytest.raises(ValueError, match=message):
            runner.run(StepPlan(1, 1, admit=[admit], extend=i4((1, 3)), masks=[bad]))


# --- plans that do not fit -----------------------------------------------------------------------

def test_plans_that_do_not_fit(plain: Any) -> None:
    runner = make_runner(plain, 2, lambda slots, at, k: np.zeros((len(slots), k), np.int32))
    with pytest.raises(ValueError, match="3 are wanted, 2 can be made"):
        runner.run(StepPlan(1, 1, drafts=3))
    for slot, drafts in ((1, 2), (2, 1)):
        admit = Admit(slot, i4(5, 6, 7), 3, 0, i4(slot), GREEDY, 1)
        runner.run(StepPlan(1, 1, admit=[admit], extend=i4((slot, 3)), drafts=drafts))
    with pytest.raises(ValueError, match="slot 1 has 2 drafts and slot 2 1"):
        runner.run(StepPlan(1, 2, decode=i4(1, 2)))
