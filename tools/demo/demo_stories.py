"""Templated short stories: many different texts, all of them checkable.

A story is a sequence of sentences; each sentence is one of a few templates whose slots are
filled from small word lists.  `is_story` accepts exactly the texts that `tell` can produce.
"""

from __future__ import annotations

import random
import re


def _listed(text: str) -> tuple[str, ...]:
    return tuple(text.split())


ANIMALS: tuple[str, ...] = _listed(
    """
    ant badger bat bear beaver bee bird bison camel cat cow crab crow deer dog dolphin donkey
    dove dragon duck eagle elk falcon ferret fish fox frog goat goose hare hawk hen horse
    jaguar kitten koala lamb lion lizard llama lynx mole monkey moose mouse newt otter owl
    panda parrot pig pigeon pony puppy rabbit raven robin seal shark sheep snail snake
    spider squirrel swan tiger toad turkey turtle walrus whale wolf wombat worm yak zebra
    """
)
"""Animals; also the heroes of the stories."""

THINGS: tuple[str, ...] = _listed(
    """
    acorn anchor apple arrow axe bag ball banana barn basket beach bell bench berry boat bone
    book boot bottle bowl box branch bread brick bridge broom brush bucket button cabin cake
    candle canoe card carpet carrot castle chair cheese cherry clock cloud coat coin cookie
    cotton cup desk door dress drum engine envelope fan farm feather fence field flag flower
    fork fruit garden gate ghost glass glove grape grass guitar hammer harbor hat helmet hill
    honey hook house ice igloo ink iron island jacket jam jar jelly jewel jug juice jungle
    kettle key king kite knife knot ladder lake lamp lantern leaf lemon letter lock magnet map
    marble market mask meadow melon milk mirror moon mountain nail needle nest night notebook
    nut oak oar ocean olive onion orange orchard oven paint palace paper peach pear pearl
    pencil pepper piano picture pillow pipe planet plate plum pocket pond potato pumpkin
    queen quilt radio rain ribbon ring river road rocket roof root rope rose ruby rug sail
    salt sand school shell ship shoe silver sky snow sock soup spoon star stone storm street
    sugar sun table tent thread ticket tomato tower train tree trumpet tunnel umbrella valley
    vase village violin wagon wall watch water wave wheel window wing winter wood wool yard
    """
)
"""Everyday nouns."""

WORDS: tuple[str, ...] = tuple(sorted(ANIMALS + THINGS))
"""All nouns of the demo vocabulary, in alphabetical order."""

NAMES: tuple[str, ...] = _listed(
    """
    Ada Alan Anna Ben Clara David Ella Emma Felix Grace Hugo Ida Jack Julia Leo Lena Lucy Luke
    Maria Max Mia Mila Nina Noah Nora Oscar Otto Paul Rosa Ruby Sam Sara Theo Tom Vera Zoe
    """
)
CITIES: tuple[str, ...] = _listed(
    """
    Athens Berlin Boston Cairo Delhi Dublin Geneva Kyoto Lima Lisbon London Madrid Milan Oslo
    Paris Prague Rome Seoul Sydney Tokyo Toronto Vienna Warsaw Zurich
    """
)
COLORS: tuple[str, ...] = _listed("red blue green yellow purple black white brown pink gray")
TRAITS: tuple[str, ...] = _listed(
    "brave shy clever hungry lazy curious gentle proud tiny sleepy lonely cheerful"
)
PLACES: tuple[str, ...] = _listed(
    "forest garden valley village castle meadow jungle harbor desert barn"
)


OPENINGS = (
    "Once upon a time, there was a {trait} {animal} named {name} who lived in the {place}.",
)
WISHES = (
    "Every day {name} dreamed of finding a {thing}.",
    "More than anything, {name} wanted a {thing}.",
    "One morning {name} lost a {thing} and began to cry.",
)
MEETINGS = (
    'One day {name} met a {friend} who said, "I can help you."',
    "By the old bridge {name} met a {friend}, and they became friends.",
    "A {friend} heard about it and came to visit {name}.",
)
ACTIONS = (
    "Together they walked over the hill and looked behind every tree.",
    "They searched all day, until the sun went down.",
    "They crossed the river and followed the stars through the night.",
)
RESULTS = (
    "At last they found the {thing} under a big stone.",
    "In the end the {friend} found the {thing} in an old box.",
    "There, in the soft grass, was the {thing}.",
)
ENDINGS = (
    "{name} was very happy and thanked the {friend}.",
    "The {animal} and the {friend} danced and laughed all night.",
    "From that day on, the {trait} {animal} was never alone again.",
)
LAST = ("The end.",)
PARTS = (OPENINGS, WISHES, MEETINGS, ACTIONS, RESULTS, ENDINGS, LAST)

_SLOTS = {
    "trait": TRAITS,
    "animal": ANIMALS,
    "name": NAMES,
    "place": PLACES,
    "thing": THINGS,
    "friend": ANIMALS,
}


def article(word: str) -> str:
    """Returns "a" or "an", whichever goes before `word`."""
    return "an" if word[0] in "aeiou" else "a"


def _fill(template: str, values: dict[str, str]) -> str:
    text = template.format(**values)
    return re.sub(r"\b([Aa]) (?=[aeiou])", r"\1n ", text)


def tell(
    rng: random.Random, animal: str, trait: str | None = None, place: str | None = None
) -> str:
    """Returns a random story about `animal`; a trait or place not given is drawn too."""
    values = {
        "animal": animal,
        "trait": trait or rng.choice(TRAITS),
        "place": place or rng.choice(PLACES),
        "name": rng.choice(NAMES),
        "thing": rng.choice(THINGS),
        "friend": rng.choice([a for a in ANIMALS if a != animal]),
    }
    return " ".join(_fill(rng.choice(part), values) for part in PARTS)


def is_story(
    text: str, animal: str | None = None, trait: str | None = None, place: str | None = None
) -> bool:
    """Whether `text` is a story `tell` can produce, with the given slots where not None."""
    found = {"animal": animal, "trait": trait, "place": place}
    known = {slot: value for slot, value in found.items() if value is not None}
    rest = text.strip()
    for part in PARTS:
        match = next(filter(None, (_match(t, rest, known) for t in part)), None)
        if match is None:
            return False
        known.update(match.groupdict())
        rest = rest[match.end() :].lstrip(" ")
    return rest == "" and known["friend"] != known["animal"]


def _match(template: str, text: str, known: dict[str, str]) -> re.Match[str] | None:
    """Matches one sentence at the start of `text`; known slots must repeat their value."""
    pattern = re.escape(template)
    pattern = re.sub(r"\b([Aa])\\ (?=\\\{)", r"\1n?\\ ", pattern)
    for slot, choices in _SLOTS.items():
        hole = re.escape("{" + slot + "}")
        options = [known[slot]] if slot in known else list(choices)
        pattern = pattern.replace(hole, f"(?P<{slot}>{'|'.join(options)})", 1)
        pattern = pattern.replace(hole, f"(?P={slot})")
    match = re.match(pattern + r"(?=\s|$)", text)
    if match is None or _fill(template, {**known, **match.groupdict()}) != match.group(0):
        return None
    return match
