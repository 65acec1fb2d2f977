"""Which tokens a model has for filling in the middle."""

from __future__ import annotations

from typing import Any

import pytest

from actorium.actors.models.fim_tokens import FimTokens, fim_tokens

QWEN = ["<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>",
        "<|file_sep|>"]
DEEPSEEK = ["<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581begin\uff5c>",
            "<\uff5cfim\u2581end\uff5c>"]
CODELLAMA = ["\u2581<PRE>", "\u2581<MID>", "\u2581<SUF>"]


@pytest.mark.parametrize(("texts", "named", "expected"), [
    (QWEN, None, FimTokens(0, 2, 1, padding=3, repository=4, file=5)),
    (DEEPSEEK, None, FimTokens(1, 0, 2)), (CODELLAMA, {}, FimTokens(0, 2, 1)),
    ([*QWEN, "own"], {"middle": "own"}, FimTokens(0, 2, 6, 3, 4, 5)),
    (QWEN, "no object", FimTokens(0, 2, 1, 3, 4, 5)), (QWEN, {"middle": 7}, FimTokens(
        0, 2, 1, 3, 4, 5)),
    (QWEN, {"middle": "missing"}, None), (["a", "<|file_sep|>"], None, None),
    (QWEN[:2], None, None)])
def test_known_texts_and_named_ones(texts: list[str], named: Any,
                                    expected: FimTokens | None) -> None:
    ids = {text: i for i, text in enumerate(texts)}
    assert fim_tokens(ids.get, named) == expected


def test_what_ends_the_middle() -> None:
    assert FimTokens(0, 2, 1, padding=3, file=5).ends == [3, 5] and not FimTokens(0, 1, 2).ends
