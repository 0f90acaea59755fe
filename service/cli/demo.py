"""``ropeway demo``: serves the embedded models, sends requests, draws perplexity and recall by length."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from service.addresses import free_port
from service.cli.generate import panels, resolved_line
from service.cli.shared.client import client_of
from service.cli.shared.files import check_folder, picture, write
from service.cli.shared.measuring import show
from service.cli.shared.options import encodings
from service.cli.shared.progress import progress
from service.cli.shared.terminal import fail, loading, status, stdout
from service.evaluation.formatting import printable

if TYPE_CHECKING:
    from service.client import Progress, Result, Ropeway

START_S = 180
STOP_S = 30
PROMPT_FROM, PROMPT_CHARS = "The party from Uppercross", 1500
"""A passage of plain prose, several hundred tokens of the demo models: past the length they were trained at."""
ANSWER: dict[str, Any] = {"max_new_tokens": 48, "temperature": 0.7, "seed": 1}
"""Models of this size repeat themselves without sampling."""
STRIDE = 30_000
"""Six windows, spread over the default document."""
SAMPLES = 2
"""Ten passkeys at every length."""
ENCODINGS: dict[str, list[str]] = json.loads((Path(__file__).parent / "demo.json").read_text())
"""The encodings to compare, by route, in the short form."""


class DemoFailed(Exception):
    """A step of the demo failed; the message names it."""


def demo(
    output: Annotated[Path, typer.Option(help="Folder for the curve, the table and the server's log.")] = Path(
        "demo-output"
    ),
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the server; 0 takes a free one.")] = 0,
    model: Annotated[str, typer.Option(help="Model to serve; the embedded demo models by default.")] = "demo",
    stride: Annotated[int, typer.Option(min=1, help="Tokens from one scored window to the next.")] = STRIDE,
    samples: Annotated[int, typer.Option(min=1, help="Passkeys per length and depth.")] = SAMPLES,
) -> None:
    """Serve the demo models, generate under several encodings, measure perplexity and recall, draw both, stop."""
    from service.client import RopewayError

    check_folder("--output", output)
    began = time.perf_counter()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(1))  # stops the server then, too
    try:
        output.mkdir(parents=True, exist_ok=True)
        with _server(model, port, output / "server.log") as client:
            _answers(client)
            _curve(client, output, stride)
            _recall(client, output, samples)
    except (DemoFailed, RopewayError, OSError) as error:
        fail(f"{error or type(error).__name__} (the server's log: {output / 'server.log'})")
    stdout.print(f"server stopped cleanly; {time.perf_counter() - began:.0f} s in all")
    stdout.print("next: `make serve`, and a browser at localhost:8000, where the same is a page")


@contextmanager
def _server(model: str, port: int, log: Path) -> Iterator[Ropeway]:
    """A client of ``ropeway serve`` in a child process; SIGTERM stops it, SIGKILL if that fails."""
    port = port or free_port()
    url = f"http://127.0.0.1:{port}"
    flags = ["--model", model, "--host", "127.0.0.1", "--port", str(port)]
    command = [sys.executable, "-m", "service.cli", "serve", *flags]
    with log.open("wb") as sink, client_of(url) as client:
        process = subprocess.Popen(command, stdout=sink, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
        try:
            stdout.print(Text(f"ropeway serve --model {model} --port {port} (process {process.pid}, log {log})"))
            with loading(model):
                _wait_until_ready(process, client)
            yield client
            stop(process)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()


def _wait_until_ready(process: subprocess.Popen[bytes], client: Ropeway) -> None:
    from service.client import RopewayError

    began = time.monotonic()
    while time.monotonic() - began < START_S:
        if process.poll() is not None:
            raise DemoFailed(f"the server ended with exit code {process.returncode} while starting")
        with suppress(RopewayError):  # not listening yet, or not ready
            client.health()
            return
        time.sleep(0.1)
    raise DemoFailed(f"the server was not ready within {START_S} s")


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a server with SIGTERM.

    Raises:
        DemoFailed: when it does not stop in time or its exit code is not 0.
    """
    process.terminate()
    try:
        code = process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        raise DemoFailed(f"the server did not stop within {STOP_S} s of SIGTERM") from None
    if code != 0:
        raise DemoFailed(f"the server ended with exit code {code} after SIGTERM")


def _answers(client: Ropeway) -> None:
    """Four requests at once, each with its own encoding, on a prompt longer than the trained length."""
    prompt = _prompt()

    def request(fields: dict[str, Any]) -> Result:
        return client.generate(prompt, pe=fields, **ANSWER).results[0]

    names = ENCODINGS["generate"]
    methods = encodings(names) or []
    with status(f"POST /generate, {len(methods)} requests at once"), ThreadPoolExecutor(len(methods)) as pool:
        results = list(pool.map(request, methods))
    trained = client.models()[0].trained_length
    stdout.rule(Text(f"POST /generate: one prompt, {len(methods)} encodings, one batch"))
    tokens = results[0].usage.prompt_tokens
    stdout.print(Text(f"prompt: {tokens} tokens, trained length {trained}; it ends with", style="dim"))
    stdout.print(Text(f"...{printable(one_line(prompt[-160:]))}"))
    answers = zip(names, results, strict=True)
    stdout.print(panels([(name, one_line(result.text), resolved_line(result)) for name, result in answers]))


def _prompt() -> str:
    """A passage of the default document, up to the middle of a sentence."""
    from service.evaluation.documents import BUILT_IN, DEFAULT_DOCUMENT

    text = BUILT_IN[DEFAULT_DOCUMENT]()
    start = text.index(PROMPT_FROM)
    return text[start : text.rindex(" the ", start, start + PROMPT_CHARS) + len(" the")]


def one_line(text: str) -> str:
    """``text`` on one line: a failing model writes many empty ones."""
    return " ".join(text.split())


def _curve(client: Ropeway, output: Path, stride: int) -> None:
    """Measure, print and save perplexity from the trained length to eight times it.

    Every length predicts the same tokens, so that only the context differs.
    """
    from service.evaluation.tables import csv_of

    trained = client.models()[0].trained_length
    names = ENCODINGS["perplexity"]
    body: dict[str, Any] = {
        "methods": encodings(names),
        "lengths": [trained << step for step in range(4)],
        "protocol": "tail",
        "tail": trained * 3 // 4,
        "stride": stride,
    }
    stdout.rule(Text(f"POST /perplexity: {len(names)} encodings, {trained} to {trained << 3} tokens"))
    with progress() as shown:

        def update(scored: Progress) -> None:
            shown(scored.tokens_done, scored.tokens_total, scored.label)

        result = client.perplexity(**body, on_progress=update)
    show(result)
    for path in (output / "curve.png", output / "curve.html"):
        write(path, picture(result, path))
    write(output / "table.csv", csv_of(result).encode())
    write(output / "result.json", result.model_dump_json(indent=2).encode())
    files = "curve.png curve.html table.csv result.json"
    stdout.print(Text(f"scored in {result.seconds:.1f} s; saved in {output}: {files}"))


def _recall(client: Ropeway, output: Path, samples: int) -> None:
    """Hide passkeys from the trained length to four times it, and save the share found.

    A model whose trained length is shorter than the prompt's frame gets a line with the reason.
    """
    from service.client import RopewayError
    from service.evaluation.retrieval.results import DepthResult
    from service.figures.evaluations.retrieval import score_picture
    from service.figures.web.page import plot_page

    trained = client.models()[0].trained_length
    names = ENCODINGS["passkey"]
    lengths = [trained << step for step in range(3)]
    stdout.rule(Text(f"POST /passkey: {len(names)} encodings, {lengths[0]} to {lengths[-1]} tokens"))
    try:
        with status(f"POST /passkey, {len(names)} encodings"):
            result = client.evaluate("passkey", methods=encodings(names), lengths=lengths, samples=samples)
    except RopewayError as error:
        if error.status != HTTPStatus.BAD_REQUEST:
            raise
        stdout.print(Text(f"not measured: {error}"))
        return
    assert isinstance(result, DepthResult)
    show(result)
    drawn = score_picture(result)
    write(output / "recall.png", drawn.png())
    write(output / "recall.html", plot_page(drawn).encode())
    stdout.print(Text(f"saved in {output}: recall.png recall.html"))
