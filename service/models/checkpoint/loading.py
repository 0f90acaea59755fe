"""From a Hugging Face id or folder to a model in memory."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import structlog
import torch
from transformers import AutoTokenizer, PreTrainedModel
from transformers.utils import logging as transformers_logging

from service.models import architecture
from service.models.checkpoint import configuration, hub
from service.models.checkpoint.division import arguments_of
from service.models.checkpoint.quantization import NotQuantized, Quantization, of_checkpoint, quantize
from service.models.checkpoint.reasons import reason_of
from service.models.checkpoint.text_model import class_for, drop_other_parts, forward
from service.models.linear.layers import use_fastest
from service.models.memory import huge_pages
from service.models.text.chat import TemplateUnusable, use_template
from service.models.text.ends import refuse_ends_that_are_no_tokens
from service.models.text.response_templates import use_response_template
from service.settings import Settings

log = structlog.get_logger()

DEMO = Path(__file__).parent.parent / "demo"

NO_TOKENIZER = "its files are missing or hold no words, such as tokenizer.json. Copy those of its base model"
OF_TOKENIZER = ("*token*", "vocab*", "*.model", "tekken*")
"""The refusal without a tokenizer's files, and their names."""


class ModelLoadError(RuntimeError):
    """The checkpoint cannot be loaded; the message says what was tried and why it failed."""


@dataclass(frozen=True)
class Checkpoint:
    """A loaded model with its tokenizer. Requests call it ``name``; ``base`` is the model of an adapter."""

    name: str
    model: PreTrainedModel
    tokenizer: Any
    base: str | None = None
    quantization: Quantization | None = None


def load(name: str, source: str | Path, settings: Settings) -> Checkpoint:
    """Load safetensors weights onto the configured device; no remote code. A model to quantize waits on the CPU.

    Raises:
        ModelLoadError: when the device or the chat template cannot be used. Also when the checkpoint is absent,
            damaged or of a kind that cannot be loaded.
    """
    device, is_folder = usable_device(settings), Path(source).is_dir()
    with _progress_bars(shown=not is_folder and settings.log_format == "console" and sys.stderr.isatty()):
        place, config = _configured(source, settings)
        with _blamed(source, "its tokenizer"):
            tokenizer = _tokenizer(place, settings.revision)
        with _blamed(source, "its weights"):
            model = _model(name, place, config, settings, device)
    with _blamed(source):
        refuse_ends_that_are_no_tokens(model)
    _set_template(tokenizer, settings)
    return Checkpoint(name, model.eval(), tokenizer, quantization=of_checkpoint(model))


def refuse_undivided(settings: Settings) -> None:
    """Refuse models that the ranks of a group cannot share, before any rank starts.

    Raises:
        ModelLoadError: naming the model and the number that has to be a multiple.
    """
    if settings.tensor_parallel > 1:
        for source in sources(settings).values():
            _, config = _configured(source, settings)
            with _blamed(source, "its weights"):
                arguments_of(config, settings.tensor_parallel)


def _configured(source: str | Path, settings: Settings) -> tuple[str | Path, Any]:
    """The place of the files, which is a copy of the hub's if there is one, and the configuration there."""
    architecture.register()
    is_folder = Path(source).is_dir()
    with _blamed(source):
        if not is_folder:
            hub.refuse_a_path(str(source))
    with _blamed(source, "the hub"):
        copy = None if is_folder else hub.offline_copy(str(source), settings.revision)
    with _blamed(source):
        if is_folder:
            configuration.refuse_without(Path(source))
    place = copy or source
    with _blamed(source, "its config.json"):
        return place, configuration.read(place, settings.revision)


def _tokenizer(place: str | Path, revision: str | None) -> Any:
    """Raises:
    ValueError: when its files are missing. For some models, transformers makes an empty one then.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(place, revision=revision, trust_remote_code=False)
    except Exception:
        if Path(place).is_dir() and not any(file for form in OF_TOKENIZER for file in Path(place).glob(form)):
            raise ValueError(NO_TOKENIZER) from None
        raise
    if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):
        raise ValueError(NO_TOKENIZER)
    return tokenizer


def _model(name: str, place: str | Path, config: Any, settings: Settings, device: torch.device) -> PreTrainedModel:
    """The model of this configuration with the weights of its files.

    Raises:
        ValueError: when transformers has no such model, or the files do not have its weights.
    """
    is_quantized = getattr(config, "quantization_config", None) is not None
    shared_out = arguments_of(config, settings.tensor_parallel)
    with _without_the_report():
        loaded: Any = class_for(config).from_pretrained(
            place,
            revision=settings.revision,
            trust_remote_code=False,
            dtype=dtype_of(settings, device),
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are refused below, by name
            device_map={"": device} if is_quantized else None,  # such weights may not move later
            **shared_out,
        )
    model: Any = loaded[0]
    report: dict[str, Any] = loaded[1]
    _refuse_weights_that_are_not_there(report)
    _tell_of_weights_left_out(name, report)
    drop_other_parts(model)
    if is_quantized:
        forward(model)  # compressed-tensors decompresses its weights in the first one
    elif settings.quantization is None and not shared_out:
        model.to(device)
        use_fastest(model)  # it packs weights from the file itself
        huge_pages.move(model)
    loaded_model: PreTrainedModel = model
    return loaded_model


@contextmanager
def _without_the_report() -> Iterator[None]:
    """Keep transformers' table of missing, other and unexpected weights out of the log: our own lines name them.

    A table of failed conversions stays, since the error that follows refers to it.
    """

    def is_news(record: logging.LogRecord) -> bool:
        told = record.getMessage()
        return "LOAD REPORT" not in told or "CONVERSION" in told

    logger = logging.getLogger("transformers.modeling_utils")
    logger.addFilter(is_news)
    try:
        yield
    finally:
        logger.removeFilter(is_news)


def quantized(checkpoint: Checkpoint, settings: Settings) -> Checkpoint:
    """The checkpoint on the configured device, with linear layers in the bits of the settings if they name any.

    Raises:
        ModelLoadError: when the model, the device or the installation cannot be used in this way.
    """
    if settings.quantization is None:
        return checkpoint
    try:
        quantization = quantize(checkpoint.model, settings.quantization, usable_device(settings))
    except NotQuantized as error:
        raise ModelLoadError(f"ROPEWAY_QUANTIZATION: model {checkpoint.name!r}: {error}") from error
    return replace(checkpoint, quantization=quantization)


@contextmanager
def _blamed(source: str | Path, part: str = "") -> Iterator[None]:
    """Raises:
    ModelLoadError: for whatever is raised inside, with the setting, the model and the part at fault, in one line.
    """
    try:
        yield
    except Exception as error:  # a damaged file fails in as many ways as there are readers
        told = f"{part}: {reason_of(error)}" if part else reason_of(error)
        raise ModelLoadError(f"ROPEWAY_MODEL: model {str(source)!r} cannot be loaded: {told}") from error


def _refuse_weights_that_are_not_there(report: dict[str, Any]) -> None:
    """Raises:
    ValueError: when a tensor of the model is not in the files or has another shape there. Otherwise transformers would
        go on with random numbers.
    """
    wrong = [f"{name} is {list(there)}, not {list(here)}" for name, there, here in report["mismatched_keys"]]
    wrong = sorted([*wrong, *(f"{name} is missing" for name in report["missing_keys"])])
    if wrong:
        raise ValueError(f"{len(wrong)} tensors are not as config.json says, the first: {wrong[0]}")


def _tell_of_weights_left_out(name: str, report: dict[str, Any]) -> None:
    """Warn of tensors in the files that the model has no place for, beside those that transformers knows to ignore.

    Heads for the prediction of several tokens are such. So are the layers beyond a wrong ``num_hidden_layers``.
    """
    left_out = sorted(report["unexpected_keys"])
    if left_out:
        log.warning("weights_left_out", model=name, tensors=len(left_out), first=left_out[:3])


def _set_template(tokenizer: Any, settings: Settings) -> None:
    if settings.chat_template is not None:
        try:
            use_template(tokenizer, settings.chat_template)
        except TemplateUnusable as error:
            raise ModelLoadError(f"ROPEWAY_CHAT_TEMPLATE: {error}") from error
    try:
        use_response_template(tokenizer, settings.response_template)
    except TemplateUnusable as error:
        raise ModelLoadError(f"ROPEWAY_RESPONSE_TEMPLATE: {error}") from error


@contextmanager
def _progress_bars(*, shown: bool) -> Iterator[None]:
    """transformers' and the hub's bars, on or off inside."""
    if shown:
        yield
        return
    was_on = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_on:
            transformers_logging.enable_progress_bar()


def sources(settings: Settings) -> dict[str, str | Path]:
    """Served name -> where to load it from, the default model first: one model, or all models of a folder.

    Raises:
        ModelLoadError: for a revision of a folder, which has none.
    """
    path = DEMO if settings.model == "demo" else Path(settings.model)
    if not path.is_dir():
        return {settings.model: settings.model}
    if settings.revision is not None:
        raise ModelLoadError(f"ROPEWAY_REVISION: only models of the hub have revisions, and {settings.model!r} is here")
    if not (path / "config.json").exists():
        inside = sorted(path.glob("*/config.json"))
        if inside:
            return {config.parent.name: config.parent for config in inside}
    return {path.resolve().name: path}


def usable_device(settings: Settings) -> torch.device:
    """The configured device, after a tensor was put there.

    On CUDA, attention by cuDNN goes off: it plans each shape anew, and every decode step has other ones.

    Raises:
        ModelLoadError: when torch does not know it or this machine does not have it.
    """
    try:
        device = torch.device(device_of(settings))
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).partition("\n")[0].rstrip(".")
        raise ModelLoadError(
            f"ROPEWAY_DEVICE: {settings.device!r} cannot be used: {reason} (torch {torch.__version__})"
        ) from error
    if device.type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)
    return device


def device_of(settings: Settings) -> str:
    if settings.device != "auto":
        return settings.device
    return "cuda" if torch.cuda.is_available() else "cpu"


def dtype_of(settings: Settings, device: torch.device) -> torch.dtype:
    if settings.dtype == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[settings.dtype]
