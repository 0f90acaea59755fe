"""Pages of a generation whose encoding reaches the first and the last tokens only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Window:
    """The ``first`` tokens and the ``last`` ones that a query reaches, its own included, in pages of ``page`` tokens.

    Every query reaches the pages of the first tokens. Those after them go once they are out of reach.
    """

    first: int
    last: int
    page: int

    @property
    def head_pages(self) -> int:
        return -(-self.first // self.page)

    def dropped(self, position: int) -> int:
        """Pages after the head that no query from ``position`` on reaches."""
        return max(0, (position - self.last + 1) // self.page - self.head_pages)

    def tokens_read(self, position: int) -> int:
        """Tokens before ``position`` that a step beginning there reads."""
        dropped = self.dropped(position)
        return position if not dropped else self.first + position - (self.head_pages + dropped) * self.page

    def tokens_held(self, length: int, new_tokens: int) -> int:
        """Most tokens that pages are held for, up to ``length``, when a step adds at most ``new_tokens``.

        A step at position p reaches back to p - last + 1, wherever in its page that lies.
        """
        tail_pages = -(-(self.page - 1 + self.last - 1 + new_tokens) // self.page)
        return min(length, (self.head_pages + tail_pages) * self.page)
