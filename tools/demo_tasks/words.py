"""Word lists used by the demo tasks.

Every word is short, lower case and unique, so that a small tokenizer can keep each one as a
single token and a small model can learn all of them.
"""

from __future__ import annotations


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
