"""SplitMix64: well mixed 64-bit numbers from a counter, for pure cores that may draw no randomness
of their own (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014).
"""

from __future__ import annotations

MASK64 = (1 << 64) - 1
GOLDEN_GAMMA = 0x9E3779B97F4A7C15
"""What the state grows by from output to output."""
FIRST_FACTOR, SECOND_FACTOR = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def mix64(z: int) -> int:
    """64 bits: the output for a state that has grown already."""
    z &= MASK64
    z = ((z ^ (z >> 30)) * FIRST_FACTOR) & MASK64
    z = ((z ^ (z >> 27)) * SECOND_FACTOR) & MASK64
    return z ^ (z >> 31)


def splitmix64(x: int, index: int = 1) -> int:
    """64 bits: output number `index`, from 1 on, of the generator that starts at x."""
    return mix64(x + index * GOLDEN_GAMMA)
