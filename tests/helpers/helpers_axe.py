"""axe-core in an open page: the rules of accessibility that a program can check."""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from helpers_browser import Tab

NOT_THERE = "no axe-core: its package axe-core-python is not installed"


@cache
def script() -> str:
    """axe-core's JavaScript, as the package `axe-core-python` brings it. Skips the test if that is
    not installed."""
    found = importlib.util.find_spec("axe_core_python")
    if found is None or not found.submodule_search_locations:
        pytest.skip(NOT_THERE)
    return Path(found.submodule_search_locations[0], "axe.min.js").read_text(encoding="utf-8")


def violations(tab: Tab) -> list[str]:
    """What is wrong with the page as it is now: rule and elements."""
    if not tab.js("typeof window.axe === 'object'"):
        tab.js(script() + "; 0")
    # Colours are compared once a transition has ended.
    found: list[dict[str, Any]] = tab.js("""(async () => {
        await Promise.all(document.getAnimations().filter(one => !(one.effect.getComputedTiming()
            .iterations === Infinity)).map(one => one.finished.catch(() => {})));
        return (await axe.run(document, {resultTypes: ['violations']})).violations.map(one => ({
            id: one.id, nodes: one.nodes.map(node => node.html.slice(0, 120) + ' ' +
                (node.any[0] || node.all[0] || node.none[0] || {message: ''}).message)}));
    })()""")
    return [f"{one['id']}: {node}" for one in found for node in one["nodes"]]
