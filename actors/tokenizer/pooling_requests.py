"""Requests for vectors and scores: what a model serves, and parameters with its defaults. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from os.path import commonprefix

from actorium.actors.errors import InvalidRequest
from actorium.actors.messages import MAX_RESULT, Generate
from actorium.actors.models.pooling_shape import served_tasks
from actorium.actors.params import ResolvedParams, ResolvedPooling, SamplingParams
from actorium.actors.tokenizer.defaults import ModelFacts
from actorium.actors.tokenizer.text_model import TextModel

NOTHING_SAMPLED = ResolvedParams(max_tokens=1, temperature=0.0)
"""Of a request that is pooled."""
LAST = (-1,)
_DEFAULTS = SamplingParams()


def check_task(message: Generate, facts: ModelFacts) -> None:
    """Raises `InvalidRequest`, naming the field, where the model does not serve what a request asks
    for."""
    wanted = "generate" if message.pooling is None else message.pooling.task
    if wanted not in (served := served_tasks(facts.pooling)):
        raise InvalidRequest(f"task: the model does not {wanted}; it serves {', '.join(served)}"
                             if wanted == "generate" else
                             f"task: the model does not serve {wanted}, but {', '.join(served)}",
                             "task")
    if message.params.hidden_states and "hidden_states" not in served:
        raise InvalidRequest("hidden_states: the engine gives none without "
                             "--enable-return-hidden-states", "hidden_states")
    if message.text_pair is not None and (message.text is None or wanted != "classify"):
        raise InvalidRequest("text_pair: with a prompt of text and the task classify", "text_pair")
    if message.pooling is None or facts.pooling is None:
        return
    if message.params != _DEFAULTS:
        raise InvalidRequest("params: nothing is sampled where a prompt is pooled", "params")
    try:
        message.pooling.check()
    except ValueError as error:
        raise InvalidRequest(str(error), str(error).split(":")[0]) from None
    if (message.pooling.dimensions or 0) > facts.pooling.width:  # of 0, which is not known, too
        raise InvalidRequest(f"dimensions: {message.pooling.dimensions} are more than the model's "
                             f"vectors have, {facts.pooling.width}", "dimensions")
    if message.tokens is None and not (message.text or "").startswith(message.pooling.instruction):
        raise InvalidRequest("instruction: the prompt's text does not begin with it", "instruction")


def resolve_pooling(message: Generate, model: TextModel, ids: Sequence[int],
                    pair_start: int) -> ResolvedPooling | None:
    """Returns the pooling parameters of a checked request; None of one that is completed. ids: of
    its prompt. Raises `InvalidRequest` where the result would be too large to send, or nothing
    would be pooled."""
    pooling, shape, tokens = message.pooling, model.facts.pooling, len(ids)
    if pooling is None or shape is None:
        return None
    task, vectors = pooling.task, pooling.task in ("embed", "token_embed")
    width = shape.width if vectors else shape.scores
    if task.startswith("token") and 4 * width * tokens > MAX_RESULT:
        raise InvalidRequest(f"prompt: {tokens} tokens give {4 * width * tokens} bytes, the limit "
                             f"of a result is {MAX_RESULT}", "prompt")
    default = shape.normalize if vectors else True
    return ResolvedPooling(
        task=task, every_row=shape.every_row(task), dimensions=pooling.dimensions or 0,
        activation=default if pooling.use_activation is None else pooling.use_activation,
        pair_start=pair_start,
        layers=pooling.layers or LAST if task == "hidden_states" else (),
        skipped=_instruction_tokens(message, model, ids)
        if task == "embed" and shape.kind == "mean" and shape.skips_instruction else 0)


def _instruction_tokens(message: Generate, model: TextModel, ids: Sequence[int]) -> int:
    """Returns how many tokens of a prompt are its instruction's, of a model that leaves them out:
    as the request names it, or up to where the model's own mark ends."""
    pooling, shape = message.pooling, model.facts.pooling
    assert pooling is not None and shape is not None
    count = 0
    if pooling.instruction:
        count = model.leading_tokens(pooling.instruction, message.text is not None)
    elif shape.instruction_end:
        # Without the first token, which is another one where a text begins than within it.
        first, inner = model.encode_all([shape.instruction_end, f"\n{shape.instruction_end}"],
                                        "instruction")
        mark = commonprefix([first[::-1], inner[::-1]])[::-1]
        count = next((i + len(mark) for i in range(len(ids) - len(mark) + 1)
                      if mark and ids[i] == mark[0] and list(ids[i:i + len(mark)]) == mark), 0)
    if count >= len(ids):
        raise InvalidRequest("prompt: nothing is left to pool behind the instruction", "prompt")
    return count
