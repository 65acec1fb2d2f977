"""Conversations of the playground in a headless Chromium: kept, continued, carried elsewhere."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator

import pytest
from helpers_browser import Browser, Tab
from helpers_served import Served, serving
from helpers_stage import DONE, STORY, opened, send, staged

pytestmark = pytest.mark.browser

LONG = """{ const ask = window.fetch; window.fetch = (to, how) => {
  if (to.endsWith('completions')) how.body = JSON.stringify({
      ...JSON.parse(how.body), ignore_eos: true, max_tokens: 200, temperature: 0});
  return ask(to, how); } }"""
"""Answers that take a while, and are the same each time."""
SAID = "(document.querySelector('.said') || {textContent: ''}).textContent"
TITLES = "[...document.querySelectorAll('#conversations .name')].map(one => one.textContent)"


@pytest.fixture(scope="module")
def mortal() -> Iterator[Served]:
    """An engine whose actors may be killed."""
    with serving(max_num_seqs=4) as found:
        yield found


def reload(tab: Tab) -> None:
    tab.js("window.old = true")
    tab.call("Page.reload")
    tab.wait("!window.old && document.readyState === 'complete'")


def chat(tab: Tab, *texts: str) -> None:
    for text in texts:
        send(tab, text)
        tab.wait("document.querySelector('.turn')")
        tab.wait(f"!busyNow() && {DONE}")


# --- kept ---------------------------------------------------------------------------------------


def test_conversations_are_kept_found_and_named(browser: Browser) -> None:
    with staged(["Hello **you**"]) as (script, url), opened(browser, url) as tab:
        chat(tab, "One", "Two")
        tab.click("#new")
        chat(tab, "Three")
        tab.wait(f"{TITLES}.join() === 'Three,One'")
        reload(tab)
        tab.wait("document.querySelectorAll('.turn').length === 2")
        assert tab.js("document.querySelector('.bubble').textContent") == "Three", "as it was"
        tab.wait(f"{TITLES}.length === 2")
        tab.js("document.querySelectorAll('#conversations .name')[1].click()")
        tab.wait("document.querySelectorAll('.turn').length === 4")
        assert tab.js("document.querySelector('.said strong').textContent") == "you"
        chat(tab, "Four")
        assert [one.content for one in script.asked[-1].messages or []] == [
            "One", "Hello **you**", "Two", "Hello **you**", "Four"]
        tab.js("document.getElementById('search').focus()")
        tab.type("thre")
        tab.wait(f"{TITLES}.join() === 'Three'")
        tab.js("document.getElementById('search').value = ''; list()")
        tab.wait(f"{TITLES}.length === 2")
        tab.js("document.querySelector('#conversations li button[aria-label^=Rename]').click()")
        tab.type("A better name")
        tab.press("Enter")
        tab.wait(f"{TITLES}[0] === 'A better name'")
        assert tab.js("document.activeElement.getAttribute('aria-label')") == \
            "Rename A better name"
        reload(tab)
        tab.wait(f"{TITLES}.join() === 'A better name,Three'")


def test_a_deleted_conversation_can_be_had_back(browser: Browser) -> None:
    with staged(["Hello"]) as (_, url), opened(browser, url) as tab:
        chat(tab, "One")
        tab.click("#new")
        chat(tab, "Two")
        tab.wait(f"{TITLES}.length === 2")
        tab.js("document.querySelector('#conversations li button[aria-label^=Delete]').click()")
        tab.wait(f"{TITLES}.join() === 'One'")
        assert tab.js("document.querySelectorAll('.turn').length") == 0
        tab.js("document.querySelector('#hint button').click()")
        tab.wait(f"{TITLES}.join() === 'Two,One'")
        tab.js("document.querySelector('#conversations li button[aria-label^=Delete]').click()")
        tab.wait(f"{TITLES}.length === 1")
        reload(tab)
        tab.wait(f"{TITLES}.join() === 'One'")


def test_what_is_deleted_or_refused_does_not_come_back(browser: Browser, mortal: Served) -> None:
    """Not by what its own answer writes when it ends."""
    tab = browser.open(mortal.url, init=LONG)
    try:
        begun(tab)
        tab.wait(f"{TITLES}.length === 1")
        tab.js("document.querySelector('#conversations li button[aria-label^=Delete]').click()")
        tab.wait("running.size === 0")
        tab.js("document.getElementById('seed').value = '1e30'")
        send(tab, "Refuse this")
        tab.wait("document.querySelector('.error')")
        reload(tab)
        tab.wait(f"{TITLES}.join() === 'Refuse this'")
        assert tab.js("store.all().then(all => all.map(one => Object.keys(one.turns).length))") \
            == [1]
        assert tab.js("branchOf(shown).map(one => one.role)") == ["user"]
    finally:
        tab.close()


def test_conversations_are_carried_to_another_browser(browser: Browser) -> None:
    with staged(["Hello"]) as (_, url), opened(browser, url) as tab:
        chat(tab, "One", "Two")
        tab.js("acts('.turn:last-child', 'Again').click()")
        tab.wait(f"document.querySelector('.branches') && {DONE}")
        text = tab.js("""(async () => { let text; const make = URL.createObjectURL;
            URL.createObjectURL = blob => { text = blob.text(); return make(blob); };
            await document.getElementById('export').onclick(); return text })()""")
        turns = tab.js("branchOf(shown).map(one => one.content)")
        assert "pending" not in text
        with opened(browser, url) as other:
            other.js(f"""(async () => {{ const list = new DataTransfer();
                list.items.add(new File([{json.dumps(text)}], 'mine.json'));
                document.getElementById('import-file').files = list.files;
                await document.getElementById('import-file').onchange(); }})()""")
            other.wait(f"{TITLES}.join() === 'One'")
            other.js("document.querySelector('#conversations .name').click()")
            other.wait("document.querySelectorAll('.turn').length === 4")
            assert other.js("branchOf(shown).map(one => one.content)") == turns
            assert other.js("document.querySelector('.branches').textContent") == "‹2 of 2›"


CYCLE = {"a": {"id": "a", "role": "user", "content": "x", "parent": "b", "at": 1},
         "b": {"id": "b", "role": "user", "content": "x", "parent": "a", "at": 1}}


@pytest.mark.parametrize(("text", "why"), [
    ("no JSON", "is no file of conversations"), ("{}", "no list `conversations`"),
    (json.dumps({"conversations": [{"turns": {"a": {"id": "a", "role": "x"}}}]}), "without a role"),
    (json.dumps({"conversations": [{"turns": {"a": {"id": "a", "role": "user"}}}]}),
     "without content"),
    (json.dumps({"conversations": [{"turns": CYCLE}]}), "whose parent is not there")])
def test_a_file_that_is_none_is_refused(browser: Browser, text: str, why: str) -> None:
    with staged(["Hello"]) as (_, url), opened(browser, url) as tab:
        tab.js(f"""(async () => {{ const list = new DataTransfer();
            list.items.add(new File([{json.dumps(text)}], 'mine.json'));
            document.getElementById('import-file').files = list.files;
            await document.getElementById('import-file').onchange(); }})()""")
        hint = tab.js("document.getElementById('hint').textContent")
        assert hint.startswith("mine.json") and why in hint
        assert tab.js(f"{TITLES}.length") == 0


# --- an answer goes on ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(browser: Browser, mortal: Served) -> str:
    """The long answer, undisturbed."""
    with opened(browser, mortal.url, init=LONG) as tab:
        chat(tab, STORY)
        text: str = tab.js("branchOf(shown)[1].content")
        assert len(text) > 500
        return text


def begun(tab: Tab) -> None:
    send(tab, STORY)
    tab.wait(f"{SAID}.length > 60")


def ended(tab: Tab, whole: str) -> None:
    tab.wait(f"!busyNow() && {DONE}", 40)
    assert tab.js("branchOf(shown)[1].content") == whole
    assert tab.js("document.querySelectorAll('.error').length") == 0
    assert "200 tokens" in tab.js("document.querySelector('.facts').textContent")


def test_an_answer_goes_on_without_its_gateway(browser: Browser, mortal: Served,
                                               whole: str) -> None:
    tab = browser.open(mortal.url, init=LONG)
    try:
        begun(tab)
        actors = {one.role: one for one in mortal.engine.client.status().actors}
        os.kill(actors["gateway-0"].pid, signal.SIGKILL)
        ended(tab, whole)
    finally:
        tab.close()


def test_an_answer_goes_on_after_a_reload(browser: Browser, mortal: Served, whole: str) -> None:
    with opened(browser, mortal.url, init=LONG) as tab:
        begun(tab)
        reload(tab)
        tab.wait("document.querySelector('.turn.assistant')")
        ended(tab, whole)


def test_an_answer_goes_on_over_a_broken_connection(browser: Browser, mortal: Served,
                                                    whole: str) -> None:
    """Three times within an answer: before its first event, then within the second one after it
    was asked for again."""
    breaks = """{ const ask = window.fetch; window.tries = []; window.fetch = async (to, how) => {
        const answer = await ask(to, how), number = window.tries.length;
        if (!to.endsWith('completions')) return answer;
        window.tries.push(how.headers['last-event-id'] || '');
        if (number > 2) return answer;
        return new Response(answer.body.pipeThrough(new TransformStream({
                async transform(chunk, to) {
            const end = new TextDecoder().decode(chunk).indexOf('\\n\\n');
            if (number > 0) to.enqueue(end < 0 ? chunk : chunk.slice(0, end + 7));
            if (number > 0 && end < 0) return;
            await new Promise(done => setTimeout(done, 30)); // what came before is read
            to.error(new TypeError('network error'));
        }})), answer);
    } }"""
    with opened(browser, mortal.url, init=LONG + breaks) as tab:
        begun(tab)
        ended(tab, whole)
        tries = tab.js("window.tries")
        assert len(tries) == 4 and tries[:2] == ["", ""] and len(set(tries[1:])) == 3


def test_another_conversation_goes_on_beside_this_one(browser: Browser, mortal: Served,
                                                      whole: str) -> None:
    with opened(browser, mortal.url, init=LONG) as tab:
        begun(tab)
        tab.click("#new")
        assert tab.js("document.querySelectorAll('.turn').length") == 0
        assert tab.js("document.getElementById('stop').hidden")
        tab.wait("document.querySelector('#conversations .dot.running')")
        chat(tab, "Hi")
        tab.js("[...document.querySelectorAll('#conversations .name')].find(one => "
               f"one.textContent === {STORY!r}).click()")
        tab.wait(f"document.querySelector('.bubble').textContent === {STORY!r}")
        ended(tab, whole)


# --- what else a turn may have --------------------------------------------------------------------


def test_thoughts_are_folded_and_calls_are_answered(browser: Browser) -> None:
    call = {"id": "call-1", "name": "weather", "arguments": '{"city": "Bern"}'}
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {
        "type": "object", "properties": {"city": {"type": "string"}}}}}]
    with staged(["It is sunny."]) as (script, url), opened(browser, url) as tab:
        tab.js(f"document.getElementById('tools').value = {json.dumps(tools)!r}")
        tab.js(f"showTurns('Weather?', {{content: '', reasoning: 'They ask', thought: 2.04, "
               f"calls: [{json.dumps(call)}]}})")
        assert tab.js("[...document.querySelectorAll('summary')].map(one => [one.textContent, "
                      "one.parentNode.open])") == [["Thought for 2.0 s", False],
                                                   ["Calls weather", True]]
        assert tab.js("document.querySelector('.call div').textContent") == \
            '{\n  "city": "Bern"\n}'
        tab.js("document.querySelector('.result textarea').focus()")
        tab.type("sunny, 21 C")
        tab.js("document.querySelector('.result button').click()")
        tab.wait("document.querySelector('.turn:last-child .said').textContent === "
                 "'It is sunny.'")
        asked = script.asked[0]
        assert asked.messages is not None
        assert [one.role for one in asked.messages] == ["user", "assistant", "tool"]
        assert asked.messages[2].content == "sunny, 21 C"
        assert asked.messages[1].tool_calls[0].name == "weather"
        assert asked.tools
        tab.js("document.getElementById('tools').value = '{no'")
        send(tab, "Again")
        tab.wait("document.querySelector('.error')")
        assert "Tools: " in tab.js("document.querySelector('.error').textContent")


def test_a_stop_before_the_first_token_ends_the_request(browser: Browser,
                                                        mortal: Served) -> None:
    slow = """{ const ask = window.fetch; window.fetch = async (to, how) => {
        const answer = await ask(to, how);
        if (to.endsWith('completions')) await new Promise(done => { window.go = done; });
        return answer; } }"""
    with opened(browser, mortal.url, init=LONG.replace("200", "3000") + slow) as tab:
        send(tab, STORY)
        tab.wait("window.go")
        tab.press("Escape")
        tab.js("window.go()")
        tab.wait(DONE)
        assert tab.js("document.querySelector('.note').textContent") == "stopped"
        for _ in range(100):
            if not sum(one.gauges.get("running", 0)
                       for one in mortal.engine.client.status().actors):
                return
            tab.js("new Promise(done => setTimeout(done, 20))")
        raise AssertionError("it still runs")


def test_a_model_is_picked_and_remembered(browser: Browser) -> None:
    with staged(["Hello"], names=("big", "small")) as (_, url), opened(browser, url) as tab:
        tab.wait("document.querySelectorAll('#model option').length === 2")
        tab.js("""window.bodies = []; { const ask = window.fetch; window.fetch = (to, how) => {
            if (how.body) bodies.push(JSON.parse(how.body)); return ask(to, how) } }""")
        tab.js("document.getElementById('model').value = 'small'; "
               "document.getElementById('model').dispatchEvent(new Event('change'))")
        chat(tab, "Hi")
        assert tab.js("bodies[0].model") == "small"
        reload(tab)
        tab.wait("document.getElementById('model').value === 'small'")


def test_pictures_are_dropped_pasted_and_kept_by_an_edit(browser: Browser) -> None:
    paste = """(kind => {{ const list = new DataTransfer(), canvas = el('canvas');
        canvas.width = canvas.height = 4;
        const bytes = Uint8Array.from(atob(canvas.toDataURL().split(',')[1]), c => c.charCodeAt(0));
        list.items.add(new File([bytes], 'a.png', {{type: 'image/png'}}));
        document.getElementById('text').dispatchEvent(kind === 'paste'
            ? new ClipboardEvent('paste', {{clipboardData: list, bubbles: true, cancelable: true}})
            : new DragEvent('drop', {{dataTransfer: list, bubbles: true, cancelable: true}}));
    }})({!r})"""
    with staged(["A square."], media=True) as (_, url), opened(browser, url) as tab:
        tab.wait("!document.getElementById('attach').hidden")
        tab.js("""window.bodies = []; { const ask = window.fetch; window.fetch = (to, how) => {
            if (how.body) bodies.push(JSON.parse(how.body)); return ask(to, how) } }""")
        for kind in ("paste", "drop"):
            tab.js(paste.format(kind))
        tab.wait("document.querySelectorAll('#attached button').length === 2")
        tab.js("document.querySelector('#attached button').click()")
        send(tab, "What is it?")
        tab.wait("bodies.length > 0")
        kinds = "bodies.at(-1).messages[0].content.map(one => one.type)"
        assert tab.js(kinds) == ["image_url", "text"]
        assert tab.js("document.querySelectorAll('.bubble img').length") == 1
        tab.wait("!busyNow()")
        tab.js("acts('.user', 'Edit').click()")
        tab.type(" And how big?")
        tab.press("Enter")
        tab.wait("bodies.length > 1")
        assert tab.js(kinds) == ["image_url", "text"]
        assert tab.js("bodies.at(-1).messages[0].content[1].text") == "What is it? And how big?"


def test_a_model_that_is_not_loaded_is_not_asked_about(browser: Browser) -> None:
    listed = {"data": [{"id": "ant", "default": False, "status": {"value": "unloaded"}},
                       {"id": "bee", "default": True, "status": {"value": "loaded"}}]}
    fetched = ("{ const ask = window.fetch; window.asked = []; window.fetch = (to, how) => { "
               "asked.push(to); return to.endsWith('v1/models') ? "
               f"Promise.resolve(new Response(JSON.stringify({json.dumps(listed)}))) "
               ": ask(to, how); } }")
    with staged([""]) as (_, url), opened(browser, url, init=fetched) as tab:
        tab.wait("document.getElementById('model').value === 'bee'")
        assert tab.js("[...document.querySelectorAll('#model option')].map(one => "
                      "one.textContent)") == ["ant (unloaded)", "bee"]
        tab.wait("asked.includes('model_info?model=bee')")
        tab.js("document.getElementById('model').value = 'ant'; "
               "document.getElementById('model').dispatchEvent(new Event('change'))")
        tab.wait("document.getElementById('about').textContent === 'ant · unloaded'")
        assert not tab.js("asked.includes('model_info?model=ant')")
