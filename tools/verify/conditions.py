"""Under what a request is computed: a point in a product of axes, none of which may change a token.
Pure.

Some axes are flags of an engine, which must be started anew for another value; the others are how
requests are sent. Each has a plain value, the field's default; `PLAIN` is the point of all of them,
and every other point is held against it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct


class Condition(Struct, frozen=True, kw_only=True):
    """A point. A field is an axis."""

    tokens_per_step: int = 0
    """Tokens a step may compute, so that prompts are cut into chunks; 0 = as the engine has it."""
    drafts: int = 0
    """Tokens that are drafted and verified in each step."""
    ranks: int = 1
    """Tensor-parallel processes."""
    page_size: int = 0
    """Tokens a page; 0 = as the engine has it."""
    pool: str = "roomy"
    """tight: pages for a few requests, so that others are preempted and prefixes evicted."""
    preempt_every: int = 0
    """A running request is preempted every so many steps; 0 = never."""
    threads: int = 0
    """Of the worker; 0 = as the engine has it."""
    overlap: bool = True
    """A step is planned while another runs."""
    graphs: bool = True
    """Steps are captured; off = launched operation by operation."""
    company: int = 0
    """Other requests that are sent along."""
    order: str = "first"
    """Where among them it is sent: first | middle | last."""
    cache: str = "cold"
    """What the prefix cache has of its prompt: cold (nothing) | together (what the company shares
    with it) | warm (all, it was asked before) | shared (a beginning, from other prompts) | evicted
    (some: it was asked before, then long prompts came, and more come under way)."""
    choices: int = 1
    """Choices that are asked for, `n`; the first, and of greedy requests each, must be as the only
    one."""
    logprobs: bool = True
    """Are asked for."""
    reading: str = "whole"
    """whole (all at once) | stream (as it comes) | cut (given up on the way, taken up again) | http
    (a stream of the gateway's) | http-cut (one whose connection is lost, taken up again)."""
    worker: str = "lives"
    """killed: the process that computes dies under way."""
    company_leaves: bool = False
    """The others are aborted under way."""
    place: int = 0
    """No axis, since no value of it is plain: what happens under way happens at places that are
    drawn by it."""


PLAIN = Condition()
AXES: tuple[str, ...] = tuple(axis for axis in Condition.__struct_fields__ if axis != "place")
ENGINE_AXES = AXES[:AXES.index("company")]
"""Those that are flags of an engine."""
SENDING_AXES = tuple(axis for axis in AXES if axis not in ENGINE_AXES)
COMPANIES = (1, 2, 4, 7, 15, 32, 63)
"""With the request itself batches of 2, 3, 5, 8, 16, 33 and 64."""
VALUES: Mapping[str, tuple[Any, ...]] = {
    "tokens_per_step": (16, 37, 256), "drafts": (1, 2, 3, 4), "ranks": (2,), "page_size": (4, 64),
    "pool": ("tight",), "preempt_every": (3, 7), "threads": (1,), "overlap": (False,),
    "graphs": (False,), "company": COMPANIES, "order": ("middle", "last"),
    "cache": ("together", "warm", "shared", "evicted"), "choices": (2, 4), "logprobs": (False,),
    "reading": ("stream", "cut", "http", "http-cut"), "worker": ("killed",),
    "company_leaves": (True,)}
"""Values of each axis beside the plain one."""


def differing(one: Condition, other: Condition = PLAIN) -> tuple[str, ...]:
    """The axes in which they differ."""
    return tuple(axis for axis in AXES if getattr(one, axis) != getattr(other, axis))


def with_plain(condition: Condition, axes: Sequence[str], plain: Condition = PLAIN) -> Condition:
    """The condition with these axes at their plain values."""
    return msgspec.structs.replace(condition, **{axis: getattr(plain, axis) for axis in axes})


def engine_part(condition: Condition, plain: Condition = PLAIN) -> Condition:
    """What the engine must be started for: all else is plain."""
    return with_plain(condition, (*SENDING_AXES, "place"), plain)


def described(condition: Condition, plain: Condition = PLAIN) -> str:
    """In words: what is not plain."""
    axes = differing(condition, plain)
    return ", ".join(f"{axis}={getattr(condition, axis)}" for axis in axes) or "plain"
