"""Generated, checkable tasks that the demo model is trained and scored on."""

from actorium.tools.demo_tasks.conversations import small_talk
from actorium.tools.demo_tasks.stories import tell
from actorium.tools.demo_tasks.tasks import (
    TASKS,
    TaskItem,
    generate,
    held_out,
    is_held_out,
    recall_item,
    recall_pairs,
    score,
)

__all__ = [
    "TASKS",
    "TaskItem",
    "generate",
    "held_out",
    "is_held_out",
    "recall_item",
    "recall_pairs",
    "score",
    "small_talk",
    "tell",
]
