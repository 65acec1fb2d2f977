"""`actorium backends` and `actorium passes`: what each attention backend can do and lacks on this
machine; what each pass fuses in a model, how often, and what it gains."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from msgspec import Struct

from actorium.actors.config.attention_names import NAMES, NOT_BUILT
from actorium.actors.config.parsed_values import PASSES, parse_passes
from actorium.actors.errors import BadConfig
from actorium.actors.models import model_dir as models
from actorium.actors.models.obtain import with_model_path
from actorium.gpu.attention.capabilities import (
    CARDS,
    DECODE,
    EXTEND,
    BackendCard,
    Capabilities,
    needs_of,
)
from actorium.gpu.families.architectures import read_shape
from actorium.gpu.plan.memory_plan import as_served, demand_of
from actorium.tools.cli.command_line import parse
from actorium.tools.cli.flags import NoOptions

ABOUT = """List the attention backends: whether each can serve the model here, with these flags, and
if not, why; what it can do at all; by which names other engines know it; and which would be chosen.
Only the model's config.json is read."""
PACKAGES = {"flashinfer": "flashinfer", "flash_attn": "flash_attn",
            "xformers": "xformers", "aiter": "aiter"}
"""Backends of others -> the package that has their kernels."""


class BackendsOptions(Struct, frozen=True, kw_only=True):
    """How to say it."""

    json: bool = False
    """Print an object instead of lines."""


def run(command: str, argv: list[str]) -> int:
    if command == "passes":
        return _passes(argv)
    parsed = parse("actorium backends [MODEL]", argv, BackendsOptions, ABOUT)
    config = with_model_path(parsed.config)
    import torch

    from actorium.gpu.attention.backend_choice import BACKENDS, choose

    cuda = config.device.device == "cuda" or (
        config.device.device == "auto" and torch.cuda.is_available())
    if cuda and not torch.cuda.is_available():
        raise BadConfig("device: cuda was asked for, but torch finds no CUDA device",
                        "device.device")
    device = torch.device("cuda" if cuda else "cpu")
    path = Path(models.resolve(config.model.model))
    shape, demand = as_served(read_shape(path, config), demand_of(config))
    needs = needs_of(shape, device.type, config.memory.kv_cache_dtype, config.memory.page_size,
                     demand.drafts)
    found = {name: {part: own.fault(part, needs, device) for part in (EXTEND, DECODE)}
             for name, own in BACKENDS.items()}
    try:
        chosen = {part: choose(part, needs, config.device, device)._asdict()
                  for part in (EXTEND, DECODE)}
        refused = ""
    except BadConfig as error:
        chosen, refused = {}, error.message
    if parsed.options.json:
        print(json.dumps({
            "model": str(path), "device": device.type, "needs": needs._asdict(),
            "chosen": chosen, "refused": refused,
            "backends": {name: _as_dict(card, found[name]) for name, card in CARDS.items()},
            "not_built": {name: {"names": others, "package_installed": _installed(name)}
                          for name, others in NOT_BUILT.items()}}))
        return 0
    for name, card in CARDS.items():
        print("\n".join(_lines(card, found[name])))
    print("not built in")
    for name, others in NOT_BUILT.items():
        print(f"  {name:<15}{', '.join(filter(None, (*others, _package(name))))}")
    print(f"for {path.name} on {device.type}, heads of {needs.head_dim}, pages in "
          f"{needs.cache_dtype} of {needs.page_size} tokens")
    for part, what in ((EXTEND, "prompts"), (DECODE, "decodes")):
        print(f"  {what:<15}" + (f"{chosen[part]['name']} ({chosen[part]['why']})" if chosen
                                 else f"refused: {refused}"))
    return 0


def _as_dict(card: BackendCard, faults: dict[str, str]) -> dict[str, Any]:
    return {"what": card.what, "names": NAMES[card.name],
            **{part: {"fault": faults[part], "can": None if can is None else can._asdict()}
               for part in (EXTEND, DECODE) for can in [card.part(part)]}}


def _lines(card: BackendCard, faults: dict[str, str]) -> list[str]:
    extend, decode = faults[EXTEND], faults[DECODE]
    if extend == decode:
        here = f"no: {decode}" if decode else "yes"
    else:
        here = "; ".join(f"{what}: {f'no: {why}' if why else 'yes'}"
                         for what, why in (("prompts", extend), ("decodes", decode)))
    lines = [f"{card.name} ({card.what})", f"  {'serves it here':<15}{here}",
             f"  {'also called':<15}{', '.join(NAMES[card.name])}"]
    if card.extend == card.decode and card.decode is not None:
        return [*lines, f"  {'can':<15}{_can(card.decode)}"]
    return [*lines, *(
        f"  {what:<15}{'-' if can is None else _can(can, can is card.decode)}"
        for what, can in (("prompts", card.extend), ("decodes", card.decode)))]


def _can(can: Capabilities, decodes: bool = True) -> str:
    heads = f"heads up to {can.most_head_dim}" if can.most_head_dim else "heads of any size"
    if can.head_dim_step > 1:
        heads += f", multiples of {can.head_dim_step}"
    pages = " or ".join(map(str, can.page_sizes)) or "any power of two"
    traits = {"sliding windows": can.windows, "latents (MLA)": can.latents,
              "soft caps": can.soft_caps, "attention sinks": can.sinks,
              "ALiBi": can.alibi}
    if decodes:
        drafts = f"{can.query_len - 1} drafts" if can.query_len else "any number of drafts"
        traits |= {drafts: True, "graphs": can.graphs}
    return (f"{', '.join(can.devices)}; queries in {', '.join(can.dtypes)}; pages in "
            f"{', '.join(can.cache_dtypes)}, of {pages} tokens; {heads}; "
            + ", ".join(name if own else f"no {name}" for name, own in traits.items()))


def _installed(name: str) -> bool:
    return name in PACKAGES and find_spec(PACKAGES[name]) is not None


def _package(name: str) -> str:
    if name not in PACKAGES:
        return ""
    state = "installed" if _installed(name) else "not installed"
    return f"package {PACKAGES[name]} {state} (there is no adapter for it)"


PASSES_ABOUT = """Load a model, and say of each pass how often it matched and how often it must,
what the rewritten layers differ by from those that were traced, and the microseconds of a layer
(the mean of the first four, attention itself left out) without the pass and with it, by tokens; and
which of them --passes auto leaves out on this machine. --load-format dummy needs config.json
alone."""
TOKENS = (1, 32, 256, 2048)


def _passes(argv: list[str]) -> int:
    config = with_model_path(parse("actorium passes [MODEL]", argv, NoOptions, PASSES_ABOUT).config)
    import torch

    from actorium.gpu.models.decoder import Decoder
    from actorium.gpu.models.registry import load_model
    from actorium.gpu.passes.pass_choice import choice_text, microseconds, remembered_choice, way
    from actorium.gpu.passes.pass_manager import PassManager

    cuda = config.device.device == "cuda" or (
        config.device.device == "auto" and torch.cuda.is_available())
    if config.device.threads:
        torch.set_num_threads(config.device.threads)
    model = load_model(Path(models.resolve(config.model.model)), config,
                       torch.device("cuda" if cuda else "cpu"), lambda *_: None)
    if not isinstance(model, Decoder):
        raise BadConfig(f"model: {model.no_graphs}: it has no passes", "model.model")
    on = parse_passes(config.device.passes)
    report, full = PassManager(model, on).install(), way(model, on)
    print(f"{len(model.layers)} layers, {report.structures} different graphs; rewritten in "
          f"{1e3 * report.seconds:.0f} ms; off by {report.error:.1g}")
    chosen = remembered_choice(model, on, config.scheduler.max_num_batched_tokens)
    print(f"--passes auto: {choice_text(chosen)}")
    print(columns("pass", "matches", "expected", *(f"us at {tokens}" for tokens in TOKENS)))
    for name in PASSES:
        cells = [str(report.matches[name]), str(report.expected[name])] if name in on else ["off"]
        if report.matches[name]:
            less = way(model, tuple(other for other in on if other != name))
            for tokens in TOKENS:
                before, after = microseconds(model, [less, full], tokens)
                cells.append(f"{before:.0f} -> {after:.0f}")
        print(columns(name, *cells))
    return 0


def columns(name: str, *cells: str) -> str:
    """A line of the table: cells stay apart however long they are."""
    return f"{name:>16}" + "".join(f"  {cell:>16}" for cell in cells)
