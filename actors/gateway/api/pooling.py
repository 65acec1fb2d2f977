"""`/pooling` and `/classify`, as vLLM has them: what a model makes of texts, by the task; and
classes with their probabilities."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from actorium.actors.client.relevance import numbers_of, pooled_of
from actorium.actors.gateway.api.pooled_answers import (
    HIDDEN_STATES,
    PooledBody,
    check_hidden,
    list_answer,
    pooled,
    prompt_tokens_of,
    shown_hidden,
    vectors,
)
from actorium.actors.gateway.engine_call import call_of
from actorium.actors.gateway.http import bodies
from actorium.actors.gateway.http.http_errors import HttpError
from actorium.actors.gateway.http.replies import JsonReply
from actorium.actors.gateway.served_model import ServedModel
from actorium.actors.params import PoolingParams, PoolingTask

TASKS: tuple[PoolingTask, ...] = ("embed", "classify", "token_embed", "token_classify")
"""The first that a model does is what `/pooling` returns, if the body names none."""


class PoolingBody(PooledBody, kw_only=True):
    """The body of `/pooling`."""

    task: PoolingTask | None = None
    """None = the first of `TASKS` that the model does."""
    dimensions: int | None = None
    """Of embed alone."""
    layers: tuple[int, ...] = ()
    """Of hidden_states: see `PoolingParams`."""

    def task_of(self, model: ServedModel) -> PoolingTask:
        """Returns the task. Raises `HttpError` where the model does none."""
        task = self.task or next((task for task in TASKS if task in model.tasks), None)
        if task is None:
            raise HttpError(400, f"model: {model.name!r} does none of {', '.join(TASKS)}; "
                            f"it is for {', '.join(model.tasks)}", "model",
                            code="unsupported_task")
        return task


class ClassifyBody(PooledBody, kw_only=True):
    """The body of `/classify`."""


async def pooling(http: HttpRequest) -> Response:
    """Handles `/pooling`."""
    call, body = call_of(http), await bodies.read(http, PoolingBody)
    body.check()
    model = await call.chosen.model(body)
    params = PoolingParams(task=body.task_of(model), dimensions=body.dimensions,
                           use_activation=body.activates, layers=body.layers)
    prompts = body.prompts()
    if params.task == HIDDEN_STATES:
        check_hidden(len(prompts), "input")
    completions = await pooled(call, model, params, prompts, "input",
                               **body.pooled_fields)
    shown: list[Any] = [shown_hidden(pooled_of(completion)) for completion in completions] \
        if params.task == HIDDEN_STATES else await vectors(completions, body.encoding_format)
    data = [{"index": i, "object": "pooling", "data": encoded}
            for i, encoded in enumerate(shown)]
    return JsonReply(list_answer(call, model, "pool", data, prompt_tokens_of(completions)))


async def classify(http: HttpRequest) -> Response:
    """Handles `/classify`."""
    call, body = call_of(http), await bodies.read(http, ClassifyBody)
    body.check()
    model = await call.chosen.model(body)
    completions = await pooled(
        call, model, PoolingParams(task="classify", use_activation=body.activates),
        body.prompts(), "input", **body.pooled_fields)
    data = [_classes(i, numbers_of(completion), model)
            for i, completion in enumerate(completions)]
    return JsonReply(list_answer(call, model, "classify", data, prompt_tokens_of(completions)))


def _classes(index: int, probabilities: list[float], model: ServedModel) -> dict[str, Any]:
    best = max(range(len(probabilities)), key=probabilities.__getitem__)
    return {"index": index, "label": model.labels[best], "probs": probabilities,
            "num_classes": len(probabilities)}
