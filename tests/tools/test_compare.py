"""`actorium compare`: figures by hand, faults that it must find, and both kinds of sides."""

from __future__ import annotations

import math

import pytest
import torch
from helpers_attention import FEW
from helpers_faults import top
from hypothesis import given
from hypothesis import strategies as st

from actorium.actors.errors import BadConfig
from actorium.tools.cli import compare_command
from actorium.tools.cli.compare_command import run
from actorium.tools.compare.comparison import (
    PARTS,
    Bars,
    ModelAnswer,
    Reading,
    compared,
    distance,
    first_divergence,
)
from actorium.tools.compare.default_prompts import PROMPTS
from actorium.tools.compare.listener import TOP, likeliest

# --- figures -------------------------------------------------------------------------------------

def test_a_distance_by_hand() -> None:
    one = {"a": math.log(0.5), "b": math.log(0.3), "c": math.log(0.2)}
    other = {"a": math.log(0.25), "b": math.log(0.5), "c": math.log(0.25)}
    found = distance(one, other)
    assert found.kl == pytest.approx(
        0.5 * math.log(2) + 0.3 * math.log(0.6) + 0.2 * math.log(0.8))
    assert found.largest == pytest.approx(math.log(2)) and found.overlap == 1
    assert not found.same_first and distance(one, one) == (0.0, 0.0, True, 1.0)


def test_tokens_that_one_side_alone_names() -> None:
    """All that is known of `b` on the other side is that it is not likelier than the last."""
    one = {"a": math.log(0.6), "b": math.log(0.3)}
    other = {"a": math.log(0.6), "c": math.log(0.01)}
    found = distance(one, other)
    assert found.largest == pytest.approx(math.log(30)) and found.overlap == 0.5
    # b 0.3 against 0.01 at most, all others 0.1 against 0.39 at least
    assert found.kl == pytest.approx(0.3 * math.log(30) + 0.1 * math.log(0.1 / 0.39))


@FEW
@given(st.integers(0, 10**6), st.integers(1, 12), st.floats(0, 4))
def test_the_divergence_is_a_lower_bound(seed: int, count: int, apart: float) -> None:
    gen = torch.Generator().manual_seed(seed)
    a = (2 * torch.randn(30, generator=gen, dtype=torch.float64))
    b = (a + apart * torch.randn(30, generator=gen, dtype=torch.float64)).log_softmax(-1)
    a = a.log_softmax(-1)
    whole = float((a.exp() * (a - b)).sum())
    found = distance(top(a, count), top(b, count))
    assert -1e-12 <= found.kl <= whole + 1e-9
    assert found.largest <= float((a - b).abs().max()) + 1e-9
    assert distance(top(a, 30), top(b, 30)).kl == pytest.approx(whole, abs=1e-9)


def test_the_token_that_was_read_is_no_bound_for_others() -> None:
    told = {str(i): -float(i) for i in range(TOP)} | {"read": -40.0}
    assert "read" not in likeliest(told, TOP) and len(likeliest(told, TOP)) == TOP


def test_where_answers_part() -> None:
    assert first_divergence("abc", "abc") is None
    assert (first_divergence("abc", "abd"), first_divergence("ab", "abc")) == (2, 2)


def test_what_cannot_be_compared_holds_no_bar() -> None:
    nothing = Reading(["a"], [None])
    one, other = (ModelAnswer("p", "t", own, own, own) for own in (nothing, Reading(["b"], [None])))
    result = compared([one], [other], Bars(max_kl=9.0))
    assert result["faults"] == [f"{name}: nothing could be compared" for name in PARTS]
    assert result["parts"]["extend"]["texts_cut_otherwise"] == 1
    assert compared([one], [other], Bars())["faults"] == []


def test_answers_that_end_for_another_reason_are_not_equal() -> None:
    own = Reading(["a"], [{"a": -0.1}])
    one, other = (ModelAnswer("p", "a", own, own, own, why) for why in ("length", "stop"))
    assert compared([one], [one], Bars())["equal_answers"] == 1
    assert compared([one], [other], Bars())["equal_answers"] == 0


# --- the command ---------------------------------------------------------------------------------

@pytest.mark.parametrize(("argv", "says"), [
    (["", ], "two configurations are needed"), (["", "", "--max-kl", "-1"], "--max-kl: must not"),
    (["", "", "--min-agreement", "2"], "--min-agreement: must be between 0 and 1"),
    (["", "", "--answer-tokens", "0"], "--answer-tokens: must be at least 1"),
    (["", "'", "--max-kl", "1"], "neither flags nor a URL"),
    (["", "", "--prompts", "nowhere.txt"], "--prompts: cannot read nowhere.txt"),
    (["", "--attention-backend fa3"], "--attention-backend: flash_attn is not built in"),
    (["", "", "--base-url", "http://x"], "a server is named as A or B")])
def test_wrong_words(argv: list[str], says: str) -> None:
    with pytest.raises(BadConfig, match=says):
        run("compare", argv)


def test_who_tells_no_ids_is_held_against_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """As llama.cpp's server, which knows no `return_tokens_as_token_ids`: the other side is asked
    anew, without."""
    asked: list[tuple[str, bool, list[str] | None]] = []

    async def model_answers(url: str, _: object, prompts: list[str], texts: list[str] | None,
                         by_id: bool) -> list[ModelAnswer]:
        asked.append((url, by_id, texts))
        token = "token_id:7" if by_id and url.endswith("ids") else " a"
        own = Reading([token], [{token: -0.1}])
        return [ModelAnswer(prompt, " a", own, own, own) for prompt in prompts]

    monkeypatch.setattr(compare_command, "model_answers", model_answers)
    texts = [" a"] * len(PROMPTS)
    for sides in (("http://ids", "http://words"), ("http://words", "http://ids")):
        asked.clear()
        assert run("compare", [*sides, "--max-kl", "0"]) == 0
        assert asked == [(sides[0], True, None), (sides[1], True, texts),
                         ("http://ids", False, texts)]
