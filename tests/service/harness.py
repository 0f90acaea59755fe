"""lm-evaluation-harness in this process: tasks from one folder, no network, no cache outside of it."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from torch.utils import collect_env

ROLLING = """
task: rolling
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{data}"}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list: [{{metric: word_perplexity}}, {{metric: byte_perplexity}}, {{metric: bits_per_byte}}]
metadata: {{version: 1.0}}
"""
"""A task over documents: {"text": ...}, one a line."""


@contextmanager
def offline(folder: Path) -> Iterator[None]:
    """Data sets come from ``folder`` alone, and the harness leaves the log levels as they were.

    It notes every installed package beside its results, by pip in another process.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name in ("HF_DATASETS_OFFLINE", "HF_HUB_OFFLINE"):
            patch.setenv(name, "1")
        import datasets

        patch.setattr(datasets.config, "HF_DATASETS_CACHE", folder / "cache")
        patch.setattr(collect_env, "get_pretty_env_info", lambda: "")
        levels = {name: logging.getLogger(name).level for name in ("lm_eval", "lm-eval")}
        yield
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)


def add_task(folder: Path, name: str, task: str, rows: list[dict[str, Any]]) -> None:
    """Write a task's definition and its data."""
    data = folder / f"{name}.jsonl"
    data.write_text("\n".join(json.dumps(row) for row in rows))
    (folder / f"{name}.yaml").write_text(task.format(data=data))


def evaluate(folder: Path, names: list[str], model: Any, **options: Any) -> dict[str, Any]:
    """All that the harness returns for these tasks of ``folder``."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(folder), include_defaults=False)
    found = simple_evaluate(model=model, tasks=names, task_manager=manager, bootstrap_iters=0, **options)
    assert found is not None
    return dict(found)
