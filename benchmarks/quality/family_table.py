"""Perplexity of demo models of several families at 1x to 16x the trained length, on texts never trained on.

``python -m benchmarks.quality.family_table --texts FOLDER MODEL...`` prints one Markdown table. ``MODEL`` is a
folder that ``make train-demo FAMILY=...`` wrote. Each is measured under its own encoding and under what extends that,
on the same windows. These are consecutive whole ones of each length, over the first characters of every ``.txt`` file.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.quality.demo_table import documents_in, measure, perplexity_markdown
from service.cli.server import local_server
from service.cli.shared.client import client_of
from service.evaluation.perplexity.results import PerplexityResult
from service.settings import Settings

LONGEST = 16
TEMPERED = {"method": "default", "attention_temperature": "log_n"}
ROTARY: list[dict[str, Any]] = [
    {"method": "yarn", "factor": LONGEST},
    {"method": "dynamic"},
    {"method": "self_extend", "group_size": 32, "neighbor_window": 64},
]
EXTENSIONS: dict[str, list[dict[str, Any]]] = {
    "rope": ROTARY,
    "alibi": [{"method": "alibi", "slope_factor": "dynamic", "use_variant": False}],
    "none": [TEMPERED],
    "learned": [{"method": "learned_interpolation", "align": "ends"}, {"method": "learned_hierarchical"}],
    "sinusoidal": [{"method": "sinusoidal_interpolation", "factor": LONGEST}],
    "t5": [TEMPERED],
    "shaw": [TEMPERED],
    "transformer_xl": [TEMPERED],
}
"""Family -> what extends it, beside its own encoding."""
ENDS = {"learned"}
"""Families whose own encoding ends with the trained length."""


def family_of(config: dict[str, Any]) -> str:
    """The family of ``EXTENSIONS`` of a checkpoint's configuration."""
    own = config.get("position_family") or config.get("position_encoding", {}).get("method", "rope")
    if own not in EXTENSIONS:
        raise typer.BadParameter(f"{own!r} is not one of {', '.join(EXTENSIONS)}")
    return str(own)


def compared(folders: list[Path], documents: dict[str, str]) -> PerplexityResult:
    """All models under all their encodings, as one result without one model."""
    configs = [json.loads((folder / "config.json").read_text(encoding="utf-8")) for folder in folders]
    trained = sorted({config["max_position_embeddings"] for config in configs})
    if len(trained) > 1:
        raise typer.BadParameter(f"the models were trained at different lengths: {trained}")
    lengths = [trained[0] << step for step in range(LONGEST.bit_length())]
    results: list[PerplexityResult] = []
    for folder, config in zip(folders, configs, strict=True):
        family = family_of(config)
        own_lengths = lengths[:1] if family in ENDS else lengths
        with local_server(Settings(_env_file=None, model=str(folder))) as url, client_of(url) as client:
            results.append(measure(client, documents, [{"method": "default"}], own_lengths))
            results.append(measure(client, documents, EXTENSIONS[family], lengths))
    methods = [method for result in results for method in result.methods]
    return results[-1].model_copy(update={"model": "", "lengths": lengths, "methods": methods})


def main(
    models: Annotated[list[Path], typer.Argument(exists=True, file_okay=False, help="Folders of trained models.")],
    texts: Annotated[Path, typer.Option(help="Folder of .txt files that no model here was trained on.")],
    characters: Annotated[int, typer.Option(help="Characters of every text.")] = 60_000,
) -> None:
    """Measure and print."""
    typer.echo(perplexity_markdown(compared(models, documents_in(texts, characters))))


if __name__ == "__main__":
    typer.run(main)
