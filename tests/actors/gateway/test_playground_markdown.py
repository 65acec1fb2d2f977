"""What the playground makes of a model's markdown, in a headless Chromium."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from helpers_browser import Browser, Tab
from helpers_stage import opened, staged

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def tab(browser: Browser) -> Iterator[Tab]:
    with staged(["Hello"]) as (_, url), opened(browser, url) as found:
        yield found


def drawn(tab: Tab, text: str) -> str:
    """The markup of a text, as the browser writes it down; MathML only by its text in TeX."""
    made: str = tab.js(f"""(() => {{
        const said = el('div');
        render(said, {json.dumps(text)});
        for (const code of said.querySelectorAll('.bar')) code.remove();
        for (const one of said.querySelectorAll('math')) one.replaceWith('MATH');
        for (const one of said.querySelectorAll('*')) {{
            for (const name of ['tabindex', 'target', 'rel', 'referrerpolicy', 'title', 'scope'])
                one.removeAttribute(name);
        }}
        return said.innerHTML;
    }})()""")
    return made


@pytest.mark.parametrize(("text", "markup"), [
    ("a *b* **c** ***d*** _e_ ~~f~~", "<p>a <em>b</em> <strong>c</strong> <strong><em>d</em>"
                                      "</strong> <em>e</em> <del>f</del></p>"),
    ("snake_case_name 2*3*4 a * b", "<p>snake_case_name 2<em>3</em>4 a * b</p>"),
    ("**a *b* c**", "<p><strong>a <em>b</em> c</strong></p>"),
    (r"\*no\* `a\` \_", r"<p>*no* <code>a\</code> _</p>"),
    ("``a`b`` ` c", "<p><code>a`b</code> ` c</p>"),
    ("- a\n  - b\n    1. c\n- d", "<ul><li>a<ul><li>b<ol><li>c</li></ol></li></ul></li>"
                                  "<li>d</li></ul>"),
    ("- a\n\n  b\n\nc", "<ul><li>a<p>b</p></li></ul><p>c</p>"),
    ("1. a\n   ```py\n   x\n   ```\n2. b", '<ol><li>a<div class="code"><pre><code>x</code></pre>'
                                           "</div></li><li>b</li></ol>"),
    ("> a\n> > b\n\nc", "<blockquote><p>a</p><blockquote><p>b</p></blockquote></blockquote>"
                        "<p>c</p>"),
    ("## a\n#### b\n#c", "<h4>a</h4><h6>b</h6><p>#c</p>"),
    ("~~~\n```\n~~~", '<div class="code"><pre><code>```</code></pre></div>'),
    ("a | b\n--|--:\n`x|y` | 2", '<div class="grid"><table><thead><tr><th>a</th><th class="right">'
     'b</th></tr></thead><tbody><tr><td><code>x|y</code></td><td class="right">2</td></tr></tbody>'
     "</table></div>"),
    ("a $x$ and \\(y\\)", '<p>a <span class="math">MATH</span> and <span class="math">MATH</span>'
                          "</p>"),
    ("It costs $5 or $6. $HOME and $PATH", "<p>It costs $5 or $6. $HOME and $PATH</p>"),
    ("$$\nx\n$$\nb", '<span class="math display">MATH</span><p>b</p>'),
    ("a \\[x\\] b $$y$$", '<p>a <span class="math display">MATH</span> b '
                          '<span class="math display">MATH</span></p>'),
    (r"$\frac{$", r'<p><span class="math"><code>\frac{</code></span></p>'),
    (r"$\nosuch{a}$", r'<p><span class="math"><code>\nosuch{a}</code></span></p>'),
    ("[a](https://b.c/d_(e)) <https://f.g> https://h.i/j.", '<p><a href="https://b.c/d_(e)">a</a> '
     '<a href="https://f.g">https://f.g</a> <a href="https://h.i/j">https://h.i/j</a>.</p>'),
    ("![p](https://b.c/d.png)", '<p><a href="https://b.c/d.png">Picture: p</a></p>'),
    ("[a](javascript:b) [c](data:text/html,d) [e](/f) [g]( h)",
     "<p>[a](javascript:b) [c](data:text/html,d) [e](/f) [g]( h)</p>"),
    ("[a](JavaScript:alert(1)) <javascript:b> [c](https:evil)",
     "<p>[a](JavaScript:alert(1)) &lt;javascript:b&gt; [c](https:evil)</p>"),
])
def test_markdown(tab: Tab, text: str, markup: str) -> None:
    assert drawn(tab, text) == markup


def test_links_tell_the_other_page_nothing(tab: Tab) -> None:
    assert tab.js("""(() => { const said = el('div'); render(said, '[a](https://b.c)');
        const made = said.querySelector('a'); return [made.target, made.rel, made.title] })()""") \
        == ["_blank", "noopener noreferrer nofollow", "https://b.c"]


@pytest.mark.parametrize("tex", [
    r"\href{javascript:window.pwned=1}{x}", r"\url{javascript:window.pwned=1}",
    r"\includegraphics{https://example.com/x.png}", r"\class{x}{y}", r"\style{color:red}{y}",
    r"\id{log}{x}", r"\data{a=b}{x}", r"\text{<img src=x onerror=window.pwned=1>}",
    r"\def\a{\a\a}\a", r"\def\a#1{#1#1#1#1}\a{\a{\a{\a{\a{\a{\a{\a{\a{\a{\a{x}}}}}}}}}}}",
    r"\rule{9999em}{9999em}", "{" * 4000, "^" * 200, r"\begin{matrix}" * 300,
    r"\kern{-900em}x"])
def test_formulas_cannot_do_harm(tab: Tab, tex: str) -> None:
    """No link, picture or attribute of the model's choice, nothing outside its own box; soon."""
    made = tab.js(f"""(() => {{
        const began = performance.now(), made = formula({json.dumps(tex)}, true);
        document.body.append(made);
        const box = made.getBoundingClientRect(), wide = document.documentElement.scrollWidth;
        const found = [performance.now() - began, made.querySelectorAll(
            'a, img, [href], [src], [id], [data-a], .x, script').length, wide, box.width];
        made.remove();
        return found;
    }})()""")
    assert made[0] < 3000 and made[1] == 0 and made[2] <= 1280 and made[3] <= 1280
    assert tab.js("window.pwned") is None


@pytest.mark.parametrize("piece", [
    "*", "_", "**a ", "`", "``a`", "[", "[a](", "![", "$", "$a", "\\(", "~~", "<", "> ", "- ",
    "  - a\n", "|", "|-", "| a |\n|---|\n", "```\n", "$$\n", "https://", "1. ", "#", "\\", "***a_"])
def test_long_texts_are_drawn_soon(tab: Tab, piece: str) -> None:
    """A model that repeats itself does not hang the page."""
    text = piece * (60_000 // len(piece))
    took = tab.js(f"""(() => {{ const began = performance.now(), said = el('div');
        render(said, {json.dumps(text)}); return performance.now() - began }})()""")
    assert took < 3000


def test_a_growing_text_is_not_drawn_anew(tab: Tab) -> None:
    """Blocks that are over stay the same nodes, and the result is that of the whole text."""
    assert tab.js("""(() => {
        const whole = Array.from({length: 40}, (_, i) => `para ${i}\\n\\n- a\\n- b\\n\\n`).join('');
        const said = el('div'), fresh = el('div');
        let first = null;
        for (let i = 0; i <= whole.length; i += 7) {
            render(said, whole.slice(0, i));
            if (i > 20) first ??= said.firstElementChild;
        }
        render(said, whole);
        render(fresh, whole);
        return first === said.firstElementChild && said.innerHTML === fresh.innerHTML;
    })()""")
    assert tab.js("""(() => { const said = el('div'); render(said, '# a\\n\\nb');
        render(said, 'other'); return said.innerHTML })()""") == "<p>other</p>"


def test_code_is_coloured_and_copied_whole(tab: Tab) -> None:
    text = "```python\ndef f(x):  # why\n    return \"a\" + '<b>'\n```"
    made = tab.js(f"""(() => {{ const said = el('div'); render(said, {json.dumps(text)});
        return [said.querySelector('code').textContent, said.querySelector('.bar span').textContent,
                [...said.querySelectorAll('code span')].map(one => one.className + ' ' +
                 one.textContent)] }})()""")
    assert made == ["def f(x):  # why\n    return \"a\" + '<b>'", "python", [
        "reserved def", "comment # why", "reserved return", 'string "a"', "string '<b>'"]]
