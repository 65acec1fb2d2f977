"""Messages between the actor that wants placement groups (`ray_actor`) and the process that speaks
to Ray (`ray_driver`): orders, and the state of all groups. Each report is the whole state, so that
whoever dies has nothing to remember.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from actorium.actors.config.cluster_settings import MOST_REPLICAS
from actorium.actors.messages import Count, Epoch, Message, Seconds, Short, StepNo

DRIVER_ROLE = "ray-driver"
"""Whose inbox orders go to; it is no actor, but a child of one."""
WAITING, STARTING, RUNNING, ENDED = "waiting", "starting", "running", "ended"


class AskGroup(Message, frozen=True):
    """Ask Ray for a placement group, and start a node's agent there."""

    node: Short
    """The agent's name in our cluster; one group each."""
    generation: StepNo
    """Higher than in any group before that this node had."""
    cpus: Seconds
    gpus: Count
    home: Short
    """Address of the machine where it shall be; empty = wherever there is room."""


class DropGroup(Message, frozen=True):
    """End the agent there and give the group back."""

    node: Short
    generation: StepNo


class GroupOrders(Message, frozen=True):
    """actor -> driver."""

    number: StepNo
    orders: Annotated[list[AskGroup | DropGroup], Meta(max_length=4 * MOST_REPLICAS)]
    end: bool = False
    """The driver is to end, and with it Ray, where that was started for us."""


class GroupRow(Struct, frozen=True, array_like=True, gc=False):
    """A placement group."""

    node: Short
    generation: StepNo
    phase: Literal["waiting", "starting", "running", "ended"]
    """Ray has no room yet; the agent is being started; it runs; group, machine or agent is gone."""
    at: Short = ""
    """Address of its machine; empty while it waits."""
    why: Short = ""
    """It ended."""


class RayReport(Message, frozen=True):
    """driver -> actor: how things are at Ray."""

    driver: Epoch
    """Process id of the driver: another one has not seen the orders of the one before."""
    seen: StepNo
    """The last orders that are carried out."""
    address: Short
    """Of Ray's head, HOST:PORT; local = Ray was started for us, on this machine."""
    machines: list[Short]
    """Addresses of those that live."""
    gpus: Seconds
    """Of all of them together."""
    groups: list[GroupRow]


class RayFault(Message, frozen=True):
    """driver -> actor: Ray cannot be reached, or not used."""

    why: Short


# --- actor -> router -----------------------------------------------------------------------------

class RayNews(Message, frozen=True):
    """How the placement is, one line for `cluster status`."""

    text: Short
