"""OPT and BioGPT: a learned table whose first two rows are no positions. Dispatch by name: equal to the bit."""

from __future__ import annotations

from typing import Any

from patches.model.absolute import LearnedTable
from patches.model.architectures.architecture import Architecture, never
from patches.model.architectures.gpt2 import facts


def positions(model: Any) -> LearnedTable:
    table = model.get_decoder().embed_positions
    return LearnedTable(table, table.offset)


OPT = Architecture(facts=facts, rotates=never, positions=positions)
