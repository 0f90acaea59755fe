"""Pages of a generation whose encoding, or some of whose layers, do not reach all tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from patches import LayerMask


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


@dataclass(frozen=True)
class LocalWindow:
    """The tokens that layers with these ``masks`` reach: windows or chunks of at most ``size`` tokens.

    Pages of ``page_size`` tokens are evicted when a new one begins. So a step inside a page has those of the former.
    """

    masks: tuple[LayerMask, ...]
    size: int
    page_size: int
    sink_pages = 0

    def evicted_pages(self, position: int) -> int:
        """First pages that no query from the page of ``position`` on reaches."""
        begins = position - position % self.page_size
        return min(mask.key_range(begins, begins)[0] for mask in self.masks) // self.page_size

    def tokens_read(self, position: int) -> int:
        """Tokens before ``position`` in the pages that a step beginning there has."""
        return position - self.evicted_pages(position) * self.page_size

    def max_cached_len(self, length: int, new_tokens: int) -> int:
        """As ``SinkWindow.max_cached_len``, in whole pages where the window is shorter."""
        before = -(-(self.size - 1) // self.page_size)
        pages = before + 1 + (self.page_size + new_tokens - 2) // self.page_size
        return min(length, pages * self.page_size)


def max_cached_len(sink_window: tuple[int, int] | None, length: int, page_size: int, new_tokens: int) -> int:
    """Most tokens that a cache contains of a generation of ``length`` tokens, when a step adds ``new_tokens`` at most.

    ``sink_window`` counts the first and the last keys that queries reach, None for all.
    """
    return length if sink_window is None else SinkWindow(*sink_window, page_size).max_cached_len(length, new_tokens)


@dataclass(frozen=True)
class Sectors:
    """Units of memory for ``whole`` layers that attend to everything and ``local`` ones that reach a ``window``.

    A sector has one block of the larger group, or some of the other. A block has a page in each layer of its group.
    """

    whole: int
    local: int
    window: LocalWindow

    @property
    def width(self) -> int:
        """Pages of a sector, of one layer each."""
        return max(self.whole, self.local)

    def count(self, tokens: int) -> int:
        """Sectors in the memory that ``tokens`` take in all layers."""
        return tokens * (self.whole + self.local) // (self.width * self.window.page_size)

    def max_cached_len(self, sink_window: tuple[int, int] | None, length: int, new_tokens: int) -> int:
        """As ``max_cached_len``: tokens that take as much memory in all layers as the sectors of a generation."""
        page_size, gaps = self.window.page_size, 0 if sink_window is None else 2
        cached = max_cached_len(sink_window, length, page_size, new_tokens)
        sectors = self._needed(self.local, length, self.window.max_cached_len(length, new_tokens), gaps=1)
        sectors += self._needed(self.whole, length, cached, gaps=gaps)
        return -(-sectors * self.width * page_size // (self.whole + self.local))

    def _needed(self, layers: int, length: int, cached: int, *, gaps: int) -> int:
        """Most sectors for the ``cached`` tokens of ``length`` in so many layers.

        A page beside one of ``gaps`` may be alone in its sector. Sectors are filled in the order of the text.
        """
        if not layers:
            return 0
        blocks = self.width // layers
        tokens = self.window.page_size * blocks
        return min(-(-length // tokens), -(-cached // tokens) + (gaps if blocks > 1 else 0))
