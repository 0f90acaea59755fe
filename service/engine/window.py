"""Pages of a generation whose encoding reaches the first and the last tokens only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SinkWindow:
    """The first ``num_sinks`` tokens and the last ``window_size`` ones that a query reaches, itself included, in pages
    of ``page_size`` tokens.

    Every query reaches the pages of the sinks. Pages after them are evicted once they are out of reach.
    """

    num_sinks: int
    window_size: int
    page_size: int

    @property
    def sink_pages(self) -> int:
        return -(-self.num_sinks // self.page_size)

    def evicted_pages(self, position: int) -> int:
        """Pages after the sinks that no query from ``position`` on reaches."""
        return max(0, (position - self.window_size + 1) // self.page_size - self.sink_pages)

    def tokens_read(self, position: int) -> int:
        """Tokens before ``position`` that a step beginning there reads."""
        evicted = self.evicted_pages(position)
        return position if not evicted else self.num_sinks + position - (self.sink_pages + evicted) * self.page_size

    def max_cached_len(self, length: int, new_tokens: int) -> int:
        """Most tokens in cached pages at any time up to ``length``, when a step adds at most ``new_tokens``.

        A step at position p reaches back to p - window_size + 1, wherever in its page that lies.
        """
        tail_pages = -(-(self.page_size - 1 + self.window_size - 1 + new_tokens) // self.page_size)
        return min(length, (self.sink_pages + tail_pages) * self.page_size)


def max_cached_len(
    sink_window: tuple[int, int] | None, length: int, page_size: int, new_tokens: int, sliding: int | None
) -> int:
    """Most tokens that a cache contains of a generation of ``length`` tokens, when a step adds ``new_tokens`` at most.

    ``sink_window`` counts the first and the last keys that queries reach, None for all; ``sliding`` is the window of
    layers that have their own.
    """
    if sink_window is None:
        return length
    cached = SinkWindow(*sink_window, page_size).max_cached_len(length, new_tokens)
    return max(cached, min(length, sliding or 0))
