"""The tokenizer of a run's folder follows its texts, and texts with trained models stay.

``tokenizer/texts.json`` records the texts that the tokenizer learned from. It is written last.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import structlog
from tokenizers import Tokenizer

from service.models.training.corpus import CorpusError, Document, training_texts
from service.models.training.shape import Preset
from service.models.training.tokenizer import load_tokenizer, save_tokenizer, train_tokenizer

TOKENIZER = "tokenizer"
TEXTS = "texts.json"

log = structlog.get_logger()


def tokenizer_for(documents: Sequence[Document], heldout: set[str], preset: Preset, run_dir: Path) -> Tokenizer:
    """The tokenizer in ``run_dir`` if it learned from these texts, or else a new one in its place.

    Raises:
        CorpusError: when models in ``run_dir`` were trained on other texts.
    """
    folder = run_dir / TOKENIZER
    fingerprint = _fingerprint(documents, heldout, preset)
    if (folder / "tokenizer.json").exists() and _fits(fingerprint, run_dir):
        return load_tokenizer(folder)
    if trained := sorted(path.parent.name for path in run_dir.glob("*/checkpoint.pt")):
        raise CorpusError(
            f"{run_dir} has checkpoints of other texts or another vocabulary ({', '.join(trained)}): give another "
            "--run-dir, or remove it"
        )
    (folder / TEXTS).unlink(missing_ok=True)  # it vouches for the tokenizer, which is about to change
    save_tokenizer(train_tokenizer(training_texts(documents, heldout), preset.vocab_size), folder, preset.context)
    (folder / TEXTS).write_text(json.dumps({"fingerprint": fingerprint}), encoding="utf-8")
    return load_tokenizer(folder)


def _fits(fingerprint: str, run_dir: Path) -> bool:
    record = run_dir / TOKENIZER / TEXTS
    if record.exists():
        return bool(json.loads(record.read_text(encoding="utf-8"))["fingerprint"] == fingerprint)
    if (run_dir / "documents.json").exists():  # a preparation was interrupted
        return False
    log.warning("tokenizer_kept", folder=str(run_dir / TOKENIZER), reason="it was put there, its texts are unknown")
    return True


def _fingerprint(documents: Sequence[Document], heldout: set[str], preset: Preset) -> str:
    """Of all that a tokenizer and tokens follow from; names and licences may change."""
    digest = hashlib.sha256(f"{preset.vocab_size}|{preset.context}".encode())
    for document in documents:
        digest.update(f"|{document.name in heldout}|{len(document.text)}|".encode())
        digest.update(document.text.encode())
    return digest.hexdigest()
