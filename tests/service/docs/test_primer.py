"""docs/primer.md and its pictures are what the template and the code say."""

from __future__ import annotations

import re

import pytest

from patches import METHODS, from_text, parse
from service.docs.primer import PICTURES, WORDS, facts, primer
from tests.conftest import ROOT
from tests.service.docs.drawings import assert_current

DOCS = ROOT / "docs"
PAGE = (DOCS / "primer.md").read_text(encoding="utf-8")
FILES = {path.stem: path for path in (DOCS / PICTURES).iterdir()}
FAMILIES = (
    *("Sinusoidal", "Learned", "Relative", "ALiBi", "RoPE", "Position interpolation"),
    *("NTK-aware", "YaRN", "Self-Extend", "NoPE", "DroPE"),
)


def test_the_page_is_the_codes() -> None:
    """Regenerate with: ropeway methods --docs docs"""
    assert primer()[0] == PAGE


def test_every_family_has_a_formula_a_paper_and_methods() -> None:
    sections = dict(re.findall(r"^### (.*)\n((?:(?!^##).*\n)*)", PAGE, re.M))
    assert tuple(sections) == FAMILIES
    for text in sections.values():
        assert re.search(r"^```\n.+\n```$", text, re.M)
        paper, methods = re.findall(r"^Paper: (.*)\. Methods: (.*)\.$", text, re.M)[0]
        assert "https://arxiv.org/abs/" in paper
        named = re.findall(r"\[`(\w+)`\]\(methods\.md#(\w+)\)", methods)
        assert named
        assert all(name == anchor and name in METHODS for name, anchor in named)


def test_every_picture_is_on_the_page_and_they_are_small() -> None:
    assert set(re.findall(rf"\]\({PICTURES}/([\w-]+)\.svg\)", PAGE)) == set(FILES) == set(primer()[1])
    assert sum(path.stat().st_size for path in FILES.values()) < 600_000


@pytest.mark.parametrize("name", sorted(FILES))
def test_pictures_are_the_codes(name: str) -> None:
    """Regenerate with: ropeway methods --docs docs"""
    assert_current(FILES[name], primer()[1][name])


def test_encodings_in_commands_are_valid() -> None:
    encodings = re.findall(r"--pe (\S+?)[`\s]", PAGE)
    assert encodings
    for encoding in encodings:
        parse(from_text(encoding))


class TestNumbers:
    """Against arithmetic written out here."""

    def test_wavelengths(self) -> None:
        assert facts("default").wavelengths[31] == pytest.approx(2 * 3.14159265 * 10_000 ** (31 / 32), rel=1e-6)
        assert facts("default").unfinished == sum(2 * 3.14159265 * 10_000 ** (i / 32) > 256 for i in range(32)) == 19
        assert facts("linear:4").stretched(4) == 32
        assert facts("ntk:4").stretched(4) == 1
        assert facts("ntk:4").stretched(1) == 1

    def test_distances_and_biases(self) -> None:
        assert facts("self_extend").distance(63) == 63
        assert facts("self_extend").distance(1000) == 1024 // 8 - 24 // 8 + 64 - 64 // 8
        assert facts("alibi").bias(0, 16) == -8.0

    def test_a_word_cannot_be_placed_without_positions(self) -> None:
        last = len(WORDS) - 1
        assert WORDS[1] == WORDS[last]
        assert facts("none").weight(last, 1) == pytest.approx(facts("none").weight(last, last))
        assert facts("default").weight(last, 1) < facts("default").weight(last, last)

    def test_temperatures(self) -> None:
        assert facts("drope:4").multiplier == pytest.approx(1.5684, abs=1e-4)
        assert facts("none").multiplier == 1.0
