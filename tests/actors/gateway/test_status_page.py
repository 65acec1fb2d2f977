"""`/status` in a headless Chromium: live, and with the last that was known."""

from __future__ import annotations

import pytest
from helpers_browser import Browser, Tab
from helpers_gateway import Served
from helpers_stage import EVIL, NEVER_ENDS, STORY, opened, send, staged

pytestmark = pytest.mark.browser

TEXT = "document.getElementById({!r}).textContent"


def sample(tab: Tab, **changes: object) -> None:
    """Gives the page a sample of an engine with three actors."""
    tab.js(f"""onSample({{at: Date.now() / 1000, ready: true, why: '', running: 2, waiting: 0,
        tokens_per_second: 40, pages: 100, pages_used: 20, pages_cached: 30, pages_quarantined: 1,
        resumed: 0, actors: [['gateway-0', 5], ['scheduler', 3], ['worker-0', null]].map(
        ([role, queue], i) => ({{role, phase: 'stepping', epoch: 1, pid: 70 + i, beat_age: 0.2,
        queue, detail: ''}})), ...{changes!r}}})""")


def test_it_shows_a_running_engine(browser: Browser, packaged: Served) -> None:
    line = "document.querySelector('#chart-tokens path.a:not(.dots)').getAttribute('d')"
    with opened(browser, f"{packaged.url}/status") as tab, opened(
            browser, packaged.url, init=NEVER_ENDS) as chat:
        tab.wait("document.querySelector('#state.ok')")
        send(chat, STORY)
        tab.wait("seen.some(one => one.tokens_per_second > 0 && one.running > 0)")
        tab.wait(f"({line} || '').includes('L')")
        tab.wait("document.querySelector('#ring svg.flows')")
        roles = tab.js("[...document.querySelectorAll('#actors th')].map(one => one.textContent)")
        assert {"scheduler", "worker-0", "gateway-0", "watchdog"} <= set(roles)
        drawn = tab.js("[...document.querySelectorAll('#ring .role')].map(one => "
                       "one.textContent)")
        assert sorted(drawn) == sorted(roles)
        actors = {one.role: one for one in packaged.engine.client.status().actors}
        pids = tab.js("Object.fromEntries([...document.querySelectorAll('#actors tr')].map(one => "
                      "[one.children[0].textContent, one.children[2].textContent]))")
        assert pids == {role: str(one.pid) for role, one in actors.items()}
        tab.wait("document.querySelector('#pages .held')")
        tab.hover("#chart-pages .plot")
        assert tab.js("pointed") is not None
        chat.press("Escape")
        chat.wait("!busyNow()")


def test_pages_queues_and_restarts(browser: Browser) -> None:
    with staged([""]) as (script, url), opened(browser, f"{url}status") as tab:
        script.answers = False
        tab.wait("document.querySelector('#state.bad')")
        sample(tab)
        assert tab.js("[...document.querySelectorAll('#pages span')].map(one => [one.className, "
                      "+one.style.flexGrow])") == [["held", 20], ["cached", 30], ["out", 1],
                                                   ["free", 49]]
        assert tab.js("document.getElementById('pages').ariaLabel") == \
            "20 held by sequences, 30 cached, 1 quarantined, 49 free of 100"
        assert "3 waiting" in tab.js("document.querySelector('#ring').textContent")
        assert tab.js(TEXT.format("recovered")) == "None since the engine started."
        sample(tab, resumed=2, actors=[
            {"role": "worker-0", "phase": "loading", "epoch": 2, "pid": 99, "beat_age": 9.0,
             "queue": 0, "detail": "a reason"}])
        assert "worker-0 was started again, as process 99" in tab.js(TEXT.format("events"))
        assert tab.js(TEXT.format("recovered")) == \
            "1 restart of actors since the engine started; 2 sequences went on after one."
        assert tab.js("[...document.querySelectorAll('#actors tr *')].map(one => one.textContent)"
                      ".filter(Boolean)") == ["worker-0", "loading", "99", "1", "0", "9 s ago",
                                              "a reason"]
        assert tab.js("document.querySelectorAll('#ring .actor.wait').length") == 1


def test_the_models_of_a_server_of_several(browser: Browser) -> None:
    with staged([""]) as (script, url), opened(browser, f"{url}status") as tab:
        script.answers = False
        tab.wait("document.querySelector('#state.bad')")
        sample(tab)
        assert tab.js("document.getElementById('models-part').hidden")
        sample(tab, models=[
            {"name": "<b>ant", "state": "loaded", "in_use": 3, "memory": 3 << 29, "says": ""},
            {"name": "bee", "state": "failed", "in_use": 0, "memory": 0, "says": "no weights"}])
        assert tab.js("document.getElementById('pages-part').hidden")
        assert tab.js("[...document.querySelectorAll('#models tr')].map(row => "
                      "[...row.children].map(one => one.textContent))") == [
            ["<b>ant", "loaded", "3", "1.50 GiB", ""], ["bee", "failed", "0", "–", "no weights"]]
        assert tab.js("document.querySelectorAll('#models .ok').length") == 1


def test_what_was_last_known_stays_and_says_since_when(browser: Browser) -> None:
    with staged([""]) as (script, url), opened(browser, f"{url}status") as tab:
        tab.wait("document.querySelector('#actors tr')")
        script.answers = False
        tab.wait("document.querySelector('#since.trouble')")
        tab.wait(f"/: no watchdog, since \\d\\d:\\d\\d:\\d\\d \\([1-9]\\d* s\\)\\. Below is what "
                 f"was last known, at \\d\\d:\\d\\d:\\d\\d\\.$/.test({TEXT.format('since')})")
        assert tab.js("document.querySelectorAll('#actors tr').length") == 1
        assert tab.js("document.body.className") == "stale"
        script.answers, script.lives = True, 2
        tab.wait("document.body.className === ''")
        tab.wait(f"{TEXT.format('events')}.includes('was started again')")


def test_a_gateway_that_is_gone_is_told(browser: Browser) -> None:
    with staged([""]) as (_, url):
        tab = browser.open(f"{url}status")
        tab.wait("document.querySelector('#actors tr')")
    try:
        tab.wait(f"{TEXT.format('since')}.includes('The gateway cannot be reached')")
        assert tab.js("document.querySelectorAll('#actors tr').length") == 1
    finally:
        tab.close()


def test_it_asks_for_the_key(browser: Browser) -> None:
    with staged([""], api_key="secret") as (_, url):
        tab = browser.open(f"{url}status")
        try:
            tab.wait("!document.getElementById('ask-key').hidden")
            tab.js("document.getElementById('key').focus()")
            tab.type("secret")
            tab.press("Enter")
            tab.js("document.getElementById('key').blur()")
            tab.wait("document.querySelector('#actors tr')")
            assert tab.js("document.getElementById('ask-key').hidden")
            assert tab.js("Object.values(localStorage).includes('secret')") is False
        finally:
            tab.close()


@pytest.mark.parametrize(("width", "height"), [(375, 812), (1280, 860)])
def test_it_fits(browser: Browser, width: int, height: int) -> None:
    with staged([""]) as (_, url), opened(browser, f"{url}status", width=width,
                                          height=height) as tab:
        tab.wait("document.querySelector('#actors tr')")
        sample(tab)
        assert tab.js("document.documentElement.scrollWidth") <= width
        for box in ("#ring svg", "#pages", ".plot", "header"):
            left, _, size, _ = tab.box(box)
            assert left >= 0 and left + size <= width, box
        assert tab.js("[...document.querySelectorAll('#ring text')].every(one => "
                      "one.getBoundingClientRect().height > 9)"), "it can be read"


def test_what_actors_say_is_no_markup(browser: Browser) -> None:
    with staged([""]) as (_, url), opened(browser, f"{url}status") as tab:
        tab.wait("document.querySelector('#actors tr')")
        assert EVIL[:70] in tab.js("document.querySelector('#actors th').textContent")
        assert tab.js("document.querySelectorAll('main :is(img, script)').length") == 0
        assert tab.js("window.pwned") is None
