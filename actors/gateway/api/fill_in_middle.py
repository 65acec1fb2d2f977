"""Prompts for filling in text between a prefix and a suffix, from the model's own tokens for that.

llama-server's `/infill`, the `suffix` of OpenAI's completions and other APIs make them here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from msgspec import Struct

from actorium.actors.client.async_client import AsyncClient
from actorium.actors.gateway.api.tokens import special_around
from actorium.actors.gateway.http.http_errors import bad_field
from actorium.actors.gateway.served_model import ServedModel

REPOSITORY = "myproject\n"
"""llama-server's name of a repository that has none, and of the file that is being edited."""
EDITED_FILE = "filename\n"
SNIPPET = "\n\n--- snippet ---\n\n"
"""What llama-server puts before a file where the model has no token for that."""


class ExtraFile(Struct):
    """Another file of the same repository."""

    text: str
    filename: str = "tmp"


class InfillPrompt(NamedTuple):
    """A prompt whose completion is the text in the middle."""

    ids: list[int]
    stop_token_ids: list[int]
    """Tokens that end the middle, beside the model's own end tokens."""
    truncated: bool
    """Something was left out."""


class HasClient(Protocol):
    """An engine as far as it is needed here."""

    @property
    def client(self) -> AsyncClient: ...


async def fill_in_middle(engine: HasClient, model: ServedModel, prefix: str, suffix: str,
                         field: str = "suffix", files: Sequence[ExtraFile] | None = None,
                         begun: Sequence[int] = (), room: int | None = None) -> InfillPrompt:
    """Returns the prompt for the text between `prefix` and `suffix`. Special tokens that these
    write are text like any other.

    field: named by the error where the model has no such tokens; files: come before the prefix, in
    the form that the model has for several files of a repository (None = a single file); begun:
    tokens of the middle that exist already, put behind the prefix; room: the most tokens of the
    prompt. Beyond it the first files, the begin of the prefix and the end of the suffix are left
    out, the suffix first down to a quarter of the room; None = the engine refuses a prompt that is
    too long. Raises `HttpError`, `ActoriumError`.
    """
    marks = model.fim
    if marks is None:
        raise bad_field(field, "this model has no tokens for filling in the middle")

    async def encoded(text: str) -> list[int]:
        return await engine.client.tokenize(text, False, parse_special=False) if text else []

    before, after = await encoded(prefix), await encoded(suffix)
    context: list[int] = []
    if files is not None and marks.repository is not None:
        context = [marks.repository, *await encoded(REPOSITORY)]
    for file in files or ():
        context += await encoded(SNIPPET) if marks.file is None \
            else [marks.file, *await encoded(f"{file.filename}\n")]
        context += await encoded(file.text)
    if files is not None and marks.file is not None:
        context += [marks.file, *await encoded(EDITED_FILE)]
    bos, _ = await special_around(engine.client)
    whole = len(context) + len(before) + len(after)
    if room is not None:
        room = max(0, room - len(bos) - len(begun) - 3)
        after = after[:max(room - len(before), room // 4)]
        before = _last(before, room - len(after))
        context = _last(context, room - len(after) - len(before))
    ids = [*bos, *context, marks.prefix, *before, *begun, marks.suffix, *after, marks.middle]
    return InfillPrompt(ids, marks.ends,
                        len(context) + len(before) + len(after) < whole)


def _last(ids: list[int], count: int) -> list[int]:
    return ids[max(0, len(ids) - count):]
