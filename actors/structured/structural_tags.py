"""Structural tags (xgrammar's, as SGLang and vLLM accept them): tagged parts amid free text. Parts
of our own kinds are `thought`, `token` (a special token, by its text), `plus` (a part once or
several times), `tokens` of an `any_text` (special tokens that may stand in it), and `lenient` and
`additional_properties` of a `json_schema`.

A description in JSON becomes a grammar in Lark's syntax, with llguidance's lazy lexemes for text
that ends where a trigger or a fixed text begins, and its `%json` for schemas. The grammar is built
from the end: each part is translated given what follows it, since free text depends on that.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from actorium.actors.config.reasoning_formats import REASONING_FORMATS
from actorium.actors.errors import InvalidRequest
from actorium.actors.structured.schemas import closed
from actorium.actors.structured.text_state import FREE, TextLimits

MAX_PARTS = 2000
"""The most parts of a description."""
TEXT = r"/(?s:.*)/"
WORDS = r"/(?s:.+)/"
SPECIAL_TOKEN = re.compile(r'<\|[\w"]{1,64}\|?>|<\w{1,64}\|>')
ONE_SIDED = re.compile(r'<\|\w+>|<\w+\|>|<\|"\|>')
"""Gemma 4's marks: special tokens, which no text of a grammar matches."""
FREE_MARK = FREE[0][0].decode()
"""Begins the mark of a call whose arguments are free text."""
SPACES_BEHIND = r"/[ \n]{0,8}/"
"""Between a thought and the answer. Bounded, or a model may fill its context with blanks."""
_QUOTE = '"'
Node = dict[str, Any]


class Then(NamedTuple):
    """What follows a part: an expression of the grammar."""

    expression: str
    leads: list[tuple[str, str]] | None = None
    """(fixed text or special token that it begins with, in Lark; what follows on that), of each
    alternative; None where it does not begin with these."""
    last: bool = False
    """True for the end of the grammar."""


END = Then('""', None, True)


class TagGrammar(NamedTuple):
    """The grammar of a structural tag."""

    lark: str
    """Its text in Lark's syntax."""
    others: dict[str, str]
    """Name -> text of the grammars in Lark's syntax or GBNF that it refers to."""
    limits: TextLimits


def lark_of(text: str, whitespace: str) -> TagGrammar:
    """Returns the grammar. whitespace: expression of what may stand between the parts of a JSON
    text. Raises `InvalidRequest` naming the part that it cannot translate."""
    try:
        return _Translation(whitespace).grammar(format_of(text))
    except RecursionError:
        raise _wrong("structural_tag", "too deep") from None


def format_of(text: str) -> Any:
    """Returns the description of the whole text, in the newer form. Raises `InvalidRequest`."""
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _wrong("structural_tag", f"no JSON: {error}") from None
    if isinstance(given, dict) and "structures" in given:
        return _old_form(given)
    if isinstance(given, dict) and given.get("type") == "structural_tag":
        _known(given, "structural_tag", ("type", "format"))
        return given.get("format")
    raise _wrong("structural_tag", "must be {\"structures\": ..., \"triggers\": ...} or "
                 "{\"type\": \"structural_tag\", \"format\": ...}")


class _Translation:
    """The rules of one grammar while they are made."""

    def __init__(self, whitespace: str) -> None:
        self._whitespace = whitespace
        self._rules: list[str] = []
        self._others: dict[str, str] = {}
        self._parts = 0
        self._limits = TextLimits(json=True)
        self._in_marks = False
        """Within marks behind which `TextState` expects free text."""
        self._kinds: dict[str, Callable[[Node, str, Then], Then]] = {
            "const_string": self._const, "json_schema": self._schema, "regex": self._regex,
            "any_text": self._text, "token": self._token, "grammar": self._grammar,
            "thought": self._thought, "plus": self._plus,
            "sequence": self._sequence, "or": self._either, "tag": self._tag,
            "triggered_tags": self._triggered, "tags_with_separator": self._separated}

    def grammar(self, given: Any) -> TagGrammar:
        start = self._part(given, "structural_tag.format", END)
        parts = given["elements"] if given["type"] == "sequence" else [given]
        if [part["type"] for part in parts] == ["thought", "any_text"]:
            self._limits = self._limits._replace(free=True)
        lark = "\n".join(["%llguidance {}", f"start: {start.expression}", *self._rules, ""])
        return TagGrammar(lark, self._others, self._limits)

    def _no_json(self) -> None:
        """Notes that the text is not JSON beside the marks that `TextState` knows."""
        if not self._in_marks:
            self._limits = self._limits._replace(json=False)

    def _rule(self, expression: str, lazy: bool = False) -> str:
        """Adds a rule and returns its name."""
        name = f"part_{len(self._rules)}"
        self._rules.append(f"{name}{'[lazy]' if lazy else ''}: {expression}")
        return name

    def _part(self, node: Any, where: str, then: Then) -> Then:
        self._parts += 1
        if self._parts > MAX_PARTS:
            raise _wrong("structural_tag", f"more than {MAX_PARTS} parts")
        kind = node.get("type") if isinstance(node, dict) else None
        if not isinstance(kind, str) or kind not in self._kinds:
            known = ", ".join(self._kinds)
            raise _wrong(where, f"type must be one of {known}, got {json.dumps(kind)}")
        return self._kinds[kind](node, where, then)

    # --- kinds of parts ---------------------------------------------------------------------------

    def _fixed(self, text: str, then: Then) -> Then:
        if not text:
            return then
        if text.count('"') % 2:
            self._no_json()
        return Then(f"{_quoted(text)} {then.expression}", [(_quoted(text), then.expression)])

    def _token(self, node: Node, where: str, then: Then) -> Then:
        _known(node, where, ("type", "text"))
        text = _special_token(node.get("text"), f"{where}.text")
        return Then(f"{text} {then.expression}", [(text, then.expression)])

    def _const(self, node: Node, where: str, then: Then) -> Then:
        _known(node, where, ("type", "value"))
        return self._fixed(_string(node, where, "value"), then)

    def _schema(self, node: Node, where: str, then: Then) -> Then:
        _known(node, where, ("type", "json_schema", "style", "lenient", "additional_properties"))
        if node.get("style", "json") != "json":
            raise _wrong(f"{where}.style", f"{node['style']!r} is not supported")
        schema, where = node.get("json_schema"), f"{where}.json_schema"
        if schema is True:
            schema = {}
        if not isinstance(schema, dict):
            raise _wrong(where, "must be a JSON schema")
        try:
            own = closed(schema, not node.get("additional_properties"), bool(node.get("lenient")))
            if own is False:
                raise ValueError("it allows nothing")
        except ValueError as error:
            raise _wrong(where, str(error)) from None
        own = (own if isinstance(own, dict) else {}) | {
            "x-guidance": {"whitespace_pattern": self._whitespace}}
        return Then(f"{self._rule(f'%json {json.dumps(own)}')} {then.expression}")

    def _grammar(self, node: Node, where: str, then: Then) -> Then:
        _known(node, where, ("type", "grammar"))
        self._no_json()
        name = f"grammar-{len(self._others)}"
        self._others[name] = _string(node, where, "grammar")
        return Then(f"@{name} {then.expression}")

    def _thought(self, node: Node, where: str, then: Then) -> Then:
        """Matches a thought and the blanks behind it. Where it is not open yet, it may be left
        out."""
        _known(node, where, ("type", "open", "max_tokens", "marks"))
        budget, is_open = node.get("max_tokens"), bool(node.get("open"))
        if budget is not None and (type(budget) is not int or budget < 0):
            raise _wrong(f"{where}.max_tokens", "must be a whole number, not negative")
        name = node.get("marks", "qwen3")
        if name not in REASONING_FORMATS:
            raise _wrong(f"{where}.marks", f"must be one of {', '.join(REASONING_FORMATS)}")
        self._limits = self._limits._replace(thought=name, opened=is_open, budget=budget)
        begin, end = map(_any_of, (REASONING_FORMATS[name].begin, REASONING_FORMATS[name].end))
        then = self._named(then)
        # No text matches a special token, so it ends a text by itself.
        thought = f"{self._rule(f'{TEXT} {end}', lazy=_QUOTE in end)} {SPACES_BEHIND}"
        if is_open:
            return Then(f"{thought} {then.expression}")
        return Then(self._rule(f"{begin} {thought} {then.expression} | {then.expression}"))

    def _regex(self, node: Node, where: str, then: Then) -> Then:
        _known(node, where, ("type", "pattern"))
        self._no_json()
        pattern = _string(node, where, "pattern").replace("/", r"\/").replace("\n", r"\n")
        return Then(f"/{pattern}/ {then.expression}")

    def _text(self, node: Node, where: str, then: Then) -> Then:
        _known(node, where, ("type", "excludes", "tokens"))
        if node.get("excludes"):
            raise _wrong(f"{where}.excludes", "is not supported")
        self._no_json()
        if "tokens" not in node:
            return self._until(then, where)
        tokens = [_special_token(one, f"{where}.tokens") for one in _list(node, where, "tokens")]
        if not then.last and not (then.leads and all(lead[0] == "<" for lead, _ in then.leads)):
            raise _wrong(where, "any_text with tokens must be the last part, or a special token "
                         "must follow on it")
        text = self._rule(f"({' | '.join([WORDS, *tokens])})*")
        return Then(f"{text} {then.expression}")

    def _until(self, then: Then, where: str) -> Then:
        """Matches any text, up to where what follows begins."""
        if then.last:
            return Then(self._rule(TEXT))
        if not then.leads:
            raise _wrong(where, "any_text must be the last part, or fixed text must follow on it")
        # No text matches a special token, so it ends a text by itself.
        choices = [f"{self._rule(f'{TEXT} {lead}', lazy=True)} {rest}" if lead.startswith(_QUOTE)
                   else f"{self._rule(TEXT)} {lead} {rest}" for lead, rest in then.leads]
        return Then(self._rule(" | ".join(choices)))

    def _sequence(self, node: Node, where: str, then: Then) -> Then:
        _known(node, where, ("type", "elements"))
        elements = _list(node, where, "elements")
        for number in reversed(range(len(elements))):
            then = self._part(elements[number], f"{where}.elements[{number}]", then)
        return then

    def _either(self, node: Node, where: str, then: Then) -> Then:
        _known(node, where, ("type", "elements"))
        then = self._named(then)
        return self._one_of([self._part(part, f"{where}.elements[{number}]", then)
                             for number, part in enumerate(_list(node, where, "elements"))])

    def _plus(self, node: Node, where: str, then: Then) -> Then:
        """Matches a part once or several times, one behind the other."""
        _known(node, where, ("type", "content"))
        then, more = self._named(then), f"part_{len(self._rules)}"
        self._rules.append("")
        place = len(self._rules) - 1
        each = self._part(node.get("content"), f"{where}.content", Then(more))
        self._rules[place] = f"{more}: {each.expression} | {then.expression}"
        return each

    def _one_of(self, choices: Sequence[Then]) -> Then:
        leads: list[tuple[str, str]] | None = []
        for choice in choices:
            leads = None if leads is None or choice.leads is None else leads + choice.leads
        return Then(self._rule(" | ".join(choice.expression for choice in choices)), leads)

    def _named(self, then: Then) -> Then:
        """Returns the same behind a rule, so that what several parts share is written once."""
        if then.last or " " not in then.expression:
            return then
        leads = then.leads and [(text, self._rule(rest) if " " in rest else rest)
                                for text, rest in then.leads]
        return Then(self._rule(then.expression), leads)

    def _tag(self, node: Node, where: str, then: Then, begun: str = "") -> Then:
        """begun: the part of its opening that has been written already."""
        _known(node, where, ("type", "begin", "content", "end"))
        begin, ends = _string(node, where, "begin"), node.get("end")
        texts = ends if isinstance(ends, list) else [ends]
        if not texts or not all(isinstance(text, str) for text in texts):
            raise _wrong(f"{where}.end", "must be a string, or a list of strings")
        then = self._named(then)
        ended = [self._fixed(str(text), then) for text in texts]
        after = ended[0] if len(ended) == 1 else self._one_of(ended)
        before, self._in_marks = self._in_marks, self._in_marks or FREE_MARK in begin
        content = self._part(node.get("content"), f"{where}.content", after)
        self._in_marks = before
        return self._fixed(begin.removeprefix(begun), content)

    def _triggered(self, node: Node, where: str, then: Then) -> Then:
        """Matches text in which a trigger begins one of the tags."""
        _known(node, where, ("type", "triggers", "tags", "at_least_one", "stop_after_first",
                             "excludes"))
        if node.get("excludes"):
            raise _wrong(f"{where}.excludes", "is not supported")
        self._no_json()
        triggers = _list(node, where, "triggers")
        if not all(isinstance(trigger, str) and trigger for trigger in triggers):
            raise _wrong(f"{where}.triggers", "must be strings, none of them empty")
        then, again = self._named(then), f"part_{len(self._rules)}"
        self._rules.append("")  # what follows a tag: more text, or the end
        place = len(self._rules) - 1
        after = then if node.get("stop_after_first") else Then(again)
        tags: dict[str, list[str]] = {trigger: [] for trigger in triggers}
        for number, tag in enumerate(_list(node, where, "tags")):
            at = f"{where}.tags[{number}]"
            trigger = _trigger_of(tag, triggers, at)
            tags[trigger].append(self._tag(tag, at, after, begun=trigger).expression)
        begins = [f"{self._rule(f'{TEXT} {_quoted(trigger)}', lazy=True)} "
                  f"({' | '.join(found)})" for trigger, found in tags.items() if found]
        stops = self._until(then, where).expression
        self._rules[place] = f"{again}: {' | '.join([*begins, stops])}"
        if node.get("at_least_one"):
            return Then(self._rule(" | ".join(begins)))
        return Then(again)

    def _separated(self, node: Node, where: str, then: Then) -> Then:
        """Matches tags with a fixed text between them."""
        _known(node, where, ("type", "tags", "separator", "at_least_one", "stop_after_first"))
        then, more = self._named(then), f"part_{len(self._rules)}"
        self._rules.append("")
        place = len(self._rules) - 1
        tags = self._one_of([self._tag(tag, f"{where}.tags[{number}]", Then(more))
                             for number, tag in enumerate(_list(node, where, "tags"))])
        go_on = self._fixed(_string(node, where, "separator"), tags).expression
        choices = [then.expression] if node.get("stop_after_first") else [go_on, then.expression]
        self._rules[place] = f"{more}: {' | '.join(choices)}"
        return tags if node.get("at_least_one") else self._one_of([tags, then])


def _old_form(given: Node) -> Node:
    """Converts the older `structures` and `triggers` to tags."""
    _known(given, "structural_tag", ("type", "structures", "triggers"))
    tags = []
    for number, part in enumerate(_list(given, "structural_tag", "structures")):
        where = f"structural_tag.structures[{number}]"
        if not isinstance(part, dict):
            raise _wrong(where, "must be an object")
        _known(part, where, ("begin", "schema", "end"))
        tags.append({"type": "tag", "begin": part.get("begin"), "end": part.get("end"),
                     "content": {"type": "json_schema", "json_schema": part.get("schema")}})
    return {"type": "triggered_tags", "triggers": given.get("triggers"), "tags": tags}


def _trigger_of(tag: Any, triggers: Sequence[str], where: str) -> str:
    if not isinstance(tag, dict):
        raise _wrong(where, "must be a tag")
    begin = _string(tag, where, "begin")
    found = [trigger for trigger in triggers if begin.startswith(trigger)]
    if len(found) != 1:
        raise _wrong(f"{where}.begin", f"must begin with one of the triggers, {begin!r} begins "
                     f"with {len(found)}")
    return found[0]


def _known(node: Node, where: str, keys: Sequence[str]) -> None:
    for key in node:
        if key not in keys:
            raise _wrong(f"{where}.{key}", "is not supported")


def _any_of(marks: Sequence[str]) -> str:
    """Returns any of a thought's marks."""
    each = [_in_lark(mark) for mark in marks]
    return each[0] if len(each) == 1 else f"({' | '.join(each)})"


def _in_lark(mark: str) -> str:
    """Returns a thought's mark: text, or a special token that no text matches, and what follows it.
    """
    token = ONE_SIDED.match(mark)
    if token is None:
        return _quoted(mark)
    rest = mark[token.end():]
    return f"{token[0]} {_in_lark(rest)}" if rest else token[0]


def _special_token(text: Any, where: str) -> str:
    if not isinstance(text, str) or SPECIAL_TOKEN.fullmatch(text) is None:
        raise _wrong(where, "must be a special token's text, as <|end|>")
    return text


def _string(node: Node, where: str, key: str) -> str:
    value = node.get(key)
    if not isinstance(value, str):
        raise _wrong(f"{where}.{key}", "must be a string")
    return value


def _list(node: Node, where: str, key: str) -> list[Any]:
    value = node.get(key)
    if not isinstance(value, list) or not value:
        raise _wrong(f"{where}.{key}", "must be a list, not empty")
    return value


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _wrong(where: str, why: str) -> InvalidRequest:
    return InvalidRequest(f"structured: {where}: {why}", "structured")
