"""The model card: what a demo model is and saw, how well it does, where it must not be trusted."""

from __future__ import annotations

import json
import math
import platform
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby, pairwise
from pathlib import Path

import torch
from pydantic import TypeAdapter

from service.machine.cpus import processor
from service.models.training.corpus import DocumentRecord
from service.models.training.shape import KINDS, PRESETS, SHIPPED, Preset, encoding_of, served_name
from service.models.training.train import LogEntry

TRAINING = "Training"
TABLE_START, TABLE_END = "<!-- table:start -->", "<!-- table:end -->"
BUCKETS = 8
"""Position buckets, the first one halved: the first tokens differ most."""

HEADER = """---
license: apache-2.0
language: en
library_name: transformers
pipeline_tag: text-generation
---
"""

LIMITS = """## Limits

- A measuring instrument for positional encodings, not a useful language model. It writes grammatical
  fragments without sense, knows no facts, follows no instructions and was not filtered for bias. Its
  corpus carries the language and the prejudices of its time.
- Effects of context extension are real here, their sizes are not those of large models. Beyond the synthetic
  recall of its training, attention of a model this small uses little more than the last sentences.
- One seed, one run; {search}. Differences of a few
  per cent between the models are within what another seed may give.
- Weights are stored in float16; the losses above were measured before rounding.
"""


@dataclass(frozen=True)
class Facts:
    """All facts of the card, as stored in the run directory."""

    kind: str
    preset: Preset
    parameters: int
    steps: int
    seed: int
    precision: str
    seconds: float
    threads: int
    hardware: str
    documents: list[DocumentRecord]
    log: list[LogEntry]
    position_losses: list[float]
    initial: str = ""
    initial_training: list[str] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return self.steps * self.preset.batch * self.preset.context

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Facts:
        found: Facts = TypeAdapter(cls).validate_json(path.read_bytes())
        return found


def hardware(device: torch.device) -> str:
    """The machine in words: operating system, processor, accelerator."""
    parts = [f"{platform.system()} {platform.machine()}", processor()]
    if device.type == "cuda":
        parts.append(torch.cuda.get_device_name(device))
    return ", ".join(parts)


def write_card(facts: Facts, path: Path) -> None:
    """Write the card to ``path``, with the table of an earlier card there."""
    table = _table_in(path.read_text(encoding="utf-8")) if path.exists() else "Not measured yet."
    sections = [_about(facts), _data(facts), *_runs(facts), _evaluation(facts), _length_section(table)]
    search = "of the hyper-parameters two learning rates and two mixtures of recall were compared"
    if not _ships(facts):
        search = "no hyper-parameter was searched for this model"
    limits = LIMITS.format(search=search)
    path.write_text(HEADER + "\n" + "\n".join([*sections, limits]), encoding="utf-8")


def insert_table(card_path: Path, markdown: str) -> None:
    """Replace the text between the card's table markers.

    Raises:
        ValueError: when the card has no such markers.
    """
    card = card_path.read_text(encoding="utf-8")
    old = _table_in(card)
    before, after = card.split(f"{TABLE_START}\n{old}\n{TABLE_END}")
    card_path.write_text(f"{before}{TABLE_START}\n{markdown.strip()}\n{TABLE_END}{after}", encoding="utf-8")


def _table_in(card: str) -> str:
    if card.count(TABLE_START) != 1 or card.count(TABLE_END) != 1:
        raise ValueError(f"the card needs one {TABLE_START} and one {TABLE_END}")
    return card.split(f"{TABLE_START}\n")[1].split(f"\n{TABLE_END}")[0]


def markdown_table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def _ships(facts: Facts) -> bool:
    return facts.kind in KINDS and _preset_name(facts.preset) == SHIPPED


def _preset_name(preset: Preset) -> str | None:
    """The name of ``preset``, whose learning rate an option may have replaced; None when ``PRESETS`` has none."""
    rate = preset.learning_rate
    return next((name for name, known in PRESETS.items() if replace(known, learning_rate=rate) == preset), None)


def _about(facts: Facts) -> str:
    preset, encoding = facts.preset, encoding_of(facts.kind)
    twins = ", ".join(f"`{served_name(kind)}`" for kind in KINDS if kind != facts.kind)
    origin = f"""It ships inside Ropeway as a
demo model. Its twin {twins} has the same shape, data, tokenizer, initial weights, data order, steps and
seed. Only the positional encoding differs."""
    if not _ships(facts):
        origin = f"""It was made by
`make train-demo FAMILY={facts.kind}`. With the same options every other family has the same shape, data, tokenizer,
initial weights, data order and seed. Only the positional encoding differs."""
    return f"""# {served_name(facts.kind)}

A Llama-shaped language model of {facts.parameters / 1e6:.2f}M parameters with {encoding}. It was trained from scratch
at a context of **{preset.context} tokens**, so that extending the context shows on a laptop. {origin}

Shape: {preset.layers} layers, hidden size {preset.hidden_size}, {preset.heads} heads of {preset.head_dim} dimensions,
{preset.kv_heads} key-value heads, feed-forward {preset.intermediate_size}. Tied embeddings, byte-level BPE of
{preset.vocab_size} entries. Every text starts with `<|bos|>`; scores should too.
"""


def _data(facts: Facts) -> str:
    rows = []
    for (corpus, licence), group in groupby(facts.documents, lambda record: (record.corpus, record.licence)):
        records = list(group)
        size, tokens = sum(r.bytes for r in records), sum(r.tokens for r in records)
        rows.append([corpus, licence, str(len(records)), f"{size:,}", f"{tokens:,}"])
    table = markdown_table(["corpus", "licence", "documents", "bytes", "tokens"], rows)
    heldout = ", ".join(f"`{record.name}`" for record in facts.documents if record.heldout)
    trained = sum(record.tokens for record in facts.documents if not record.heldout)
    names = ", ".join(f"`{record.name}`" for record in facts.documents if not record.heldout)
    listed = f"Trained on: {names}." if len(facts.documents) <= 200 else f"{len(facts.documents)} documents."
    return f"""## Data

{table}
Held out whole, for validation: {heldout}. Ropeway's built-in documents, Jane Austen's *Persuasion* and Python's
`pydoc_data.topics`, are never part of the corpus.

{_seen(facts, trained)}

{listed}
"""


def _training(facts: Facts) -> str:
    speed = facts.tokens / facts.seconds
    rows = [
        [f"{e.step:,}", f"{e.train_loss:.3f}", f"{e.validation_loss:.3f}", f"{e.seconds / 60:.1f}"] for e in facts.log
    ]
    curve = markdown_table(["step", "training loss", "validation loss", "minutes"], rows)
    return f"""{_rows_of(facts)}AdamW (0.9, 0.95), weight decay 0.1 on matrices,
peak learning rate {facts.preset.learning_rate:g}, 3 % warmup, cosine to a tenth, gradients clipped at 1.0;
{facts.steps:,} steps of
{facts.preset.batch} x {facts.preset.context} tokens, seed {facts.seed}, precision {facts.precision}.
{facts.seconds / 60:.0f} minutes at {speed:,.0f} tokens/s on
{facts.hardware}; {facts.threads} thread(s).

To repeat it: `{_command(facts)}`.

Losses in nats per token.

{curve}"""


def _rows_of(facts: Facts) -> str:
    """The stages, in words."""
    if not facts.preset.stages:
        return ""
    stages = [
        f"{stage.share:.0%} of the steps on rows of {stage.context} tokens, {stage.recall:.0%} of them recall"
        for stage in facts.preset.stages
    ]
    return f"""Training went on with text and synthetic recall: repeated text, repeated random tokens, values hidden in
text, and key-value pairs. {"; ".join(stages)}. Tokens that nothing predicts are no targets.

"""


def training_of(folder: Path) -> list[str]:
    """The training runs in the card of the model in ``folder``, the first one first, without their headings.

    Raises:
        ValueError: when its card has none.
    """
    card = folder / "README.md"
    sections = f"\n{card.read_text(encoding='utf-8')}".split("\n## ")
    runs = [text.partition("\n")[2].strip() + "\n" for text in sections if text.startswith(TRAINING)]
    if not runs:
        raise ValueError(f"{card} has no section {TRAINING!r}: it is no model of this program")
    return runs


def _seen(facts: Facts, trained: int) -> str:
    if not facts.preset.stages:
        passes = facts.tokens / trained
        return f"Tokens seen: {facts.tokens:,}, which is {passes:.2f} passes over the {trained:,} training tokens."
    recall = sum(stage.share * stage.recall for stage in facts.preset.stages)
    return (
        f"Tokens seen in the last run: {facts.tokens:,}, of which {recall:.0%} are synthetic recall, and the rest text."
    )


def _runs(facts: Facts) -> list[str]:
    """A section for every training run, numbered if there are several."""
    runs = [*facts.initial_training, _training(facts)]
    names = [TRAINING] if len(runs) == 1 else [f"{TRAINING}, run {n} of {len(runs)}" for n in range(1, len(runs) + 1)]
    return [f"## {name}\n\n{run}" for name, run in zip(names, runs, strict=True)]


def _command(facts: Facts) -> str:
    name, rate = _preset_name(facts.preset), facts.preset.learning_rate
    changed = "" if name is None or rate == PRESETS[name].learning_rate else f" --learning-rate {rate}"
    if _ships(facts):  # NEW has prepared data and no other run's checkpoint
        options = f"--preset {SHIPPED} --initial DIR --run-dir NEW --tokens {facts.tokens} --seed {facts.seed}{changed}"
        return f'make train-demo ARGS="train {options}"'
    options = f"--tokens {facts.tokens}{changed}"
    return f'make train-demo FAMILY={facts.kind} PRESET={name or "NAME"} CORPUS=DIR ARGS="{options}"'


def _evaluation(facts: Facts) -> str:
    losses, context = facts.position_losses, facts.preset.context
    mean = sum(losses) / len(losses)
    edges = sorted({0, context // 16, *(context * i // BUCKETS for i in range(1, BUCKETS + 1))})
    rows = []
    for first, last in pairwise(edges):
        bucket = losses[first:last]
        rows.append([f"{first} to {last - 1}", f"{math.exp(sum(bucket) / len(bucket)):.2f}"])
    return f"""## Perplexity by position

On the held-out documents, windows of {context} tokens after `<|bos|>`: {math.exp(mean):.2f} per token overall.

{markdown_table(["position", "perplexity"], rows)}"""


def _length_section(table: str) -> str:
    return f"""## Perplexity by length and method

{TABLE_START}
{table}
{TABLE_END}
"""
