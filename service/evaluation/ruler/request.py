"""The body of a RULER evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import Field, model_validator
from typing_extensions import override

from patches import examples, problem
from service.evaluation.documents import DEFAULT_DOCUMENT
from service.evaluation.request import DocumentsRequest, Seed
from service.evaluation.retrieval.request import NewTokens, Samples
from service.evaluation.ruler.niah import needs_documents
from service.evaluation.ruler.results import TaskName
from service.inputs import TextOrTokens

Frequency = Annotated[int, Field(ge=1, le=1000)]


class RulerRequest(DocumentsRequest):
    """RULER's synthetic tasks by length; several encodings in one call.

    A length counts the prompt, its BOS and the task's new tokens. Lengths double from the trained one up to 4 times it
    when absent. A task that exceeds the shortest length is refused with the length that it needs.
    """

    writes_prompts: ClassVar[bool] = True

    evaluation: Literal["ruler"] = "ruler"
    tasks: Annotated[list[TaskName], Field(min_length=1, max_length=64)] = Field(
        default_factory=lambda: list(get_args(TaskName)),
        description="Retrieval (niah_*), variable tracking (vt), common and frequent words (cwe, fwe); all if absent.",
    )
    input: TextOrTokens = Field(
        DEFAULT_DOCUMENT,
        description="Haystack of niah_single_2 and 3, niah_multikey_1, niah_multivalue and niah_multiquery.",
    )
    samples: Samples = Field(5, description="Prompts per task and length, the same at every length.")
    seed: Seed = Field(0, description="Seed of all random choices.")
    max_new_tokens: NewTokens | None = Field(
        None, description="Most tokens to generate; RULER's 128 (niah), 30 (vt), 120 (cwe) and 50 (fwe) when absent."
    )
    threshold: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.856, description="Average above which a length counts as effective: Llama-2-7B's at 4k in the paper."
    )
    vt_chains: Annotated[int, Field(ge=1, le=32)] = Field(1, description="vt: chains, one of which is asked for.")
    vt_hops: Annotated[int, Field(ge=0, le=64)] = Field(4, description="vt: assignments after a chain's first.")
    cwe_frequency: Frequency = Field(30, description="cwe: occurrences of each of the ten common words in the list.")
    cwe_uncommon_frequency: Frequency = Field(3, description="cwe: occurrences of every other word.")
    fwe_alpha: Annotated[float, Field(gt=1, le=4)] = Field(2.0, description="fwe: exponent of Zipf's law.")

    @classmethod
    @override
    def reads_documents(cls, fields: Mapping[str, Any]) -> bool:
        tasks = fields.get("tasks")
        return not isinstance(tasks, list) or any(isinstance(task, str) and needs_documents(task) for task in tasks)

    @model_validator(mode="after")
    def _common_words_are_more_common(self) -> Self:
        if self.cwe_uncommon_frequency >= self.cwe_frequency:
            why = f"must be below cwe_frequency ({self.cwe_frequency})"
            raise problem("too_large", why, "cwe_uncommon_frequency")
        return self

    @model_validator(mode="after")
    def _parameters_of_the_tasks(self) -> Self:
        for name, field in type(self).model_fields.items():
            task = name.partition("_")[0]
            if task in ("vt", "cwe", "fwe") and task not in self.tasks and getattr(self, name) != field.default:
                raise problem("without_effect", f"{name} has no meaning without the task {task}", name)
        return self

    def parameters(self) -> dict[str, Any]:
        """Those of single tasks that were asked for."""
        return {name: value for name, value in self if name.partition("_")[0] in self.tasks}

    @classmethod
    def example(cls) -> dict[str, Any]:
        return {
            "tasks": ["niah_single_1", "niah_single_2", "niah_multikey_2", "vt", "fwe"],
            "input": DEFAULT_DOCUMENT,
            "methods": examples(),
            "lengths": [512, 1024],
            "samples": 1,
            "max_new_tokens": 16,
        }
