"""A small fault, and the tests that must see it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Mutation:
    """``text`` occurs once in the package ``folder``; ``wrong`` replaces it, and one of ``tests`` must fail."""

    name: str
    folder: str
    text: str
    wrong: str
    tests: tuple[str, ...]

    def file(self, root: Path) -> Path:
        """The source file that holds the text.

        Raises:
            LookupError: unless exactly one file holds it, once.
        """
        found = [path for path in sorted((root / self.folder).rglob("*.py")) for _ in range(self.count_in(path))]
        if len(found) != 1:
            raise LookupError(f"{self.name}: {len(found)} places in {self.folder} hold {self.text!r}")
        return found[0]

    def count_in(self, path: Path) -> int:
        return path.read_text(encoding="utf-8").count(self.text)
