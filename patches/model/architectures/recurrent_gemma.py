"""RecurrentGemma: its configuration has no trained length. Its attention dispatches by name: equal to the bit."""

from __future__ import annotations

from typing import Any

from patches.model.architectures.architecture import Architecture

TRAINED_LENGTH = 8192  # arXiv:2404.07839, section 2


def facts(config: Any) -> dict[str, Any]:
    return {"max_position_embeddings": TRAINED_LENGTH}


RECURRENT_GEMMA = Architecture(facts=facts)
