"""Words, numbers and names without end, each at most once, from seeded random numbers: no file, no download."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from itertools import islice

import numpy as np

_ADJECTIVES = """
amber ample ancient arctic autumn bitter blue bold brave bright brisk broad calm careful cheap clean clear clever cold
cool coral crisp curious damp dark deep distant double dry dusty early eager empty even faint fair famous fast fierce
final fine firm flat fresh frozen gentle giant glad golden grand gray great green happy hard heavy hidden high hollow
honest huge humble icy idle inner jolly keen kind large late lazy light little lively lonely long loud low lucky
mellow mighty mild misty narrow neat new nimble noble odd old open pale patient plain polite proud quick quiet rapid
rare red rich ripe rough round royal rusty sandy secret sharp short shy silent silver simple slow small smooth soft
solid spare steady steep still strange strong sunny sweet swift tall tame tender thin tidy tiny tough upper vast
velvet warm weak white wide wild wise wooden young
"""
_NOUNS = """
acorn anchor apple arrow autumn badger bakery balcony barrel basket beach bell bench bird blanket boat bottle branch
bread breeze bridge brook broom bucket butter cabin cactus camel candle canoe canyon carpet castle cedar cellar chair
cherry chimney clock cloud clover coast comet copper cotton cradle crane creek crown desert diamond dinner dolphin
donkey dragon drum eagle engine falcon feather fence ferry field finch flame flower fog forest fountain fox garden
gate glacier glove goose grape guitar hammer harbor hawk hedge helmet heron hill honey horse island ivory jacket jewel
jungle kettle kitten ladder lake lamp lantern leaf lemon lily lizard maple marble market meadow melon mirror monkey
moon morning mountain needle nest night oak ocean olive orchard otter owl paddle palace parrot path peach pebble
pepper piano pigeon pillow pine planet pocket pond poppy prairie puddle rabbit raven reef ribbon river road robin
rocket rose saddle sail salmon sand shadow shell shore snow sparrow spider spoon spring squirrel star stone storm
stream summer sunset swan table teapot temple thunder tiger timber tower trail train tulip tunnel turtle valley
village violin wagon walnut water wheat whistle willow window winter wolf zebra
"""
ADJECTIVES, NOUNS = _ADJECTIVES.split(), _NOUNS.split()

_CONSONANTS, _VOWELS = "bdfghjklmnprstv", "aeiou"
_LOWER = "abcdefghijklmnopqrstuvwxyz"
_PAIRS = len(ADJECTIVES) * len(NOUNS)


def growing(items: Iterator[str]) -> Callable[[int], list[str]]:
    """``first(n)``: the first n of ``items``, the same whenever it is called."""
    found: list[str] = []

    def first(count: int) -> list[str]:
        found.extend(islice(items, max(count - len(found), 0)))
        return found[:count]

    return first


def words(rng: np.random.Generator) -> Iterator[str]:
    """``quiet-harbor``; after half of all pairs, of three parts."""

    def drawn(seen: set[str]) -> str:
        nouns = 1 if len(seen) < _PAIRS // 2 else 2
        return "-".join([ADJECTIVES[rng.integers(len(ADJECTIVES))], *(_letters(rng, NOUNS, nouns))])

    return _distinct(drawn)


def syllables(rng: np.random.Generator) -> Iterator[str]:
    """Words that do not exist, of six letters: ``tarimo``. None is part of another."""
    return _distinct(
        lambda seen: "".join(
            part for _ in range(3) for letters in (_CONSONANTS, _VOWELS) for part in _letters(rng, letters, 1)
        )
    )


def coded_words(rng: np.random.Generator) -> Iterator[str]:
    """Six lower-case letters."""
    return _distinct(lambda seen: "".join(_letters(rng, _LOWER, 6)))


def variables(rng: np.random.Generator) -> Iterator[str]:
    """Five capital letters."""
    return _distinct(lambda seen: "".join(_letters(rng, _LOWER.upper(), 5)))


def numbers(rng: np.random.Generator, digits: int = 7) -> Iterator[str]:
    """Numbers that do not begin with 0."""
    return _distinct(lambda seen: str(rng.integers(10 ** (digits - 1), 10**digits)))


def uuids(rng: np.random.Generator) -> Iterator[str]:
    """Version 4."""
    return _distinct(lambda seen: str(uuid.UUID(bytes=rng.bytes(16), version=4)))


def _letters(rng: np.random.Generator, letters: str | list[str], count: int) -> list[str]:
    return [letters[index] for index in rng.integers(0, len(letters), count)]


def _distinct(drawn: Callable[[set[str]], str]) -> Iterator[str]:
    seen: set[str] = set()
    while True:
        item = drawn(seen)
        if item not in seen:
            seen.add(item)
            yield item
