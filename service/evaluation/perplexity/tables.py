"""A perplexity result as a Markdown table."""

from __future__ import annotations

from service.evaluation.formatting import short_number
from service.evaluation.perplexity.results import PerplexityResult


def perplexity_markdown(result: PerplexityResult) -> str:
    """Methods as rows, lengths as columns, the best of each column in bold."""
    by_method = [{at.length: at.perplexity for at in method.lengths} for method in result.methods]
    best = {n: min((by_length[n] for by_length in by_method if n in by_length), default=None) for n in result.lengths}
    lines = [["method", *(f"{n:,}" for n in result.lengths)], ["---", *["---:"] * len(result.lengths)]]
    for name, by_length in zip(result.names(), by_method, strict=True):
        texts = {n: short_number(value) for n, value in by_length.items()}
        texts |= {n: f"**{texts[n]}**" for n, value in by_length.items() if value == best[n]}
        cells = [texts.get(n, "") for n in result.lengths]
        lines.append([name.replace("\\", "\\\\").replace("|", "\\|"), *cells])
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)
