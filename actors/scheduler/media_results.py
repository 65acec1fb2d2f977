"""What a step's result says of images: whose requests end for them, and whose pages may be shared.
"""

from __future__ import annotations

from actorium.actors.messages import StepResult
from actorium.actors.scheduler.admission_checks import Rejection
from actorium.actors.scheduler.cache.media_keys import shareable
from actorium.actors.scheduler.plan_record import PlanRecord
from actorium.actors.scheduler.request_state import RequestState
from actorium.actors.scheduler.scheduler_state import SchedulerState


def apply_media(state: SchedulerState, record: PlanRecord,
                result: StepResult) -> list[tuple[RequestState, Rejection]]:
    """Let what a step has computed of its own images be shared, as far as it still lies in the slot
    of its admission. Returns the requests that end, and why: nothing of theirs is shared."""
    failed = {slot: Rejection(code, why) for slot, code, why in result.failed}
    for slot, admission, computed in record.media:
        sequence = state.table.sequences[slot]
        if slot in failed or sequence is None or state.table.order[slot] != admission:
            continue
        sequence.shareable = shareable(sequence.request.submit.media, computed)
        state.cache_prefix(sequence, state.table.pages_of(slot), sequence.computed)
    ended = {}
    for slot, why in failed.items():
        owner = state.sequences.get(record.extends.get(slot, 0))
        if owner is not None:
            ended[owner.request.key] = owner.request, why
    return list(ended.values())
