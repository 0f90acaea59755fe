"""GPT-2: a learned table of positions. Its attention dispatches by name, so the default is equal to the bit."""

from __future__ import annotations

from typing import Any

from patches.model.absolute import LearnedTable
from patches.model.architectures.architecture import Architecture, never


def positions(model: Any) -> LearnedTable:
    return LearnedTable(model.transformer.wpe)


def facts(config: Any) -> dict[str, Any]:
    return {"native": {"method": "learned"}, "table_rows": config.max_position_embeddings}


GPT2 = Architecture(facts=facts, rotates=never, positions=positions)
