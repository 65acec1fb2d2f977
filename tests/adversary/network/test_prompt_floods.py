"""More requests than an actor comes to: what waits is bounded, who is refused is told so, others
are served."""

from __future__ import annotations

from typing import Any

import pytest

from actorium.tools.chaos import load_rows


@pytest.mark.slow
@pytest.mark.mended("prompts waited in the tokenizer without a bound, before the scheduler could "
                    "refuse any")
def test_prompts_come_faster_than_they_are_encoded(tried: Any, amount: Any) -> None:
    row = load_rows.flood(seconds=amount(2, 15), clients=amount(2, 8))
    tried(row["sent"])
    assert row["wrong"] == [] and row["sent"] > 1000 and row["others"] > 2
