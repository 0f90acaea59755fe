"""The tokens that end an answer, as a checkpoint's files name them."""

from __future__ import annotations

from typing import Any


def refuse_ends_that_are_no_tokens(model: Any) -> None:
    """Raises:
    ValueError: when a file names an end that is no token id. The message names the file and the allowed form.
    """
    config = model.config.get_text_config()
    for file, holder in (("config.json", config), ("generation_config.json", model.generation_config)):
        eos = getattr(holder, "eos_token_id", None)
        listed = eos if isinstance(eos, list) else [] if eos is None else [eos]
        if any(type(token) is not int for token in listed):
            raise ValueError(f"its {file} has eos_token_id {eos!r}, which is neither a token id nor a list of them")
