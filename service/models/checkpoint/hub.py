"""A check that a Hugging Face id can be loaded, once and before all other work. Paths that are no folders are refused.

transformers asks for every file of a model and tries each five times: a minute passes until it gives up.
"""

from __future__ import annotations

from pathlib import Path

import structlog
from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HFValidationError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # it misses in their __all__

ANSWER_S = 10.0
"""Longest wait for an answer of the hub."""

CONFIG = "config.json"
"""The file that every model has."""

log = structlog.get_logger()


class NotOnHub(LookupError):
    """No model of this id can be had; the message says why."""


def refuse_a_path(source: str) -> None:
    """Raises:
    NotOnHub: for a file, and for a path that no model of the hub can have as its id.
    """
    if Path(source).is_file():
        told = "GGUF files are not loaded: name" if source.lower().endswith(".gguf") else "name"
        raise NotOnHub(f"it is a file, and {told} the folder of the Hugging Face checkpoint")
    try:
        validate_repo_id(source)
    except HFValidationError as error:
        raise NotOnHub("this folder does not exist, and no Hugging Face id has this form") from error


def offline_copy(model_id: str, revision: str | None) -> Path | None:
    """The folder of this machine's copy, where the hub is off or out of reach; None where the hub has the model.

    Raises:
        NotOnHub: when the hub has no such model for this machine, or is out of reach and no copy exists.
    """
    try:
        copy = try_to_load_from_cache(model_id, CONFIG, revision=revision)
        if not constants.HF_HUB_OFFLINE:
            get_hf_file_metadata(hf_hub_url(model_id, CONFIG, revision=revision), timeout=ANSWER_S)
            return None
        why = "HF_HUB_OFFLINE forbids to download it"
    except GatedRepoError as error:
        raise NotOnHub("the hub asks for a key whose owner accepted its terms: set HF_TOKEN") from error
    except RevisionNotFoundError as error:
        raise NotOnHub(f"it has no revision {revision!r} (ROPEWAY_REVISION)") from error
    except RepositoryNotFoundError as error:
        raise NotOnHub("it is no folder, and the hub has no public model of this name") from error
    except EntryNotFoundError as error:
        raise NotOnHub(f"it has no {CONFIG}") from error
    except Exception as error:  # an answer of no use, or what the hub's own HTTP library raises without one
        why = f"{constants.ENDPOINT} is out of reach ({error or type(error).__name__})"
    if not isinstance(copy, str):
        raise NotOnHub(f"it is no folder, {why}, and this machine has no copy")
    log.warning("cached_copy_used", model=model_id, why=why)
    return Path(copy).parent
