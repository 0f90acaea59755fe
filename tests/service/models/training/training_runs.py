"""Text for the smallest preset to learn from, and the parts of its runs."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch

from service.models.training import corpus, shape
from service.models.training.tokenizer import load_tokenizer, special_ids

TINY = shape.PRESETS["tiny"]
STEPS = 20
HELDOUT = "story3.txt"
CPU = torch.device("cpu")
WORDS = ["the", "a", "of", "cats", "dogs", "rain", "sees", "hears", "Jane", "said,", "it", "was.", "né", "東", "🐉"]


def story(seed: int) -> str:
    """Text in which each word allows only three successors: a model has something to learn."""
    chance = random.Random(seed)
    at, words = seed % len(WORDS), []
    for _ in range(1500):
        words.append(WORDS[at])
        at = (3 * at + chance.choice((1, 2, 5))) % len(WORDS)
    return f"Story number{seed}marker.\n" + " ".join(words) + "\n"


def packed(run_dir: Path, name: str) -> corpus.PackedTokens:
    bos, _ = special_ids(load_tokenizer(run_dir / "tokenizer"))
    return corpus.PackedTokens(run_dir / name, bos, TINY.context)


def fresh(run_dir: Path, kind: str, seed: int = 0) -> Any:
    tokenizer = load_tokenizer(run_dir / "tokenizer")
    config = shape.model_config(kind, TINY, tokenizer.get_vocab_size(), *special_ids(tokenizer))
    return shape.new_model(config, seed, CPU)
