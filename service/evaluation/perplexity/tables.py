"""A perplexity result as Markdown and as a terminal table."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from service.evaluation.perplexity.results import MethodResult, PerplexityResult
from service.evaluation.results import documents_text, name_of

TERMINAL_COLUMNS = 8
BEST = "bold green"


def perplexity_markdown(result: PerplexityResult) -> str:
    """Methods as rows, lengths as columns, the best of each column in bold."""
    header = ["method", *(f"{length:,}" for length in result.lengths)]
    lines = [_markdown_row(header), _markdown_row(["---", *["---:"] * len(result.lengths)])]
    for method, values in _cells(result):
        shown = [f"**{text}**" if style else text for text, style in values.values()]
        label = name_of(method, result).replace("\\", "\\\\").replace("|", "\\|")
        lines.append(_markdown_row([label, *shown]))
    return "\n".join(lines) + "\n"


def perplexity_rich(result: PerplexityResult) -> Table:
    """The same table for a terminal, to go under ``heading``.

    Lengths past the trained one are yellow, the best of each length is green. Of many lengths
    only a few are shown, and the caption says so.
    """
    lengths = result.lengths
    if len(lengths) > TERMINAL_COLUMNS:
        lengths = spaced(lengths, result.trained_length, TERMINAL_COLUMNS)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("method", overflow="fold", min_width=12)
    for length in lengths:
        style = "bold" if length <= result.trained_length else "bold yellow"
        table.add_column(Text(f"{length:,}", style=style), justify="right", no_wrap=True)
    for method, values in _cells(result):
        shown = [Text(*values[length]) for length in lengths]
        table.add_row(Text(name_of(method, result)), *shown)
    left_out = len(result.lengths) - len(lengths)
    more = f"; {left_out} more lengths measured" if left_out else ""
    table.caption = Text(f"trained length {result.trained_length:,} tokens; {interval_note(result)}{more}")
    table.caption_justify = "left"
    return table


def spaced(lengths: Sequence[int], trained_length: int, most: int) -> list[int]:
    """At most ``most`` of the ascending ``lengths``, apart on a log scale: both ends, then the trained
    length and its doublings where they are among them, then others."""
    first, last = lengths[0], lengths[-1]
    gap = math.log2(last / first) / (most - 1) * (1 - 1e-9)
    doublings = [length for length in lengths if math.log2(length / trained_length).is_integer()]
    chosen = [first]
    for length in [last, *doublings, *lengths]:
        if all(abs(math.log2(length / other)) >= gap and length != other for other in chosen):
            chosen.append(length)
    return sorted(chosen)


def heading(result: PerplexityResult) -> str:
    """Model, protocol and documents in one line."""
    return (
        f"Perplexity of {result.model} by context length: {protocol_note(result)}, {documents_text(result.documents)}"
    )


def protocol_note(result: PerplexityResult) -> str:
    """The protocol with the parameters that had an effect, such as ``sliding (stride 256)``."""
    parameters = ", ".join(f"{name} {value}" for name, value in result.parameters.items())
    return f"{result.protocol} ({parameters})" if parameters else result.protocol


def interval_note(result: PerplexityResult) -> str:
    """What the intervals are over."""
    kinds = {at.interval.kind for method in result.methods for at in method.lengths if at.interval}
    if not kinds:
        return "too few tokens for an interval"
    over = {"documents": "documents (bootstrap)", "blocks": "blocks of 64 tokens"}
    return f"95 % interval over {' and '.join(over[kind] for kind in sorted(kinds))}"


def short_number(value: float) -> str:
    """A perplexity in few characters: 7.123, 45.67, 812.3, 56,789, 1.2e+09."""
    if value >= 1e6:
        return f"{value:.1e}"
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 100 else f"{value:.2f}" if value >= 10 else f"{value:.3f}"


def _cells(result: PerplexityResult) -> Iterator[tuple[MethodResult, dict[int, tuple[str, str]]]]:
    """Per method: length -> (number, style), both empty where nothing was measured."""
    perplexities = [{at.length: at.perplexity for at in method.lengths} for method in result.methods]
    best = {n: min((values[n] for values in perplexities if n in values), default=None) for n in result.lengths}
    for method, values in zip(result.methods, perplexities, strict=True):
        shown = {n: (short_number(values[n]), BEST if values[n] == best[n] else "") for n in values}
        yield method, {n: shown.get(n, ("", "")) for n in result.lengths}


def _markdown_row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"
