"""The prefix cache through a whole engine with the demo model: the same tokens as without it, and
log-probabilities to the bit, with `--exact on`. With `--exact off` a step that is put together
differently may turn a near tie: there, sequences may part at a near tie and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from helpers_prefix import Ran, closeness, engine, gauges, mixed, run, run_in

from actorium import Engine, SamplingParams
from actorium.actors.client.client import Client, Completion, Request
from actorium.tools.evaluation.demo_scores import evaluate

COUNT, PAGE = 60, 16
LARGE, TINY = 65_536, 640
"""Tokens of the pool: everything fits; about three sequences do."""
REQUESTS = mixed(COUNT, seed=3, logprobs=2)
LONG = [(7 * i) % 1800 + 3 for i in range(200)]
"""A prompt of which 12 pages can be cached (199 tokens: the last one is always computed)."""
EXACT = {"exact": "on", "skip_tokenizer": True}


@pytest.fixture(scope="module")
def cached() -> Iterator[Engine]:
    with engine(max_total_tokens=LARGE, **EXACT) as running:
        yield running


@pytest.fixture(scope="module")
def plain() -> Iterator[Engine]:
    with engine(max_total_tokens=LARGE, prefix_cache=False, **EXACT) as running:
        yield running


@pytest.fixture(scope="module")
def reference(plain: Engine) -> Ran:
    """Every request, without cache and with room for everything."""
    return run_in(plain.client, REQUESTS)


def _greedy(tokens: int, **more: int) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, **more)  # type: ignore[arg-type]


# --- mixed requests ----------------------------------------------------------------------------

def test_without_a_cache_nothing_is_cached(reference: Ran) -> None:
    assert reference.cached == reference.gauges["cached_pages"] == 0
    assert reference.gauges["preemptions"] == 0


def test_the_cache_changes_no_token(cached: Engine, reference: Ran) -> None:
    mine = run_in(cached.client, REQUESTS)
    assert mine.told == reference.told
    prompts = sum(c.usage.prompt_tokens for c in mine.completions)
    assert mine.cached == mine.gauges["cache_hit_tokens"] > 0.1 * prompts
    assert mine.gauges["evicted_pages"] == mine.gauges["preemptions"] == 0
    assert all(c.usage.cached_tokens % PAGE == 0 for c in mine.completions)


@pytest.mark.parametrize(("cache", "speculative"), [
    (True, "off"), (True, "mtp:2,fixed"), (False, "off"), (False, "mtp:2,fixed")])
@pytest.mark.slow
def test_a_tiny_pool_changes_no_token(cache: bool, speculative: str, reference: Ran) -> None:
    """Sequences with drafts are promised more pages when they are admitted, and so preempted for
    them less: there, preemptions are forced."""
    force = 0 if speculative == "off" else 40
    mine = run(REQUESTS, max_total_tokens=TINY, prefix_cache=cache, speculative=speculative,
               force_preempt_every=force, **EXACT)
    assert mine.told == reference.told
    assert mine.gauges["preemptions_forced" if force else "preemptions_memory"] > 0
    assert mine.gauges["held_pages"] == mine.gauges["quarantined_pages"] == 0
    if cache:
        assert min(mine.cached, mine.gauges["evicted_pages"]) > 0
        assert mine.gauges["free_pages"] + mine.gauges["cached_pages"] == TINY // PAGE
    else:
        assert mine.cached == mine.gauges["evicted_pages"] == 0
        assert mine.gauges["free_pages"] == TINY // PAGE


@pytest.mark.slow
def test_without_exactness_sequences_part_at_near_ties_only() -> None:
    """And the demo model solves its tasks as well with a cache that is always short of pages."""
    with engine(max_total_tokens=LARGE, prefix_cache=False, exact="off") as plain:
        want, score = run_in(plain.client, REQUESTS), evaluate(plain.client, 20)
    with engine(max_total_tokens=TINY, speculative="off", exact="off") as tiny:
        mine, tiny_score = run_in(tiny.client, REQUESTS), evaluate(tiny.client, 20)
        assert gauges(tiny.client)["evicted_pages"] > mine.gauges["evicted_pages"] > 0
    assert mine.gauges["preemptions_memory"] > 0 and mine.cached > 0
    parted = [(a, b) for a, b in zip(want.completions, mine.completions, strict=True)
              if a.token_ids != b.token_ids]
    assert len(parted) <= COUNT // 10
    for a, b in parted:
        assert _gap_where_they_part(a, b) < 0.1
    assert score.share > 0.85 and abs(tiny_score.share - score.share) <= 0.03


def _gap_where_they_part(a: Completion, b: Completion) -> float:
    at = next(i for i, (x, y) in enumerate(zip(a.token_ids, b.token_ids, strict=True)) if x != y)
    return max(closeness(a)[at], closeness(b)[at])


# --- sharing -----------------------------------------------------------------------------------

def _cached_tokens(client: Client, *requests: Request) -> list[int]:
    return [c.usage.cached_tokens for c in run_in(client, list(requests)).completions]


def test_equal_prompts_arriving_together_are_computed_once(cached: Engine, plain: Engine) -> None:
    """In the very plan that fills the pages, and while that plan is in flight."""
    requests = [Request(prompt=LONG, params=_greedy(6)) for _ in range(8)]
    steps = gauges(cached.client)["steps"]
    mine = run_in(cached.client, requests)
    assert sorted(c.usage.cached_tokens for c in mine.completions) == [0] + [192] * 7
    assert mine.gauges["steps"] - steps < 8 + 5, "they do not share steps"
    assert mine.tokens == run_in(plain.client, requests[:1]).tokens * 8
    assert _cached_tokens(plain.client, *requests[:2]) == [0, 0]


def test_tenants_share_nothing(cached: Engine) -> None:
    prompt = LONG[::-1]

    def ask(tenant: str) -> Request:
        return Request(prompt=prompt, params=_greedy(2), tenant=tenant)

    assert sorted(_cached_tokens(cached.client, ask("a"), ask("b"))) == [0, 0]
    assert _cached_tokens(cached.client, ask("a"), ask("b"), ask("")) == [192, 192, 0]


def test_logprobs_of_a_cached_prompt(cached: Engine, plain: Engine) -> None:
    prompt = [(11 * i) % 1700 + 3 for i in range(300)]
    _cached_tokens(cached.client, Request(prompt=prompt, params=_greedy(1)))
    asked = Request(prompt=prompt, params=_greedy(3, prompt_logprobs=2))
    (mine,), (want,) = (run_in(e.client, [asked]).completions for e in (cached, plain))
    assert mine.usage.cached_tokens == 0 and mine.token_ids == want.token_ids
    assert mine.prompt_logprobs is not None and want.prompt_logprobs is not None
    assert len(mine.prompt_logprobs) == len(prompt) and mine.prompt_logprobs[0] is None
    assert mine.prompt_logprobs == want.prompt_logprobs
    assert _cached_tokens(cached.client, Request(prompt=prompt, params=_greedy(1))) == [288]
