"""What stands around the scheduler's core in an engine: the flight recorder, and the compilation of
grammars aside."""

from __future__ import annotations

import logging

from actorium.actors.core import Context, Core
from actorium.actors.recorder.recorder import Recorder
from actorium.actors.scheduler.core import SchedulerCore
from actorium.actors.structured.grammar_compiler import GrammarCompiler

LOG = logging.getLogger("actorium.recorder")


def observed(core: Core, ctx: Context) -> Core:
    """The core with its observers; itself, where it is not a `SchedulerCore`."""
    if not isinstance(core, SchedulerCore):
        return core
    masking, around = core.structured_output, recorded(core, ctx)
    return around if masking is None else GrammarCompiler(around, masking)


def recorded(core: SchedulerCore, ctx: Context) -> Core:
    """With a recorder around it, where one is wanted."""
    if not ctx.config.runtime.recorder_bytes:
        return core
    try:
        return Recorder(core, ctx, core.structured_output)
    except OSError as error:
        LOG.warning("no flight recorder: %s", error)
        return core
