"""Prompts for comparisons where none are given: prose, a list, code, sums, another language; some
longer than a few pages, so that what attends to far tokens is seen."""

_TALE = (
    "The lighthouse keeper had kept a diary for thirty years, and every evening he wrote down the "
    "same four things: the direction of the wind, the height of the waves, the number of ships "
    "that had passed, and what he had eaten for supper. On the first of March the wind came from "
    "the north, the waves were as high as a door, two ships had passed, and he had eaten soup. On "
    "the second of March the wind had turned to the west, the waves were lower, no ship had "
    "passed, and he had eaten bread with cheese. ")

PROMPTS = (
    "The capital of France is",
    "Once upon a time there was a small dragon who could not breathe fire.",
    "To make pancakes you need flour, eggs, milk and a little salt. First",
    _TALE + "On the third of March he wrote:",
    _TALE + _TALE + "When his sister asked what he had eaten on the first of March, he answered:",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "12 + 30 = 42\n7 + 8 = 15\n25 + 17 = 42\n9 + 14 =",
    "Q: Which planet is the largest?\nA: Jupiter.\nQ: Which planet is closest to the sun?\nA:",
    "Der schnelle braune Fuchs springt ueber den faulen Hund, und der Hund",
    "Monday, Tuesday, Wednesday, Thursday, Friday,",
)
