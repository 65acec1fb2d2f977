"""What each compiled kernel must be: the intention, beside what the assembler made of it."""

from __future__ import annotations

import re
from typing import NamedTuple

from ptxas_device import ARCHS, Facts


class Rule(NamedTuple):
    kernel: str
    """Its name."""
    case: str
    """A regular expression, of what is in the case's name."""
    warps: int
    """Warps of a program on sm_90."""
    programs: int
    """Programs that an SM of sm_90 or sm_100 must hold at once."""
    older: int
    """The same for sm_80 and sm_89."""
    products: str = ""
    """On sm_90: `wgmma` needs 64 rows, `mma` is a warp's own, `fma` is fp32. Others have what
    corresponds; empty = there are none."""
    doubles: str = ""
    """Why there may be instructions of fp64."""


EXACT = "sums of integer weights beyond 2**53 meet a uniform number of 53 bits, once a row or tile"
RULES = (
    # Row by row: what counts is that loads of many programs are under way.
    Rule("_norm", "norm 1152", 4, 8, 8),
    Rule("_norm", "norm 4096", 8, 4, 4),
    Rule("_norm", "norm", 16, 2, 2),
    Rule("_layer_norm", "heads", 2, 16, 16),
    Rule("_layer_norm", "", 16, 2, 2),
    Rule("_activate", "", 4, 12, 12),
    Rule("_sum", "", 16, 1, 1),
    Rule("_rotate", "INT8", 2, 16, 14),
    Rule("_rotate", "", 2, 16, 16),
    Rule("_gate", "", 4, 12, 12),
    Rule("_gated", "Qwen3.5", 2, 16, 16),
    Rule("_gated", "Granite", 8, 4, 4),
    Rule("_norm_fp8", "", 8, 4, 4),
    Rule("_norm_int8", " 8192", 16, 2, 2),
    Rule("_norm_int8", "", 8, 4, 4),
    Rule("_gate_rows", "", 16, 2, 2),
    Rule("_gate_int8", " 3072", 8, 4, 4),
    Rule("_gate_int8", "", 16, 2, 2),
    Rule("_gate_groups", "", 4, 8, 8),
    Rule("_apply", "", 4, 12, 12),
    # Decode reads keys once: two blocks under way in each of two programs fill the memory's pipes,
    # and where one token's rows leave registers, three do it better.
    Rule("_decode", "Qwen3.5-27B, fp32", 8, 1, 1, "fma"),
    Rule("_decode", "fp32", 4, 2, 1, "fma"),
    Rule("_decode", "Qwen3-32B.*q8|Qwen2.5-7B.*q8", 4, 2, 1, "wgmma"),
    Rule("_decode", "Qwen3.5-27B, q8", 8, 1, 1, "wgmma"),
    # On sm_90 heads of 128 have programs of one warp, eight an SM, but for one or two sequences.
    Rule("_decode", ", 1 sequences|1B, q1", 4, 3, 2, "mma"),
    Rule("_decode", "(Llama-3.1-8B|Qwen3-32B|MPT-7B, slopes), q1", 1, 3, 2, "mma"),
    Rule("_decode", "(Llama-3.1-8B|Qwen3-32B), .*pages, q1", 1, 2, 1, "mma"),
    Rule("_decode", "", 4, 2, 1, "mma"),
    Rule("_list", "", 4, 1, 1),
    Rule("_merge", "", 4, 8, 8),
    # Extend is bound by the tensor cores: one program of two groups of warps has an SM.
    Rule("_extend", "Qwen3.5-27B, fp32", 4, 1, 1, "fma"),
    Rule("_extend", "fp32", 8, 1, 1, "fma"),
    Rule("_extend", "few tokens", 4, 3, 2, "mma"),
    Rule("_extend", "Gemma 4", 8, 1, 1, "mma"),
    Rule("_extend", "", 8, 1, 1, "wgmma"),
    # A decode has a prompt's tile: what is left of it is empty, and two fill the memory's pipes.
    Rule("_exact", "Gemma 4", 8, 1, 1, "mma"),
    Rule("_exact", "Qwen3.5-27B|Gemma 3 4B", 8, 1, 1, "wgmma"),
    Rule("_exact", "", 4, 2, 1, "wgmma"),
    Rule("_pieces", "", 4, 8, 8),
    Rule("_fold_parts", "", 1, 16, 16),
    Rule("_exact_product", ", 1 rows", 4, 2, 2, "wgmma"),
    Rule("_exact_product", "", 8, 2, 2, "wgmma"),
    Rule("_sage", "decode", 4, 2, 1, "mma"),
    Rule("_sage", "", 8, 1, 1, "wgmma"),
    Rule("_code_keys", "", 4, 4, 4),
    Rule("_latent", "fp32", 8, 2, 1, "fma"),
    Rule("_latent", "128 heads.*q1", 8, 1, 1, "wgmma"),
    Rule("_latent", "16 heads, q1", 4, 2, 1, "mma"),
    Rule("_latent", "", 8, 1, 1, "mma"),
    Rule("_merge_latent", "", 4, 4, 3),
    Rule("_latent_extend", "fp32", 8, 2, 1, "fma"),
    Rule("_latent_extend", "", 8, 1, 1, "wgmma"),
    # A state's rows in one warp's registers: eight of them hide their loads.
    Rule("_inputs", "", 4, 8, 8),
    Rule("_rule", "", 1, 8, 8),
    Rule("_step", "", 1, 8, 8),
    Rule("_kda", "", 1, 8, 8),
    Rule("_kda_step", "", 1, 8, 8),
    Rule("_scan", "", 1, 8, 8),
    Rule("_scan_step", "", 1, 8, 8),
    Rule("_prepare", "", 4, 2, 1, "wgmma"),
    Rule("_walk", "", 4, 2, 1, "wgmma"),
    Rule("_conv", "", 4, 6, 6),
    Rule("_keep", "", 4, 12, 12),
    Rule("_conv_step", "", 4, 12, 12),
    # Few rows: bytes of weights under way. Many: sums and partial sums in registers.
    Rule("_choose_experts", "", 1, 16, 16),
    Rule("_combine", "", 4, 8, 8),
    Rule("_product", "^exact experts", 8, 1, 1, "wgmma"),
    Rule("_product", "^experts.*fp32, 4096 rows", 8, 1, 1, "fma"),
    Rule("_product", "^experts.*fp32", 4, 1, 1, "fma"),
    Rule("_product", "^experts.* 4096 rows", 8, 1, 1, "wgmma"),
    Rule("_product", "^experts", 4, 2, 1, "mma"),
    Rule("_fp4_product", " 4096 rows", 8, 1, 1, "wgmma"),
    Rule("_fp4_product", "", 4, 2, 1, "mma"),
    Rule("_product", "scaled_experts.* 4096 rows", 8, 1, 1, "wgmma"),
    Rule("_product", "scaled_experts", 4, 2, 1, "mma"),
    Rule("_product", "scaled_mm 28672.* 1 row", 4, 3, 1, "mma"),
    Rule("_product", "scaled_mm.* 1 row", 4, 4, 2, "mma"),
    Rule("_product", "scaled_mm.* 64 rows", 4, 2, 1, "wgmma"),
    Rule("_product", "scaled_mm", 8, 1, 1, "wgmma"),
    # Codes are widened in registers, each warp those of its own rows of the weight.
    Rule("_grouped", ", 1 rows", 1, 4, 4, "mma"),
    Rule("_grouped", ", (16|32) rows", 2, 3, 2, "mma"),
    Rule("_grouped", "", 4, 2, 1, "wgmma"),
    Rule("_widen", "", 4, 8, 6),
    Rule("_to_rank", "", 4, 4, 2, "mma"),
    Rule("_from_rank", "", 4, 2, 2, "fma"),
    Rule("_int8", ", 1 rows", 4, 3, 2, "mma"),
    Rule("_int8", ", 64 rows", 4, 2, 1, "wgmma"),
    Rule("_int8", "", 8, 1, 1, "wgmma"),
    Rule("_quantise_int8", "", 8, 4, 4),
    Rule("_skinny", "64 x 128, 16", 4, 2, 1, "wgmma"),
    Rule("_skinny", "16 x 64, 16", 2, 8, 3, "mma"),
    Rule("_skinny", ", 16 rows", 2, 3, 1, "mma"),
    Rule("_skinny", "32 x 128, 32", 4, 2, 1, "mma"),
    Rule("_skinny", "64 x 64, (32|64)", 4, 2, 1, "wgmma"),
    Rule("_skinny", "", 8, 1, 1, "wgmma"),
    Rule("_quantise_groups", "", 4, 8, 8),
    Rule("_quantise_rows", "", 8, 4, 4),
    Rule("_tops", "", 4, 8, 8),
    Rule("_likeliest", "", 4, 8, 8),
    Rule("_weigh", "truncated", 4, 2, 2),
    Rule("_weigh", "sampled", 4, 8, 8),
    Rule("_gather", "", 4, 4, 4, doubles=EXACT),
    Rule("_choose", "greedy", 8, 4, 4),
    Rule("_choose", "sampled", 8, 4, 2, doubles=EXACT),
    Rule("_choose", "truncated", 8, 1, 1, doubles=EXACT),
    Rule("_fill", "", 4, 8, 8),
    Rule("_penalise", "", 4, 8, 6),
    Rule("_scatter", "", 2, 4, 4),
    Rule("_mask", "", 4, 8, 8),
    Rule("_part", "", 4, 8, 8),
    Rule("_join", "", 1, 16, 16),
    Rule("_commit", "", 1, 16, 16),
    # Of one sequence a block of the text, each; then a program a sequence.
    Rule("_matches", "", 4, 8, 8),
    Rule("_follow", "", 4, 8, 8),
)
"""The first that fits is meant. A kernel without one is a fault."""

class Spill(NamedTuple):
    kernel: str
    case: str
    """A regular expression, of what is in the case's name."""
    capability: int
    stored: int
    """Bytes of a thread at most, and so for the next."""
    loaded: int
    why: str


WHOLE = ("operands are in registers there, and each warp's rows meet a whole matrix of a chunk; "
         "eight warps compute every product twice, and spill too")
CODING = "programs that code keys themselves hold a block of them in fp32 beside the sums"
WIDENED = "codes of values 256 wide become bf16 beside the sums"
TWO_SUMS = "a chunk's sums, beside those of the chunks before it"
EXCEPTIONS = (
    Spill("_prepare", "", 80, 84, 112, WHOLE),
    Spill("_prepare", "", 89, 44, 64, WHOLE),
    Spill("_exact", "Qwen2.5-7B, window", 90, 32, 32, TWO_SUMS),
    Spill("_exact", "Qwen3.5-27B, INT8 pages", 90, 16, 16, TWO_SUMS),
    Spill("_exact", "Gemma 4 E4B", 90, 24, 24, TWO_SUMS),
    Spill("_sage", "Llama-3.1-8B", 80, 8, 8, CODING),
    Spill("_sage", "Llama-3.1-8B", 89, 8, 8, CODING),
    Spill("_sage", "split", 80, 172, 192, CODING),
    Spill("_sage", "Qwen3.5-27B, INT8 pages", 80, 24, 24, WIDENED),
    Spill("_sage", "split", 89, 172, 192, CODING),
    Spill("_sage", "Qwen3.5-27B, INT8 pages", 89, 24, 24, WIDENED),
)
"""All that may spill."""


def rule_of(case: str, kernel: str) -> Rule | None:
    """Returns the rule of a kernel that this case launches."""
    return next((rule for rule in RULES if rule.kernel == kernel and re.search(rule.case, case)),
                None)


def meant(products: str, capability: int) -> tuple[str, ...]:
    """What `products` is called there."""
    if products != "wgmma":
        return (products,)
    return ("wgmma",) if capability == 90 else ("tcgen05", "mma") if capability > 90 else ("mma",)


def faults(case: str, capability: int, own: Facts) -> list[str]:
    """Returns the ways in which a kernel breaks its rule."""
    rule = rule_of(case, own.kernel)
    if rule is None:
        return ["no rule says what it is meant to be"]
    found = []
    if sum(own.spills) and not any(
            x.kernel == own.kernel and x.capability == capability and re.search(x.case, case)
            and own.spills[0] <= x.stored and own.spills[1] <= x.loaded for x in EXCEPTIONS):
        found.append(f"spills {own.spills[0]} / {own.spills[1]} bytes a thread")
    if not own.programs:
        found.append(f"{own.shared:,} bytes of shared memory do not fit "
                     f"{ARCHS[capability].shared:,}")
    least = rule.programs if capability >= 90 else rule.older
    if own.programs < least:
        found.append(f"{own.programs} programs an SM, {least} are meant")
    if capability == 90 and own.warps != rule.warps and own.kernel != "_merge":
        found.append(f"{own.warps} warps, {rule.warps} are meant")
    if own.products not in meant(rule.products, capability):
        found.append(f"products: {own.products or 'none'}, {rule.products or 'none'} is meant")
    if own.doubles and not rule.doubles:
        found.append(f"{own.doubles} instructions of fp64")
    return found
