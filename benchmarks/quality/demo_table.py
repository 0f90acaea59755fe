"""Perplexity of both demo models under every method at 1x to 32x the trained length, on texts never trained on.

``python -m benchmarks.quality.demo_table --texts FOLDER`` writes the table into both model cards. Consecutive whole
windows of each length, over the first characters of every ``.txt`` file in the folder. ``make demo`` draws the README's
picture.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from service.cli.server import local_server
from service.cli.shared.client import client_of
from service.cli.shared.measuring import show
from service.client import Ropeway
from service.evaluation.formatting import short_number
from service.evaluation.perplexity.results import PerplexityResult
from service.models.checkpoint.loading import DEMO
from service.models.training.card import insert_table
from service.settings import Settings

PAIRS = 32
METHODS: list[dict[str, Any]] = [
    {"method": "default"},
    {"method": "linear", "factor": 8},
    {"method": "ntk", "factor": 16},
    {"method": "dynamic"},
    {"method": "ntk_by_parts", "factor": 8},
    {"method": "yarn", "factor": 8},
    {"method": "yarn", "factor": 32},
    {"method": "llama3", "factor": 8},
    # No searched lists exist for these models: divisors that grow geometrically from 1 to 8 replace them.
    {
        "method": "longrope",
        "factor": 8,
        "short_factor": [1.0] * PAIRS,
        "long_factor": [8 ** (pair / (PAIRS - 1)) for pair in range(PAIRS)],
    },
    {"method": "self_extend", "group_size": 8, "neighbor_window": 64},
    {"method": "self_extend", "group_size": 64, "neighbor_window": 64},
    {"method": "none"},
    {"method": "alibi", "use_variant": False},
    {"method": "alibi"},
]
LENGTHS = [256 << step for step in range(6)]


def documents_in(texts: Path, characters: int) -> dict[str, str]:
    """Name and first characters of every text in the folder."""
    documents = {path.stem: path.read_text(encoding="utf-8")[:characters] for path in sorted(texts.glob("*.txt"))}
    if not documents:
        raise typer.BadParameter(f"no .txt file in {texts}")
    return documents


def measure(
    client: Ropeway, documents: dict[str, str], methods: list[dict[str, Any]], lengths: list[int]
) -> PerplexityResult:
    """Perplexity over consecutive whole windows of every length.

    Raises:
        RopewayError: when a method does not apply to the model at one of the lengths.
    """
    body = {"input": list(documents.values()), "methods": methods, "lengths": lengths, "protocol": "disjoint"}
    result = client.perplexity(**body)
    for document, name in zip(result.documents, documents, strict=True):
        document.name = name
    return result


def perplexity_markdown(result: PerplexityResult) -> str:
    """Methods as rows, lengths as columns, the best of each column in bold."""
    scores = result.scores()
    best = {n: scores.best_at(n) for n in result.lengths}
    lines = [["method", *(f"{n:,}" for n in result.lengths)], ["---", *["---:"] * len(result.lengths)]]
    for row, (name, by_length) in enumerate(zip(result.names(), scores.by_method, strict=True)):
        texts = {n: short_number(at.value) for n, at in by_length.items()}
        texts |= {n: f"**{text}**" for n, text in texts.items() if row in best[n]}
        cells = [texts.get(n, "") for n in result.lengths]
        lines.append([name.replace("\\", "\\\\").replace("|", "\\|"), *cells])
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def main(
    texts: Annotated[Path, typer.Option(help="Folder of .txt files that no model here was trained on.")],
    characters: Annotated[int, typer.Option(help="Characters of every text.")] = 60_000,
) -> None:
    """Measure, print, and write the cards."""
    documents = documents_in(texts, characters)
    with local_server(Settings(_env_file=None)) as url, client_of(url) as client:
        result = measure(client, documents, METHODS, LENGTHS)
    show(result)
    for folder in sorted(DEMO.iterdir()):
        insert_table(folder / "README.md", perplexity_markdown(result))


if __name__ == "__main__":
    typer.run(main)
