"""Generated, checkable tasks that the demo model is trained and scored on."""

from .conversations import small_talk
from .stories import tell
from .tasks import (
    TASKS,
    Item,
    generate,
    held_out,
    is_held_out,
    recall_item,
    recall_pairs,
    score,
)

__all__ = [
    "TASKS",
    "Item",
    "generate",
    "held_out",
    "is_held_out",
    "recall_item",
    "recall_pairs",
    "score",
    "small_talk",
    "tell",
]
