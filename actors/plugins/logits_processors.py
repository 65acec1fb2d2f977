"""Logits processors: functions of plug-ins that change the logits of requests that name them.

The tokenizer checks a request's calls of them (`ProcessorCalls`), the worker runs them
(`gpu/step/logits_processing.py`). docs/plugins.md is for those who write one.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple, Protocol, TypeAlias

from actorium.actors.errors import InvalidRequest
from actorium.actors.params import MAX_PROCESSORS, ProcessorCall
from actorium.actors.plugins.entry_points import (
    LOGITS_PROCESSORS,
    LoadedPlugin,
    load_group,
)

LOG = logging.getLogger("actorium.plugins")
Tensor: TypeAlias = Any
"""torch's, which actors do not import."""


class ProcessedRows(NamedTuple):
    """What a logits processor knows of the rows whose logits it changes."""

    args: Sequence[Mapping[str, Any]]
    """The arguments of each row's request, checked."""
    tokens: Tensor
    """i64[R, L], on the device of the logits: each row's tokens so far, those of the prompt first;
    -1 behind them. Of a row that verifies a draft, the drafts before it are among them."""
    lengths: Tensor
    """i64[R]: how many these are."""
    prompt_lengths: Tensor
    """i64[R]: how many of them are the prompt's."""


class LogitsProcessor(Protocol):
    """What an entry point of `actorium.logits_processors` names. It has no state: what it does to a
    row depends on the row's logits, arguments and tokens alone, since rows are computed again after
    a preemption, after a worker's death and to verify drafts."""

    arguments: Collection[str]
    """The names of its arguments."""

    def check(self, args: Mapping[str, Any]) -> None:
        """Raises `ValueError` that says what is wrong with a request's arguments."""

    def __call__(self, logits: Tensor, rows: ProcessedRows) -> Tensor:
        """Returns the new logits, f32[R, V]; `logits` may be changed in place."""


@cache
def load_processors(plugins: str) -> list[LoadedPlugin]:
    """Imports the logits processors. plugins: the value of `--plugins`."""
    return load_group(plugins, LOGITS_PROCESSORS, _fault)


class ProcessorCalls:
    """Checks what requests ask of logits processors."""

    def __init__(self, processors: Mapping[str, LogitsProcessor]) -> None:
        """processors: by name."""
        self._processors = processors

    def resolved(self, calls: Sequence[ProcessorCall] | None) -> tuple[ProcessorCall, ...]:
        """Returns the calls with the names of processors. A call without one is of every processor
        that has one of the arguments, as vLLM's `vllm_xargs` are. Raises `InvalidRequest`."""
        if not calls:
            return ()
        out: list[ProcessorCall] = []
        for call in calls:
            found = [call] if call.name else self._by_arguments(call.args)
            for one in found:
                self._check(one)
            out += found
        if len(out) > MAX_PROCESSORS:
            raise _wrong(f"at most {MAX_PROCESSORS}, got {len(out)}")
        return tuple(out)

    def _by_arguments(self, args: Mapping[str, Any]) -> list[ProcessorCall]:
        for name in args:
            if not any(name in own.arguments for own in self._processors.values()):
                raise InvalidRequest(f"vllm_xargs: {name[:80]!r}: no logits processor has such an "
                                     "argument", "vllm_xargs")
        calls = [ProcessorCall(name, {key: args[key] for key in args if key in own.arguments})
                 for name, own in self._processors.items()]
        return [call for call in calls if call.args]

    def _check(self, call: ProcessorCall) -> None:
        processor = self._processors.get(call.name)
        if processor is None:
            names = ", ".join(self._processors) or "none (docs/plugins.md)"
            raise _wrong(f"there is no {call.name[:80]!r}; this engine has {names}")
        for name in call.args:
            if name not in processor.arguments:
                raise _wrong(f"{call.name}: has no argument {name[:80]!r}, but "
                             f"{', '.join(processor.arguments) or 'none'}")
        try:
            processor.check(call.args)
        except ValueError as error:
            raise _wrong(f"{call.name}: {error}") from None
        except Exception as error:  # of a plug-in: it must harm this request alone
            LOG.exception("logits processor %s cannot check its arguments", call.name)
            raise _wrong(f"{call.name}: cannot check these arguments: "
                         f"{type(error).__name__}") from None


def _wrong(why: str) -> InvalidRequest:
    return InvalidRequest(f"logits_processors: {why}", "logits_processors")


def _fault(value: Any) -> str:
    names = getattr(value, "arguments", None)
    if not callable(value) or not callable(getattr(value, "check", None)):
        return "must be callable, with a method check"
    if isinstance(names, str) or not isinstance(names, Collection) \
            or not all(isinstance(name, str) for name in names):
        return "its arguments must be names"
    return ""
