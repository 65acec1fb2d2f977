"""Where a model's chat templates lie in its directory, and by which names.

Most models have one template, called "default" here. Others have several, of which "tool_use" is
the one for conversations with tools.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from actorium.actors.errors import BadModel
from actorium.actors.models.gguf_tokenizer import MAX_TEMPLATES
from actorium.actors.models.model_dir import is_jinja, read_json
from actorium.actors.models.model_files import read_file

DEFAULT, TOOL_USE = "default", "tool_use"
FOLDER, SUFFIX = "additional_chat_templates", ".jinja"
"""Where further templates lie beside chat_template.jinja: NAME.jinja."""
MAX_NAME = 64
MAX_SOURCE = 128 << 10
"""Characters of a template: it compiles in half a second. The longest there are have 30,000."""


def template_sources(path: Path, override: str | None) -> dict[str, str]:
    """The chat templates of the model directory `path`, by name; or `override` alone, which is a
    file or the template itself; {} without any.

    Looked for in the order of transformers: chat_template.jinja with additional_chat_templates/,
    then tokenizer_config.json, whose `chat_template` may be a list of named ones; then
    chat_template.json, which older processors have. Raises `BadModel`.
    """
    if override:
        return {DEFAULT: override if is_jinja(override) else _given(override)}
    files = _files(path)
    if DEFAULT in files:
        return files
    for name in ("tokenizer_config.json", "chat_template.json"):
        found = _named(read_json(path / name, optional=True).get("chat_template"))
        if found:
            return found | files
    return files


def _given(override: str) -> str:
    file = Path(override).expanduser()
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadModel(f"chat_template: cannot read {file}: {error}", "chat_template") from None


def _files(path: Path) -> dict[str, str]:
    """The templates that are files of their own."""
    found = {DEFAULT: path / "chat_template.jinja"}
    folder = path / FOLDER
    if folder.is_dir() and not folder.is_symlink():
        with os.scandir(folder) as entries:
            names = sorted(entry.name for entry in entries if entry.name.endswith(SUFFIX))
        _check(names)
        found |= {name.removesuffix(SUFFIX): folder / name for name in names}
    sources = {}
    for name, file in found.items():
        try:
            sources[name] = read_file(file, 4 * MAX_SOURCE).decode()
        except FileNotFoundError:
            continue
        except UnicodeDecodeError as error:
            raise BadModel(f"chat_template: cannot read {file}: {error}", "chat_template") from None
    return sources


def _named(value: Any) -> dict[str, str]:
    """The templates of a JSON file's `chat_template`: one, or a list of named ones, of which the
    last of a name counts."""
    if isinstance(value, str):
        return {DEFAULT: value}
    entries = [own for own in value if isinstance(own, dict)] if isinstance(value, list) else []
    found = {own["name"]: own["template"] for own in entries
             if isinstance(own.get("name"), str) and isinstance(own.get("template"), str)}
    _check(list(found))
    return found


def _check(names: list[str]) -> None:
    if len(names) > MAX_TEMPLATES or any(len(name) > MAX_NAME for name in names):
        raise BadModel(f"chat_template: at most {MAX_TEMPLATES} templates, with names of up to "
                       f"{MAX_NAME} characters", "chat_template")
