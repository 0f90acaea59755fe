"""service/client/synchronous.py is generated from asynchronous.py.

Regenerate with: python -m tests.service.client.test_synchronous
"""

from __future__ import annotations

import re

from tests.conftest import ROOT

CLIENT = ROOT / "service/client"
SOURCE, GENERATED = CLIENT / "asynchronous.py", CLIENT / "synchronous.py"

TRANSLATIONS = (
    (r'^""".*"""', '"""The blocking client, generated from ``asynchronous.py``: edit that file."""'),
    ("import asyncio", "import time"),
    (r"asyncio\.sleep", "time.sleep"),
    ("AsyncGenerator, Callable,", "Callable, Generator,"),
    ("import aclosing", "import closing, nullcontext"),
    (r"aclosing\((EventSource\(.*\))\.aiter_sse\(\)\)", r"nullcontext(\1.iter_sse())"),
    ("import RECONNECT_S, Following, async_retrying", "import RECONNECT_S, Following, retrying"),
    (r"\b(async|await) ", ""),
    (r"\b(async_|a)(?=(retrying|closing|close|read)\b)", ""),
    (r"\bAsync(?=(Client|Generator|Ropeway)\b)", ""),
    (r"__a(enter|exit)__", r"__\1__"),
)
"""Patterns and replacements, applied in this order."""


def synchronous() -> str:
    text = SOURCE.read_text(encoding="utf-8")
    for pattern, replacement in TRANSLATIONS:
        text = re.sub(pattern, replacement, text)
    return text


def test_the_synchronous_client_is_current() -> None:
    assert GENERATED.read_text(encoding="utf-8") == synchronous()


if __name__ == "__main__":
    GENERATED.write_text(synchronous(), encoding="utf-8")
