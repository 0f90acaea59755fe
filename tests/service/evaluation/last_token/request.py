"""The body of the toy evaluation."""

from __future__ import annotations

from typing import Any, Literal

from service.evaluation.documents import DEFAULT_DOCUMENT
from service.evaluation.request import DocumentsRequest
from service.inputs import TextOrTokens


class LastTokenRequest(DocumentsRequest):
    """NLL of the last token of every length."""

    evaluation: Literal["last_token"] = "last_token"
    input: TextOrTokens = DEFAULT_DOCUMENT

    @classmethod
    def example(cls) -> dict[str, Any]:
        return {"lengths": [256, 512]}
