"""Sentences of docstrings, comments, messages and Markdown, and the rules of plain English (CONTRIBUTING.md)."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path

LONGEST = 20
"""Words in a sentence."""

WHAT_CLAUSE = re.compile(r"(What|Which|Where|How|Whether|Who|Whoever|Whose|That|Why)\b[^?]*$")
BANNED = re.compile(
    r"\b(stands?|standing on|tells?|told|whoever|somebody|of (its|their|his|our) own|lets? go|amounts? to)\b",
    re.IGNORECASE,
)
ABBREVIATION = re.compile(r"\b(e\.g|i\.e|vs|Eq|et al|Sec|cf)\.")
QUOTED = (
    *("The best thing to do in San Francisco", "According to the chain(s) of variable assignment"),  # published prompts
    *("q - j mod S", "amber ample", "acorn anchor", "import sys", "local time"),  # a formula, lists of words, programs
)
"""Beginnings of strings whose words are not ours, or that are no sentences."""
BLOCK_END = re.compile(r"<br>|\n\s*\n|\n\s*(?:[-*|#]|\d+[.)])\s|\|")
SENTENCE_END = re.compile(r'(?<=[.!?:;])\s+(?=[A-Z0-9"`*([])')


def sentences(text: str) -> Iterator[str]:
    """Sentences of paragraphs, list items and table cells, without bold; code in backquotes reads as one word."""
    text = re.sub(r"\]\([^)]*\)|\*\*", "", re.sub(r"``[^`]*``|`[^`]*`", "CODE", text))
    text = ABBREVIATION.sub(r"\1", text)
    for block in BLOCK_END.split(re.sub(r"\n\s*Raises:", ". ", text)):
        yield from filter(None, SENTENCE_END.split(" ".join(block.split())))


def fault(sentence: str) -> str | None:
    """The rule that ``sentence`` breaks."""
    if WHAT_CLAUSE.match(sentence):
        return "opens with a what clause"
    if banned := BANNED.search(sentence):
        return f"says {banned[0]!r}"
    words = len(re.findall(r"\b(?!CODE\b)[A-Za-z][\w'-]*", sentence))
    return f"has {words} words" if words > LONGEST else None


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """(line, text) of every docstring and comment of a Python file, or of every paragraph of a Markdown file."""
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        without_code = re.sub(r"```.*?```", lambda code: "\n" * code[0].count("\n"), source, flags=re.DOTALL)
        line = 1
        for paragraph in re.split(r"(\n\s*\n)", without_code):
            yield line, paragraph
            line += paragraph.count("\n")
        return
    for node in ast.walk(ast.parse(source)):
        text = node.value if isinstance(node, ast.Expr) else None
        if isinstance(text, ast.Constant) and isinstance(text.value, str):
            yield text.lineno, text.value
    yield from comments(source)


def strings(path: Path) -> Iterator[tuple[int, str]]:
    """(line, text) of every string of a Python file that is no docstring: messages, descriptions, notes."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    read = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    read |= {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            parts = (str(part.value) if isinstance(part, ast.Constant) else "CODE" for part in node.values)
            yield node.lineno, "".join(parts)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in read:
            yield node.lineno, node.value


def configuration(path: Path) -> Iterator[tuple[int, str]]:
    """(line, comment) of a file whose comments begin with #: TOML, YAML, make, Docker, environment."""
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if comment := re.search(r"(?:^|\s)#+ (.*)", line):
            yield number, comment[1]


def comments(source: str) -> Iterator[tuple[int, str]]:
    """(line, text) of the comments; those on lines that follow each other are one."""
    start, text, last = 0, "", -1
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT or re.match(r"#\s*(noqa|type:|fmt:)", token.string):
            continue
        line = token.start[0]
        if line != last + 1:
            yield start, text
            start, text = line, ""
        text, last = f"{text}\n{token.string.lstrip('# ')}", line
    yield start, text


def faults(path: Path, texts: Iterable[tuple[int, str]]) -> Iterator[str]:
    """One line for every sentence of ``texts``, (line, text) of ``path``, that breaks a rule."""
    for line, text in texts:
        for sentence in sentences(text):
            if not sentence.startswith(QUOTED) and (broken := fault(sentence)):
                yield f"{path}:{line}: {broken}: {sentence[:120]}"
