"""Models with several chat templates: found where transformers finds them, and the one is taken
that transformers takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers_text import Asked, ints, write_model

from actorium.actors.client.requests import encode_raw
from actorium.actors.errors import BadModel, InvalidRequest
from actorium.actors.messages import ChatMessage, Rejected, Tokenize, Tokenized
from actorium.actors.tokenizer.chat_template import load

TOOLS = [{"type": "function", "function": {
    "name": "weather", "description": "", "parameters": {"type": "object", "properties": {}}}}]
PLAIN = "{% for m in messages %}<{{ m.content }}>{% endfor %}"
WITH_TOOLS = "{{ tools | tojson }}" + PLAIN
RAG = "rag:" + PLAIN
NAMED = [{"name": "default", "template": PLAIN}, {"name": "tool_use", "template": WITH_TOOLS},
         {"name": "rag", "template": RAG}]
HI = [ChatMessage("user", "hi")]
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {"tokenizer_config.json": {"chat_template": WITH_TOOLS}},
    "a list": {"tokenizer_config.json": {"chat_template": NAMED}},
    "a file": {"tokenizer_config.json": {"chat_template": NAMED}, "chat_template.jinja": RAG},
    "files": {"chat_template.jinja": PLAIN,
              "additional_chat_templates/tool_use.jinja": WITH_TOOLS,
              "additional_chat_templates/rag.jinja": RAG},
}


def written(path: Path, files: dict[str, Any]) -> Path:
    write_model(path)
    (path / "tokenizer_config.json").write_text("{}")
    for name, content in files.items():
        file = path / name
        file.parent.mkdir(exist_ok=True)
        if isinstance(content, dict):
            content = json.dumps(content | {"tokenizer_class": "PreTrainedTokenizerFast"})
        file.write_text(content)
    return path


def ours(path: Path, tools: list[dict[str, Any]] | None, name: str | None = None) -> str:
    template = load(path, None).pick(name, bool(tools))
    assert template is not None
    return template.render(HI, {}, tools)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_as_transformers_finds_and_chooses_them(layout: str, tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    path = written(tmp_path / "m", LAYOUTS[layout])
    theirs = PreTrainedTokenizerFast.from_pretrained(path)
    talk = [{"role": "user", "content": "hi"}]
    for name in (None, "default", "tool_use", "rag"):
        if name is not None and layout in ("one", "a file"):
            continue  # a single template has no name there
        for tools in (None, TOOLS):
            want = theirs.apply_chat_template(talk, tools=tools, tokenize=False,
                                              add_generation_prompt=True, chat_template=name)
            got = ours(path, tools, name)
            if tools and "weather" not in want:
                assert "weather" in got, "what transformers leaves out is told all the same"
            else:
                assert got == want, (name, tools)


def test_what_transformers_processors_have_in_a_file_of_their_own(tmp_path: Path) -> None:
    path = written(tmp_path / "m", {"chat_template.json": {"chat_template": WITH_TOOLS}})
    assert '"weather"' in ours(path, TOOLS) and ours(path, TOOLS).endswith("<hi>")


def test_a_default_beside_files_may_stand_in_the_config(tmp_path: Path) -> None:
    files = {"tokenizer_config.json": {"chat_template": PLAIN},
             "additional_chat_templates/tool_use.jinja": WITH_TOOLS}
    path = written(tmp_path / "m", files)
    assert ours(path, None) == "<hi>" and ours(path, TOOLS).startswith('[{"type"')


def test_a_model_without_a_default(tmp_path: Path) -> None:
    path = written(tmp_path / "m", {"tokenizer_config.json": {"chat_template": NAMED[1:]}})
    assert ours(path, TOOLS).endswith("<hi>") and ours(path, None, "rag") == "rag:<hi>"
    with pytest.raises(InvalidRequest, match="no default.*one of rag, tool_use"):
        ours(path, None)


@pytest.mark.parametrize("files", [
    {f"additional_chat_templates/{i}.jinja": PLAIN for i in range(30)},
    {"tokenizer_config.json": {"chat_template": [{"name": "x" * 999, "template": PLAIN}]}},
    {"additional_chat_templates/a.jinja": "{% if %}"},
])
def test_what_cannot_be_served_is_refused(files: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(BadModel, match="chat_template: "):
        load(written(tmp_path / "m", files), None)


def test_a_folder_elsewhere_is_not_read(tmp_path: Path) -> None:
    path = written(tmp_path / "m", {"chat_template.jinja": PLAIN})
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "tool_use.jinja").write_text(WITH_TOOLS)
    (path / "additional_chat_templates").symlink_to(tmp_path / "other")
    assert load(path, None).info()["chat_templates"] == {"default": PLAIN}


def test_a_snapshot_of_the_cache_links_to_its_blobs(tmp_path: Path) -> None:
    repository = tmp_path / "models--a--b"
    path = written(repository / "snapshots" / ("0" * 40), {"chat_template.jinja": PLAIN})
    (repository / "blobs").mkdir()
    (repository / "blobs" / "f").write_text(WITH_TOOLS)
    (path / "additional_chat_templates").mkdir()
    (path / "additional_chat_templates" / "tool_use.jinja").symlink_to("../../../blobs/f")
    assert ours(path, TOOLS).endswith("<hi>") and ours(path, TOOLS)[0] == "["


def test_a_request_names_one(tmp_path: Path) -> None:
    """Short conversations are rendered at once, long ones in another process: the same text."""
    path = written(tmp_path / "m", {"tokenizer_config.json": {"chat_template": NAMED}})
    asked = Asked(path)
    tools = encode_raw(TOOLS, list, "tools")

    def text(said: str, **given: Any) -> str:
        question = Tokenize("t", "", messages=[ChatMessage("user", said)], **given)
        (answer,) = asked.tell(question) or asked.later()
        if isinstance(answer, Rejected):
            return str(answer.message)
        assert isinstance(answer, Tokenized) and asked.core._model is not None
        return asked.core._model.decode(ints(answer.tokens), False)

    for said in ("hi", "x" * 20_000):
        assert text(said) == f"<{said}>"
        assert text(said, tools=tools) == f"{json.dumps(TOOLS)}<{said}>"
        assert text(said, chat_template="rag") == f"rag:<{said}>"
    # What is not rendered beside other requests is described in the process that renders it.
    own = "{{ '%s' % messages[0].content }}"
    assert "# Tools" in text("hi", tools=tools, chat_template=own)
    assert text("hi", chat_template="none") == (
        "chat_template: neither a template nor one of the model's own: default, rag, tool_use")
    assert asked.core._prompts is not None
    asked.core._prompts.close()
