"""Training text: reading documents, the held-out split, and packed token ids on disk.

A row is BOS followed by 255 tokens, and its targets are those tokens and the next one. Every token is thus predicted
once, and BOS at position 0 marks the start of a text, as in service.
"""

from __future__ import annotations

import hashlib
import json
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer

from service.models.training.tokenizer import special_ids

TEXT_SUFFIXES = {".txt", ".md", ".rst"}
NOT_TRAINED_ON = ("site-packages", "dist-packages", "test", "tests", "idlelib", "pydoc_data", "__pycache__")
"""Folders of the standard library left out; pydoc_data is a document that evaluations measure on."""
MEASURED_ON = "Sir Walter Elliot, of Kellynch Hall"
"""The first words of the default document: a model that has read it would be measured on what it knows."""


class CorpusError(ValueError):
    """The corpus cannot be trained on; the message says why."""


@dataclass(frozen=True)
class Document:
    """One text; ``name`` is its path below the corpus folder."""

    name: str
    text: str = field(repr=False)
    corpus: str
    licence: str


@dataclass(frozen=True)
class DocumentRecord:
    """The facts about a document in the model card."""

    name: str
    corpus: str
    licence: str
    bytes: int
    tokens: int
    heldout: bool


def read_folder(folder: Path, licence: str) -> list[Document]:
    """Every text file below ``folder``, by name; UTF-8, undecodable bytes replaced.

    Raises:
        CorpusError: when there is none, or one is the default document of the evaluations.
    """
    paths = sorted(path for path in folder.rglob("*") if path.suffix in TEXT_SUFFIXES and path.is_file())
    if not paths:
        raise CorpusError(f"no text files ({', '.join(sorted(TEXT_SUFFIXES))}) in {folder}")
    documents = [_read(path, folder, folder.resolve().name, licence) for path in paths]
    measured = next((document.name for document in documents if MEASURED_ON in document.text), None)
    if measured is not None:
        raise CorpusError(f"{measured} is Persuasion, which the evaluations measure on: take it out of {folder}")
    return documents


def read_standard_library(folder: Path | None = None) -> list[Document]:
    """The running interpreter's standard library sources, without tests and without pydoc_data."""
    folder = folder or Path(sysconfig.get_path("stdlib"))
    relative = sorted(path.relative_to(folder) for path in folder.rglob("*.py"))
    paths = [folder / path for path in relative if not set(path.parts) & set(NOT_TRAINED_ON)]
    return [_read(path, folder, "Python standard library", "PSF-2.0") for path in paths]


def _read(path: Path, folder: Path, corpus: str, licence: str) -> Document:
    text = path.read_bytes().decode("utf-8-sig", errors="replace")
    return Document(path.relative_to(folder).as_posix(), text, corpus, licence)


def heldout_names(names: Sequence[str], heldout: Sequence[str], fraction: float, seed: int) -> set[str]:
    """Names of the documents to hold out: those asked for, or else a seeded ``fraction``, at least one.

    Raises:
        CorpusError: for an unknown name, or when nothing would be left to train on.
    """
    if unknown := set(heldout) - set(names):
        raise CorpusError(f"no such document to hold out: {', '.join(sorted(unknown))}")
    chosen = set(heldout)
    if not chosen:
        count = max(1, round(fraction * len(names)))
        chosen = set(np.random.default_rng(seed).permutation(sorted(names))[:count].tolist())
    if chosen >= set(names):
        raise CorpusError(f"{len(names)} documents, all of them held out: nothing is left to train on")
    return chosen


def training_texts(documents: Sequence[Document], heldout: set[str]) -> Iterator[str]:
    return (document.text for document in documents if document.name not in heldout)


class PackedTokens:
    """Rows of ``context`` tokens over a memory-mapped uint16 file of token ids."""

    def __init__(self, path: Path, bos_token_id: int, context: int) -> None:
        self.ids = np.memmap(path, dtype=np.uint16, mode="r")
        self.bos_token_id, self.context = bos_token_id, context
        if len(self) == 0:
            raise CorpusError(f"{len(self.ids)} tokens do not fill one row of {context}; more text is needed")

    def __len__(self) -> int:
        return len(self.ids) // self.context

    def rows(self, index: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets, int64 [rows, context], of the rows ``index``."""
        columns = index[:, None] * self.context + np.arange(self.context)
        targets = torch.from_numpy(self.ids[columns].astype(np.int64))
        bos = torch.full((len(index), 1), self.bos_token_id)
        return torch.cat((bos, targets[:, :-1]), dim=1), targets


def batch_order(rows: int, batch: int, step: int, seed: int) -> np.ndarray:
    """Row indices of batch ``step``: a pure function, so that a resumed run reads on where it stopped.

    Each pass over the rows is its own seeded permutation.
    """
    place = np.arange(step * batch, (step + 1) * batch)
    return np.array([_permutation(rows, seed, int(i // rows))[i % rows] for i in place])


@lru_cache(maxsize=2)
def _permutation(rows: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(rows)


def pack(documents: Sequence[Document], heldout: set[str], tokenizer: Tokenizer, run_dir: Path) -> list[DocumentRecord]:
    """Tokenize into ``train.bin`` and ``heldout.bin``, each document closed by EOS; reused if nothing changed."""
    fingerprint = _fingerprint(documents, heldout, tokenizer)
    described = run_dir / "documents.json"
    if is_packed(documents, heldout, tokenizer, run_dir):
        return read_records(run_dir)
    described.unlink(missing_ok=True)  # it vouches for the two files, which are about to change
    _, eos = special_ids(tokenizer)
    records = []
    with (run_dir / "train.bin").open("wb") as train_file, (run_dir / "heldout.bin").open("wb") as heldout_file:
        for document in documents:
            held = document.name in heldout
            ids = [*tokenizer.encode(document.text, add_special_tokens=False).ids, eos]
            (heldout_file if held else train_file).write(np.array(ids, dtype=np.uint16).tobytes())
            size = len(document.text.encode())
            records.append(DocumentRecord(document.name, document.corpus, document.licence, size, len(ids), held))
    content = {"fingerprint": fingerprint, "documents": [asdict(record) for record in records]}
    described.write_text(json.dumps(content, indent=1), encoding="utf-8")
    return records


def is_packed(documents: Sequence[Document], heldout: set[str], tokenizer: Tokenizer, run_dir: Path) -> bool:
    """True if the token files in ``run_dir`` are of these documents by this tokenizer."""
    described = run_dir / "documents.json"
    if not described.exists():
        return False
    stored = json.loads(described.read_text(encoding="utf-8"))
    return bool(stored["fingerprint"] == _fingerprint(documents, heldout, tokenizer))


def fingerprint_of_tokens(run_dir: Path) -> str:
    """SHA-256 in hex of the tokens to train on and of those held out. Names and licences of documents do not count."""
    digest = hashlib.sha256()
    for name in ("train.bin", "heldout.bin"):
        with (run_dir / name).open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def read_records(run_dir: Path) -> list[DocumentRecord]:
    """The records of the documents that ``pack`` wrote."""
    stored = json.loads((run_dir / "documents.json").read_text(encoding="utf-8"))
    return [DocumentRecord(**record) for record in stored["documents"]]


def _fingerprint(documents: Sequence[Document], heldout: set[str], tokenizer: Tokenizer) -> str:
    digest = hashlib.sha256(tokenizer.to_str().encode())
    for document in documents:
        digest.update(f"{document}|{document.name in heldout}|".encode())
        digest.update(document.text.encode())
    return digest.hexdigest()
