"""``python -m service.models.training``: prepare the data, train the demo models, write their cards.

The default is to train the families that ship; ``--model`` names others, and ``--output`` their folder. On Linux, set
GLIBC_TUNABLES=glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=4294967296 in the environment. Training on a CPU is
then 10 to 20 % faster, because large buffers stay mapped, in large pages.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Literal

import torch
import typer
from tokenizers import Tokenizer
from tqdm import tqdm

from service.models.training import card as model_card
from service.models.training.corpus import (
    CorpusError,
    Document,
    PackedTokens,
    fingerprint_of_tokens,
    heldout_names,
    pack,
    read_folder,
    read_records,
    read_standard_library,
)
from service.models.training.curriculum import Curriculum, Stage
from service.models.training.preparation import TOKENIZER, tokenizer_for
from service.models.training.shape import (
    FAMILIES,
    KINDS,
    PRESETS,
    Model,
    Preset,
    initial_model,
    model_config,
    new_model,
    save_folder,
    served_name,
)
from service.models.training.tokenizer import load_tokenizer, special_ids
from service.models.training.train import (
    FINAL_ROWS,
    CheckpointMismatch,
    OnStep,
    Run,
    measure_steps,
    position_losses,
    seams,
)
from service.models.training.train import train as train_model

DEMO = Path(__file__).parents[1] / "demo"

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__, pretty_exceptions_enable=False)

Corpus = Annotated[list[Path], typer.Option(exists=True, file_okay=False, help="Folder of text files; repeatable.")]
Licence = Annotated[list[str], typer.Option(help="Licence of each --corpus, for the card; in the same order.")]
Stdlib = Annotated[bool, typer.Option("--stdlib", help="Add the standard library's sources, but not pydoc_data.")]
Heldout = Annotated[list[str], typer.Option(help="Name of a document to hold out; repeatable.")]
Fraction = Annotated[float, typer.Option(min=0.0, max=0.9, help="Share of documents to hold out if none is named.")]
RunDir = Annotated[Path, typer.Option(help="Tokenizer, packed tokens, checkpoints and logs.")]
Size = Annotated[str, typer.Option("--preset", help=f"One of {', '.join(PRESETS)}.")]
LearningRate = Annotated[float | None, typer.Option(min=1e-8, max=1.0, help="Peak rate; default: the preset's.")]
Seed = Annotated[int, typer.Option(help="Of the split, the weights and the data order.")]
Kinds = Annotated[list[str], typer.Option(help=f"One of {', '.join(FAMILIES)}; repeatable, default: those that ship.")]
Tokens = Annotated[int | None, typer.Option(min=1, help="Tokens to train on; default: the preset's.")]
Minutes = Annotated[float | None, typer.Option(min=0.1, help="Instead of --tokens: measure, then fill this time.")]
Threads = Annotated[int | None, typer.Option(min=1, help="CPU threads; default: torch's.")]
Precision = Annotated[
    Literal["bf16", "fp32"],
    typer.Option(help="bf16 is autocast over float32 weights; fp32 is faster on a CPU without bf16 instructions."),
]
Checkpoint = Annotated[float, typer.Option(min=0.0, help="Minutes between checkpoints.")]
Output = Annotated[Path, typer.Option(help="Folder that receives one Hugging Face folder per model.")]
Initial = Annotated[
    Path | None,
    typer.Option(exists=True, file_okay=False, help="Folder of trained models to go on from: an earlier --output."),
]


@app.command()
def prepare(  # noqa: PLR0913  a command's options
    corpus: Corpus = [],  # noqa: B006  typer copies it
    licence: Licence = [],  # noqa: B006
    stdlib: Stdlib = False,
    heldout: Heldout = [],  # noqa: B006
    heldout_fraction: Fraction = 0.05,
    preset: Size = "cpu",
    seed: Seed = 0,
    run_dir: RunDir = Path("runs"),
) -> None:
    """Train the tokenizer and pack the tokens; files from an equal earlier call stay.

    A folder with checkpoints keeps its texts: other texts need another --run-dir.
    """
    size = _preset(preset)
    documents = _documents(corpus, licence, stdlib)
    try:
        held = heldout_names([document.name for document in documents], heldout, heldout_fraction, seed)
        tokenizer = tokenizer_for(documents, held, size, run_dir)
    except CorpusError as error:
        raise typer.BadParameter(str(error)) from error
    records = pack(documents, held, tokenizer, run_dir)
    trained = sum(record.tokens for record in records if not record.heldout)
    total = sum(record.tokens for record in records)
    typer.echo(f"{len(records)} documents, {trained:,} tokens to train on, {total - trained:,} held out")


@app.command()
def train(  # noqa: PLR0913  a command's options
    model: Kinds = list(KINDS),  # noqa: B006
    preset: Size = "cpu",
    tokens: Tokens = None,
    minutes: Minutes = None,
    learning_rate: LearningRate = None,
    seed: Seed = 0,
    threads: Threads = None,
    precision: Precision = "bf16",
    checkpoint_minutes: Checkpoint = 5.0,
    initial: Initial = None,
    run_dir: RunDir = Path("runs"),
    output: Output = DEMO,
) -> None:
    """Train the models one after the other on prepared data; the same command again resumes."""
    if threads is not None:
        torch.set_num_threads(threads)
    for kind in model:
        if kind not in FAMILIES:
            raise typer.BadParameter(f"{kind!r} is not one of {', '.join(FAMILIES)}")
    size = _preset(preset)
    if learning_rate is not None:
        size = replace(size, learning_rate=learning_rate)
    for kind in model:
        name = served_name(kind)
        begun = str(initial / name) if initial else ""
        run = Run(size, 0, seed, precision, run_dir / name, checkpoint_minutes, begun)
        try:
            _train_one(kind, run, run_dir, (tokens, minutes), output / name)
        except (CheckpointMismatch, CorpusError, ValueError, OSError) as error:
            raise typer.BadParameter(str(error)) from error


@app.command(name="all")
def prepare_and_train(  # noqa: PLR0913  a command's options
    corpus: Corpus = [],  # noqa: B006
    licence: Licence = [],  # noqa: B006
    stdlib: Stdlib = False,
    model: Kinds = list(KINDS),  # noqa: B006
    preset: Size = "cpu",
    tokens: Tokens = None,
    minutes: Minutes = None,
    learning_rate: LearningRate = None,
    threads: Threads = None,
    precision: Precision = "bf16",
    run_dir: RunDir = Path("runs"),
    output: Output = DEMO,
) -> None:
    """Everything, with the defaults of both steps: make train-demo ARGS="all --corpus DIR"."""
    prepare(corpus, licence, stdlib, preset=preset, run_dir=run_dir)
    train(model, preset, tokens, minutes, learning_rate, 0, threads, precision, run_dir=run_dir, output=output)


@app.command()
def card(
    model: Kinds = list(KINDS),  # noqa: B006
    run_dir: RunDir = Path("runs"),
    output: Output = DEMO,
) -> None:
    """Write the cards again from what the runs recorded; a table that was put in stays."""
    for kind in model:
        facts = model_card.Facts.load(run_dir / served_name(kind) / "facts.json")
        model_card.write_card(facts, output / served_name(kind) / "README.md")


@app.command()
def table(
    card_path: Annotated[Path, typer.Argument(exists=True, help="A model card.")],
    markdown: Annotated[Path, typer.Argument(exists=True, help="File with the table.")],
) -> None:
    """Put a perplexity-by-length table into a card."""
    model_card.insert_table(card_path, markdown.read_text(encoding="utf-8"))


def _preset(name: str) -> Preset:
    if name not in PRESETS:
        raise typer.BadParameter(f"{name!r} is not one of {', '.join(PRESETS)}")
    return PRESETS[name]


def _documents(corpus: list[Path], licence: list[str], stdlib: bool) -> list[Document]:
    if not corpus and not stdlib:
        raise typer.BadParameter("give at least one --corpus, or --stdlib")
    licences = [*licence, *["unspecified"] * (len(corpus) - len(licence))]
    try:
        documents = [document for pair in zip(corpus, licences, strict=True) for document in read_folder(*pair)]
    except (CorpusError, ValueError) as error:
        raise typer.BadParameter(str(error)) from error
    return documents + (read_standard_library() if stdlib else [])


def _train_one(kind: str, run: Run, run_dir: Path, budget: tuple[int | None, float | None], folder: Path) -> None:
    tokenizer_folder = run_dir / TOKENIZER
    if not (run_dir / "documents.json").exists():
        raise CorpusError(f"no prepared data in {run_dir}: run `prepare` first")
    tokenizer = load_tokenizer(tokenizer_folder)
    bos, eos = special_ids(tokenizer)
    heldout = PackedTokens(run_dir / "heldout.bin", bos, run.preset.context)
    run = replace(run, data=fingerprint_of_tokens(run_dir))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = model_config(kind, run.preset, tokenizer.get_vocab_size(), bos, eos)
    tokens, minutes = budget
    if minutes is None:
        steps = -(-(tokens or run.preset.tokens) // (run.preset.batch * run.preset.context))
    else:
        trial = _batches(run_dir, tokenizer, replace(run, steps=1))
        steps = _steps_for(minutes, new_model(config, run.seed, device), run, trial, run_dir / "steps.json")
    run = replace(run, steps=steps)
    model = initial_model(Path(run.initial), config, device) if run.initial else new_model(config, run.seed, device)
    batches = _batches(run_dir, tokenizer, run)
    progress = train_model(model, run, batches, heldout, _progress_bar(served_name(kind), run))
    with seams(model):
        losses = position_losses(model, heldout, FINAL_ROWS, run.precision).tolist()
    facts = model_card.Facts(
        kind=kind,
        preset=run.preset,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        steps=steps,
        seed=run.seed,
        precision=run.precision,
        seconds=progress.seconds,
        threads=torch.get_num_threads(),
        hardware=model_card.hardware(device),
        documents=read_records(run_dir),
        log=progress.log,
        position_losses=losses,
        initial=run.initial,
        initial_training=model_card.training_of(Path(run.initial)) if run.initial else [],
    )
    facts.save(run.folder / "facts.json")
    save_folder(model, tokenizer_folder, folder)
    model_card.write_card(facts, folder / "README.md")
    typer.echo(f"{folder}: validation loss {progress.log[-1].validation_loss:.3f}")


def _batches(run_dir: Path, tokenizer: Tokenizer, run: Run) -> Curriculum:
    preset = run.preset
    stages = preset.stages or (Stage(1.0, preset.context),)
    tokens = preset.batch * preset.context
    return Curriculum(run_dir / "train.bin", tokenizer, stages, tokens, run.steps, run.seed)


def _steps_for(minutes: float, model: Model, run: Run, data: Curriculum, path: Path) -> int:
    """Measured once and written down: every kind of the same size trains for the same number of steps."""
    preset = asdict(run.preset) | {"stages": [asdict(stage) for stage in run.preset.stages]}
    key = {"minutes": minutes, "preset": preset, "precision": run.precision}
    if path.exists():
        stored = json.loads(path.read_text(encoding="utf-8"))
        if stored["for"] == key:
            return int(stored["steps"])
    steps = measure_steps(model, run, data, minutes)
    path.write_text(json.dumps({"for": key, "steps": steps}), encoding="utf-8")
    return steps


def _progress_bar(name: str, run: Run) -> OnStep:
    per_step = run.preset.batch * run.preset.context
    bar = tqdm(total=run.steps * per_step, unit="tok", unit_scale=True, desc=name, mininterval=1.0)

    def on_step(step: int, loss: float) -> None:
        if bar.n == 0:  # a resumed run has not trained the first steps in this time
            bar.initial = bar.n = (step - 1) * per_step
        bar.set_postfix(loss=f"{loss:.3f}", step=step, refresh=False)
        bar.update(per_step)
        if step == run.steps:
            bar.close()

    return on_step


if __name__ == "__main__":
    sys.exit(app())
