"""The playground and the status page without a mouse, and by axe-core's rules."""

from __future__ import annotations

import pytest
from helpers_axe import violations
from helpers_browser import Browser, Tab
from helpers_stage import DONE, opened, send, staged

pytestmark = pytest.mark.browser

SIZES = pytest.mark.parametrize(("width", "height"), [(375, 812), (1280, 860)],
                                ids=["phone", "desktop"])
RICH = """# Title

Some *text*, `code`, [a link](https://example.com) and $x^2$.

- one
  - two

> said

| a | b |
|---|--:|
| 1 | 2 |

```python
def f(x):  # comment
    return "text", 12
```

$$\\frac{1}{2}$$
"""
SHOWN = """showTurns('Question', {content: text, reasoning: 'A thought', note: 'cut off', calls: [
    {id: 'a', name: 'weather', arguments: '{}'}], usage: {completion_tokens: 3}, took: 9, first: 1})
"""
SHADED = """showTurns('Question', {content: 'Yes no', shaded: true, tokens: [
    {token: 'Yes', logprob: -3, top_logprobs: [{token: 'No', logprob: -0.1}]},
    {token: ' no', logprob: -0.2, top_logprobs: []}]}); document.querySelector('.tok').focus()
"""
FOCUSED = """(one => one.id || one.getAttribute('aria-label') || one.textContent.trim()
    .slice(0, 30) || one.tagName)(document.activeElement)"""


def tabbed(tab: Tab, most: int = 60) -> list[str]:
    """What the Tab key comes to, from the page's begin to its end. Whatever has the focus is
    seen, and says so by its outline or its box's."""
    tab.js("document.activeElement.blur(); getSelection().removeAllRanges(); scrollTo(0, 0)")
    tab.js("document.body.tabIndex = -1; document.body.focus();"
           "document.body.removeAttribute('tabindex')")
    found: list[str] = []
    for _ in range(most):
        tab.press("Tab")
        if tab.js("document.activeElement === document.body"):
            break
        name = tab.js(FOCUSED)
        assert tab.js("""(one => { const box = one.getBoundingClientRect();
            const style = getComputedStyle(one);
            return box.width > 0 && box.height > 0 && box.right > 0 && box.left < innerWidth
                && style.visibility === 'visible' && (style.outlineStyle !== 'none'
                || one.id === 'text') })(document.activeElement)"""), name
        found.append(name)
        if found.count(name) > 1 and name == found[0]:
            return found[:-1]
    return found


@SIZES
def test_a_conversation_by_keyboard_alone(browser: Browser, width: int, height: int) -> None:
    with staged(["Hello"]) as (script, url), opened(
            browser, url, width=width, height=height) as tab:
        assert tab.js("document.activeElement.id") == "text", "the field has the focus at once"
        tab.type("One")
        tab.press("Enter")
        tab.wait(f"document.querySelector('.turn') && {DONE}")
        tab.wait("document.querySelector('#conversations .name') && !busyNow()")
        assert tab.js("document.activeElement.id") == "text"
        order = tabbed(tab)
        first = ["list-open"] if width < 860 else []
        between = ["panel-open"] if width < 1180 else []
        listed = [] if width < 860 else ["new", "search", "One", "Rename One", "Delete One",
                                         "export", "import"]
        turns = ["log", "Edit", "Copy", "Again", "Probabilities", "text", "send"]
        assert order[:len(first) + 3 + len(between) + len(listed) + len(turns)] == [
            *first, "model", "state", "theme", *between, *listed, *turns]
        assert ("temperature" in order) == (width >= 1180)
        for _ in range(40):
            if tab.js(FOCUSED) == "Again":
                break
            tab.press("Tab")
        script.most = 2
        tab.press("Enter")
        tab.wait("document.querySelector('.turn.live') && busyNow()")
        tab.press("Escape")
        tab.wait("!busyNow()")
        assert tab.js("document.querySelector('.note').textContent") == "stopped"
        script.most = 10**9
        tab.press("/")
        assert tab.js("document.activeElement.id") == "text" and not tab.js(
            "document.getElementById('text').value")


@SIZES
def test_the_status_page_by_keyboard_alone(browser: Browser, width: int, height: int) -> None:
    with staged(["Hello"], api_key="secret") as (_, url):
        tab = browser.open(f"{url}status", width=width, height=height)
        try:
            tab.wait("!document.getElementById('ask-key').hidden")
            assert tabbed(tab) == ["Playground", "HTTP API", "theme", "key",
                                   "Table of processes"]
            tab.js("document.getElementById('theme').focus()")
            tab.press("Tab")
            tab.type("secret")
            tab.press("Tab")
            tab.wait("document.querySelector('#actors tr')")
        finally:
            tab.close()


def test_drawers_by_keyboard(browser: Browser) -> None:
    with staged(["Hello"]) as (_, url), opened(browser, url, width=375, height=812) as tab:
        send(tab, "One")
        tab.wait(f"document.querySelector('.turn') && {DONE}")
        tab.js("document.getElementById('panel-open').focus()")
        tab.press("Enter")
        tab.wait("document.activeElement.id === 'panel'")
        tab.press("Tab")
        tab.wait("document.activeElement.id === 'temperature' && !document.getAnimations().length")
        reached = tabbed(tab)
        assert "temperature" in reached and "text" not in reached and "new" not in reached
        tab.press("Escape")
        tab.wait("document.activeElement.id === 'panel-open'")
        tab.js("document.getElementById('list-open').focus()")
        tab.press("Enter")
        tab.press("Tab")
        tab.wait("document.activeElement.id === 'new'")
        tab.press("Enter")
        tab.wait("document.activeElement.id === 'text'")
        assert tab.js("document.querySelectorAll('.turn').length") == 0
        assert tab.js("document.getElementById('list-open').ariaExpanded") == "false"


@pytest.mark.parametrize(("width", "height", "dark"), [(375, 812, True), (1280, 860, False)],
                         ids=["phone, dark", "desktop, light"])
def test_axe_has_nothing_to_say(browser: Browser, width: int, height: int, dark: bool) -> None:
    with staged(["Hello"]) as (script, url):
        with opened(browser, url, width=width, height=height, dark=dark) as tab:
            tab.wait("document.querySelector('#state.wait')")
            assert violations(tab) == [], "nothing said yet"
            tab.js(f"window.text = {RICH!r}")
            for content in (SHOWN, SHADED, "showError(shown, new Error('No room'))",
                            "acts('.user', 'Edit').click()"):
                tab.js(content)
                assert violations(tab) == [], content
            send(tab, "Hi")
            tab.wait(f"!busyNow() && {DONE}")
            tab.wait("document.querySelector('#conversations li')")
            for opener in ("list-open", "panel-open") if width < 860 else ():
                tab.click(f"#{opener}")
                assert violations(tab) == [], opener
                tab.press("Escape")
        with opened(browser, f"{url}status", width=width, height=height, dark=dark) as tab:
            tab.wait("document.querySelector('#actors tr')")
            assert violations(tab) == [], "status"
            script.answers = False
            tab.wait("document.querySelector('#since.trouble') && document.body.matches('.stale')")
            assert violations(tab) == [], "no answer"
        with opened(browser, f"{url}docs", width=width, height=height, dark=dark) as tab:
            tab.wait("document.querySelector('details.route')")
            assert violations(tab) == [], "routes"


def test_nothing_moves_for_those_who_ask_for_that(browser: Browser) -> None:
    with staged(["Hello"]) as (script, url), opened(browser, url) as tab:
        tab.call("Emulation.setEmulatedMedia", features=[
            {"name": "prefers-reduced-motion", "value": "reduce"}])
        script.most = 3
        send(tab, "Hi")
        tab.wait("document.querySelector('.live .said').textContent.length > 0")
        assert tab.js("document.getAnimations().length") == 0
        script.most = 10**9
        tab.wait(DONE)


def test_an_answer_is_announced_once_it_is_whole(browser: Browser) -> None:
    with staged(["Hello"]) as (script, url), opened(browser, url) as tab:
        script.most = 3
        send(tab, "Hi")
        tab.wait("document.querySelector('.live .said').textContent.length > 0")
        log = "document.getElementById('log')"
        assert tab.js(f"[{log}.role, {log}.getAttribute('aria-live')]") == ["log", "polite"]
        assert tab.js("document.querySelector('.live').getAttribute('aria-busy')") == "true"
        script.most = 10**9
        tab.wait(DONE)
        assert tab.js("document.querySelector('.assistant').getAttribute('aria-busy')") is None
