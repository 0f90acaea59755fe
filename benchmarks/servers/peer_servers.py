"""Servers to compare, each a process with the same weights: Ropeway, llama.cpp and ``transformers serve``."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers import models as token_models
from transformers import PreTrainedTokenizerFast

from benchmarks.models import SHAPE_28M, llama, random_model
from benchmarks.paths import ROOT
from benchmarks.servers import load
from service.addresses import free_port

START_S = 120.0


@dataclass(frozen=True)
class Peer:
    """A running server. ``takes_ids`` is false if its prompts are texts."""

    name: str
    url: str
    pid: int
    model: str
    takes_ids: bool = True

    def cpu_s(self) -> float:
        """CPU time of the process and its children so far, user and system."""
        process = psutil.Process(self.pid)
        times = [each.cpu_times() for each in (process, *process.children(recursive=True))]
        return sum(time.user + time.system for time in times)


def write_model(folder: Path) -> None:
    """The checkpoint, its tokenizer and ``model.gguf``, all float32. Token 17 has the text ``<17>``."""
    from tests.service.export.gguf_files import write_gguf

    model = random_model(llama(**SHAPE_28M))
    model.save_pretrained(folder)
    vocab = {f"<{token}>": token for token in range(SHAPE_28M["vocab_size"])}
    tokenizer = Tokenizer(token_models.WordLevel(vocab, "<0>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    write_gguf(folder / "model.gguf", model, context_length=SHAPE_28M["max_position_embeddings"])


def missing() -> dict[str, str]:
    """Peers that cannot run here, with the reason."""
    found = {}
    if importlib.util.find_spec("xllamacpp") is None or importlib.util.find_spec("gguf") is None:
        found["llama.cpp"] = "skipped: pip install -c constraints.txt '.[llama-cpp]'"
    if importlib.util.find_spec("openai") is None:
        found["transformers serve"] = "skipped: pip install 'transformers[serving]'"
    return found


@contextmanager
def ropeway(folder: Path, threads: int, streams: int) -> Iterator[Peer]:
    """``ropeway serve`` with no setting but the model, the threads and room for the streams."""
    settings = {"model": folder, "port": 0, "threads": threads, "cache_tokens": 512 * streams}
    with load.server(settings, {"OMP_NUM_THREADS": str(threads)}) as served:
        yield Peer("Ropeway", served.url, served.pid, folder.name)


@contextmanager
def llama_cpp(folder: Path, threads: int, streams: int) -> Iterator[Peer]:
    """llama.cpp's server from the wheel ``xllamacpp``, in a Python process that only waits."""
    port = free_port()
    program = [sys.executable, "-m", "benchmarks.servers.peer_servers", str(folder / "model.gguf")]
    with _started([*program, *map(str, (port, threads, streams))], port, {}) as pid:
        yield Peer("llama.cpp", f"http://127.0.0.1:{port}", pid, "model")


@contextmanager
def transformers_serve(folder: Path, threads: int, streams: int) -> Iterator[Peer]:
    """``transformers serve --continuous-batching``, with blocks for the streams."""
    port = free_port()
    options = ["--continuous-batching", "--device", "cpu", "--cb-num-blocks", str(2 * streams)]
    program = [str(Path(sys.executable).with_name("transformers")), "serve", str(folder), "--host", "127.0.0.1"]
    environment = {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    with _started([*program, "--port", str(port), *options], port, environment) as pid:
        yield Peer("transformers serve", f"http://127.0.0.1:{port}", pid, str(folder), takes_ids=False)


STARTS: dict[str, Callable[[Path, int, int], AbstractContextManager[Peer]]] = {
    "Ropeway": ropeway,
    "llama.cpp": llama_cpp,
    "transformers serve": transformers_serve,
}


@contextmanager
def _started(command: Sequence[str], port: int, environment: dict[str, str]) -> Iterator[int]:
    """The process id of ``command`` once it answers on ``port``.

    Raises:
        RuntimeError: when it does not start; its output is the message.
    """
    with tempfile.TemporaryFile("w+") as log:
        running = subprocess.Popen(
            command, stdout=log, stderr=log, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)} | environment
        )
        try:
            _wait_until_ready(running, port, log)
            yield running.pid
        finally:
            running.terminate()
            try:
                running.wait(10)
            except subprocess.TimeoutExpired:
                running.kill()
                running.wait()


def _wait_until_ready(running: subprocess.Popen[bytes], port: int, log: Any) -> None:
    until = time.monotonic() + START_S
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    while running.poll() is None and time.monotonic() < until:
        try:
            with opener.open(f"http://127.0.0.1:{port}/health", timeout=5):
                return
        except OSError:
            time.sleep(0.2)
    log.seek(0)
    raise RuntimeError(f"{running.args}: the server did not start: {log.read()[-2000:]}")


def _serve_gguf(path: str, port: int, threads: int, streams: int) -> None:
    """llama.cpp's server until the process is ended."""
    import xllamacpp

    parameters = xllamacpp.CommonParams()
    parameters.model.path, parameters.port, parameters.hostnames = path, port, ["127.0.0.1"]
    parameters.n_parallel, parameters.n_ctx, parameters.warmup = streams, 512 * streams, False
    parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = threads
    server = xllamacpp.Server(parameters)
    assert server.listening_address
    while True:
        time.sleep(3600)


if __name__ == "__main__":
    _serve_gguf(sys.argv[1], *map(int, sys.argv[2:5]))
