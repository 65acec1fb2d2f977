"""The page in a headless Chromium: with the packaged model, and with models that mean harm."""

from __future__ import annotations

import time

import pytest
from helpers_browser import Browser, Tab
from helpers_gateway import Served
from helpers_stage import DONE, EVIL, NEVER_ENDS, STORY, opened, send, staged

pytestmark = pytest.mark.browser


# --- the list of routes -------------------------------------------------------------------------


def test_the_routes_are_listed_and_can_be_tried(browser: Browser, packaged: Served) -> None:
    with opened(browser, f"{packaged.url}/docs") as tab:
        tab.wait("document.querySelectorAll('details.route').length > 10")
        tab.js("""[...document.querySelectorAll('details.route')].find(
            one => one.querySelector('.path').textContent === '/v1/completions').open = true""")
        tab.wait("document.querySelector('textarea')")
        assert tab.js("document.querySelectorAll('details[open] tr').length") > 10
        tab.js("document.querySelector('.try button').click()")
        tab.wait("document.querySelector('pre').textContent.includes('text_completion')")


# --- with a model -------------------------------------------------------------------------------


def test_an_answer_streams_without_moving_the_layout(browser: Browser, packaged: Served) -> None:
    with opened(browser, packaged.url) as tab:
        tab.wait("document.querySelector('#state.ok')")
        tab.wait("document.getElementById('model').textContent.includes('demo')")
        fixed = ("header", "#ask", "#panel", "#list", "#log")
        before = [tab.box(one) for one in fixed]
        tab.js("""window.lengths = new Set(); new MutationObserver(() => {
            const said = document.querySelector('.said');
            if (said) lengths.add(said.textContent.length);
        }).observe(document.getElementById('log'), {subtree: true, childList: true})""")
        send(tab, STORY)
        tab.wait("document.querySelector('.turn.live')")
        assert tab.js("document.querySelector('.turn.live').getAttribute('aria-busy')") == "true"
        assert [tab.box(one) for one in fixed] == before
        tab.wait(DONE)
        assert [tab.box(one) for one in fixed] == before
        assert tab.js("lengths.size") > 3, "it came in pieces"
        assert tab.js("document.querySelector('.turn.user .bubble').textContent") == STORY
        assert "tokens/s" in tab.js("document.querySelector('.facts').textContent")
        assert tab.js("document.activeElement.id") == "text"


def runs(packaged: Served, tab: Tab, wanted: int) -> bool:
    """Whether so many sequences run, within some seconds."""
    until = time.monotonic() + 5
    while time.monotonic() < until:
        actors = packaged.engine.client.status().actors
        if sum(int(one.gauges.get("running", 0)) for one in actors) == wanted:
            return True
        tab.js("new Promise(done => setTimeout(done, 20))")
    return False


@pytest.mark.parametrize("by", ["mouse", "keyboard"])
def test_stopping_aborts_the_request(browser: Browser, packaged: Served, by: str) -> None:
    with opened(browser, packaged.url, init=NEVER_ENDS) as tab:
        send(tab, STORY)
        tab.wait("(document.querySelector('.said') || {textContent: ''}).textContent.length > 40")
        assert tab.js("document.getElementById('send').hidden")
        assert runs(packaged, tab, 1)
        if by == "mouse":
            tab.click("#stop")
        else:
            tab.press("Escape")
        tab.wait(DONE)
        assert tab.js("document.querySelector('.note').textContent") == "stopped"
        assert tab.js("document.getElementById('stop').hidden")
        assert runs(packaged, tab, 0)
        said = tab.js("document.querySelector('.said').textContent")
        assert len(said) > 40, "what was said stays"


def test_another_answer_and_an_edit_are_branches(browser: Browser, packaged: Served) -> None:
    with opened(browser, packaged.url) as tab:
        send(tab, STORY)
        tab.wait(DONE)
        tab.js("acts('.assistant', 'Again').click()")
        tab.wait(f"document.querySelector('.assistant .branches') && {DONE}")
        assert tab.js("document.querySelector('.assistant .branches').textContent") == "‹2 of 2›"
        tab.js("acts('.user', 'Edit').click()")
        assert tab.js("document.activeElement.value") == STORY
        tab.type(" Now")
        tab.press("Enter")
        tab.wait(f"document.querySelector('.user .branches') && {DONE}")
        assert tab.js("document.querySelectorAll('.turn').length") == 2
        assert tab.js("Object.values(shown.turns).map(one => one.role)") == [
            "user", "assistant", "assistant", "user", "assistant"]
        answer = tab.js("branchOf(shown)[1].content")
        tab.js("acts('.user', '‹').click()")
        assert tab.js("document.querySelector('.bubble').textContent") == STORY
        assert tab.js("document.querySelector('.assistant .branches').textContent") == "‹2 of 2›"
        tab.js("acts('.user', '›').click()")
        assert tab.js("branchOf(shown)[1].content") == answer


def test_probabilities_by_mouse_and_keyboard(browser: Browser, packaged: Served) -> None:
    with opened(browser, packaged.url) as tab:
        tab.click("#logprobs")
        send(tab, STORY)
        tab.wait(DONE)
        assert tab.js("document.getElementById('tip').hidden")
        tab.hover(".tok:nth-child(2)")
        tab.wait("!document.getElementById('tip').hidden")
        rows = tab.js("[...document.querySelectorAll('#tip span')].map(one => parseFloat("
                      "one.textContent))")
        assert len(rows) >= 5 and 0 < sum(rows) <= 100.5
        left, top, width, height = tab.box("#tip")
        assert left >= 0 and top >= 0 and left + width <= 1280 and top + height <= 860
        tab.js("document.querySelector('.tok[tabindex=\"0\"]').focus()")
        assert tab.js("document.querySelectorAll('.tok[tabindex=\"0\"]').length") == 1
        tab.press("ArrowRight")
        assert tab.js("document.activeElement === document.querySelectorAll('.tok')[1]")
        text = tab.js("[...document.querySelectorAll('.tok:not(.end)')].map(one => "
                      "one.textContent).join('')")
        assert text.strip() == tab.js("branchOf(shown)[1].content").strip()


def test_probabilities_on_demand(browser: Browser, packaged: Served) -> None:
    """Of an answer that was made without them."""
    with opened(browser, packaged.url) as tab:
        send(tab, STORY)
        tab.wait(DONE)
        assert tab.js("branchOf(shown)[1].tokens") is None
        drawn = tab.js("document.querySelector('.said').textContent")
        tab.js("acts('.assistant', 'Probabilities').click()")
        tab.wait("document.querySelector('.tok')")
        assert tab.js("document.querySelector('.said').textContent").strip() == drawn.strip()
        assert tab.js("branchOf(shown)[1].tokens.every(one => one.logprob <= 0 && "
                      "one.top_logprobs.length >= 5)")
        tab.js("acts('.assistant', 'Probabilities').click()")
        assert tab.js("document.querySelectorAll('.tok').length") == 0
        assert tab.js("document.querySelector('.said').textContent") == drawn


def test_a_refusal_is_shown_and_can_be_retried(browser: Browser, packaged: Served) -> None:
    tab = browser.open(packaged.url)
    try:
        tab.js("document.getElementById('seed').value = '1e30'")
        send(tab, STORY)
        tab.wait("document.querySelector('.error')")
        assert "seed" in tab.js("document.querySelector('.error').textContent")
        tab.js("document.getElementById('seed').value = ''")
        tab.js("document.getElementById('max_tokens').value = '8'")
        tab.click(".error button")
        tab.wait("document.querySelector('.note') && document.querySelector('.note').textContent")
        assert tab.js("document.querySelectorAll('.error').length") == 0
        assert "cut off" in tab.js("document.querySelector('.note').textContent")
    finally:
        tab.close()


# --- looks ------------------------------------------------------------------------------------


def brightness(tab: Tab) -> int:
    found: int = tab.js("getComputedStyle(document.body).backgroundColor.match(/\\d+/g)"
                        ".map(Number).reduce((a, b) => a + b)")
    return found


def test_light_and_dark(browser: Browser, packaged: Served) -> None:
    with opened(browser, packaged.url) as tab:
        assert brightness(tab) > 600
        tab.dark(True)
        assert brightness(tab) < 150, "as the system has it"
        tab.click("#theme")
        assert brightness(tab) > 600, "unless somebody chose"
        tab.call("Page.reload")
        tab.wait("document.readyState === 'complete' && document.documentElement.dataset.theme")
        assert brightness(tab) > 600


def test_a_phone_is_wide_enough(browser: Browser, packaged: Served) -> None:
    with opened(browser, packaged.url, width=375, height=667) as tab:
        tab.js("showTurns('x'.repeat(300), {content: 'y'.repeat(300) + '\\n\\n```\\n' + "
               "'z'.repeat(300) + '\\n```\\n$$' + 'x+'.repeat(300) + 'y$$'})")
        widest = "Math.max(document.documentElement.scrollWidth, document.getElementById('log')" \
                 ".scrollWidth, document.body.scrollWidth)"
        assert tab.js(widest) <= 375
        assert tab.js("getComputedStyle(document.getElementById('panel')).visibility") == "hidden"
        for button in ("#list-open", "#theme", "#panel-open", "#send", "#state"):
            left, _, width, _ = tab.box(button)
            assert left >= 0 and left + width <= 375, button
        for opener, panel in (("panel-open", "panel"), ("list-open", "list")):
            tab.click(f"#{opener}")
            tab.wait(f"(box => box.left >= 0 && box.right <= 375)"
                     f"(document.getElementById('{panel}').getBoundingClientRect())")
            assert tab.js(f"document.getElementById('{opener}').ariaExpanded") == "true"
            assert tab.js("document.getElementById('chat').inert"), "the focus stays in the drawer"
            assert tab.js(widest) <= 375
            tab.press("Escape")
            tab.wait(f"getComputedStyle(document.getElementById('{panel}')).visibility === "
                     "'hidden'")
            assert tab.js("document.activeElement.id") == opener
            assert not tab.js("document.getElementById('chat').inert")


def test_every_control_has_an_accessible_name(browser: Browser, packaged: Served) -> None:
    with opened(browser, packaged.url) as tab:
        tree = tab.call("Accessibility.getFullAXTree")["nodes"]
        wanted = {"button", "textbox", "spinbutton", "checkbox", "log", "combobox", "searchbox",
                  "link", "navigation"}
        named = [(one["role"]["value"], one.get("name", {}).get("value", "")) for one in tree
                 if not one.get("ignored") and one["role"]["value"] in wanted]
        assert len(named) > 15 and [role for role, name in named if not name] == []


def test_markdown_is_rendered(browser: Browser) -> None:
    text = ("# A head\n\nSome *em* and `code`\nin two lines\n\n- one\n- two\n  more\n\n3. three\n"
            "4. four\n\n---\n\n| a | b |\n|---|:-:|\n| 1 | **2** |\n\n"
            "```py\nx = '# no'\n\n- no\n```\nend")
    want = "h3 p ul ol hr div.grid div.code p"
    with staged([text]) as (_, url), opened(browser, url) as tab:
        send(tab, "Hi")
        tab.wait(DONE)
        assert tab.js("[...document.querySelector('.said').children].map(one => "
                      "one.tagName.toLowerCase() + (one.className && '.' + one.className))"
                      ".join(' ')") == want
        assert tab.js("[...document.querySelectorAll('.said :is(th, td)')].map(one => "
                      "one.textContent).join()") == "a,b,1,2"
        assert tab.js("document.querySelector('.said pre').textContent") == "x = '# no'\n\n- no"
        assert tab.js("document.querySelector('.said ol').start") == 3
        # Cut anywhere, what is drawn in the end is the same.
        assert tab.js("""(() => {
            const text = branchOf(shown)[1].content, whole = document.querySelector('.said');
            const said = el('div');
            for (let i = 0; i <= text.length; i++) render(said, text.slice(0, i));
            return said.isEqualNode(el('div', '', ...[...whole.cloneNode(true).children]));
        })()""")


def test_scrolling_up_stops_autoscroll(browser: Browser) -> None:
    with staged(["line\n\n" * 400]) as (script, url), opened(browser, url) as tab:
        script.most = 300
        send(tab, "Hi")
        tab.wait("document.querySelectorAll('.said p').length > 60")
        assert tab.js("atEnd()"), "who is at the end stays there"
        tab.js("document.getElementById('log').scrollTop = 100; "
               "window.had = document.querySelectorAll('.said p').length")
        script.most = 600
        tab.wait("document.querySelectorAll('.said p').length > had + 40")
        assert tab.js("document.getElementById('log').scrollTop") == 100
        tab.click("#jump")
        script.most = 10**9
        tab.wait("atEnd() && document.getElementById('jump').hidden")
        tab.wait(DONE)
        tab.size(1280, 500)
        tab.wait("atEnd() && document.getElementById('jump').hidden")


# --- with models that mean harm -----------------------------------------------------------------


def test_model_output_is_never_markup(browser: Browser) -> None:
    with staged([EVIL]) as (script, url), opened(browser, url) as tab:
        tab.wait("document.querySelector('#state.wait')")
        send(tab, EVIL.replace("\n", " "))
        tab.wait(DONE)
        assert tab.js("document.querySelectorAll('.said :is(pre, li, h3)').length") >= 4
        assert tab.js("branchOf(shown)[1].content") == EVIL
        tab.js(f"""{{ const evil = {EVIL!r}, answer = {{content: evil, began: 0}};
            take(answer, {{choices: [{{delta: {{reasoning_content: evil, tool_calls: [
                {{index: 0, id: evil, function: {{name: evil, arguments: evil}}}}]}}, logprobs: {{
                content: [{{token: evil, logprob: -1, top_logprobs: [{{token: evil, logprob: -2}}]
                }}]}}}}]}});
            showTurns(evil, {{...answer, note: evil, shaded: true}});
            document.querySelector('.tok').focus(); showError(shown, new Error(evil)); }}""")
        assert "onerror" in tab.js("document.querySelector('.turn:last-of-type .said').textContent")
        inside = "#log :is(img, script, svg, b, u, i, a, iframe), #tip img, #hint *, " \
                 "#model :not(option), #conversations img, #about *"
        assert tab.js(f"document.querySelectorAll({inside!r}).length") == 0
        assert tab.js("window.pwned") is None


def test_the_policy_holds(browser: Browser) -> None:
    with staged(["Hello"]) as (_, url):
        tab = browser.open(url)
        try:
            for attempt in (
                "document.body.innerHTML = '<b>x</b>'",
                "document.write('<b>x</b>')",
                "eval('window.pwned = 1')",
                "document.body.setAttribute('onclick', 'window.pwned = 1')",
                "document.createElement('script').text = 'window.pwned = 1'",
                "fetch('http://127.0.0.2:1/', {mode: 'no-cors'})",
            ):
                told = tab.js(f"(async () => {{ try {{ await ({attempt}); return '' }} "
                              f"catch (error) {{ return String(error) }} }})()")
                assert told, attempt
            assert tab.js("window.pwned") is None
            said = " ".join(tab.complaints())
            assert "Content Security Policy" in said, "and the fetch was not refused by the network"
        finally:
            tab.close()


def test_a_key_is_asked_for_and_sent(browser: Browser) -> None:
    with staged(["Hello"], api_key="secret") as (script, url):
        tab = browser.open(url)
        try:
            tab.wait("document.querySelector('#state.bad')")
            send(tab, "Hi")
            tab.wait("document.querySelector('.error')")
            assert "API key" in tab.js("document.querySelector('.error').textContent")
            assert tab.js("document.activeElement.id") == "key" and script.asked == []
            tab.type("secret")
            tab.js("document.getElementById('key').blur()")
            tab.wait("document.querySelector('#state.wait')")
            tab.click(".error button")
            tab.wait(DONE)
            assert tab.js("document.querySelector('.said').textContent") == "Hello"
            assert tab.js("Object.values(localStorage).includes('secret')") is False
        finally:
            tab.close()


def test_the_page_sends_the_conversation_and_settings(browser: Browser) -> None:
    with staged(["Hello **you**"]) as (script, url), opened(browser, url) as tab:
        for field, value in (("temperature", "0.5"), ("seed", "7"), ("system", "Be brief.")):
            tab.js(f"document.getElementById({field!r}).value = {value!r}")
        for text in ("One", "Two"):
            send(tab, text)
            tab.wait(f"document.querySelector('.turn') && {DONE}")
            tab.wait("!busyNow()")
        assert len(script.asked) == 2
        asked = script.asked[1]
        assert asked.params is not None and asked.messages is not None
        assert (asked.params.temperature, asked.params.seed) == (0.5, 7)
        assert [one.content for one in asked.messages] == [
            "Be brief.", "One", "Hello **you**", "Two"]
        assert tab.js("document.querySelector('.said strong').textContent") == "you"
        tab.click("#new")
        assert tab.js("branchOf(shown).length") == 0
        assert tab.js("document.querySelectorAll('.empty button').length") > 0
