"""The body of ``POST /sweep``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from patches import METHODS, KnownFields, examples, from_shorthand, problem, problems_of
from service.evaluation.catalogue import EVALUATIONS, IN_SWEEPS, union_of
from service.evaluation.request import ByLengthRequest, EvaluationRequest, Tokens
from service.inputs import MOST_ENCODINGS


def _named(part: Any) -> Any:
    """A part by its name alone is its default body."""
    return {"evaluation": part} if isinstance(part, str) else part


def _body(part: Any) -> Any:
    """The body of a part, with what a sweep sets in it; an unknown one as it is."""
    if not isinstance(part, str | Mapping | EvaluationRequest):
        raise problem("part", "must be the name of an evaluation, or an object")
    fields = _named(part)
    known = isinstance(fields, Mapping) and EVALUATIONS.get(str(fields.get("evaluation")))
    return known.request.in_sweep(fields) if known else fields


if TYPE_CHECKING:
    Part = EvaluationRequest
else:
    Part = Annotated[union_of(evaluation.request for evaluation in IN_SWEEPS), BeforeValidator(_body)]

THE_SWEEPS_OWN = ("model", "methods", "lengths", "stream", "background", "reuse", "timeout_s")


class Target(KnownFields):
    """The condition for an adequate method, relative to the checkpoint's own encoding within its trained length.

    A perplexity may be at most ``tolerance`` above it, a score at most ``tolerance`` below.
    """

    model_config = ConfigDict(allow_inf_nan=False)

    length: Tokens | None = Field(None, description="Tokens that the model is to read; the longest length when absent.")
    tolerance: Annotated[float, Field(ge=0, le=10)] = Field(
        0.1, description="Share by which a method may be worse than the checkpoint's own encoding."
    )


ANY_FACTOR = 2.0
"""All methods take it."""


def _default() -> list[Part]:
    first = IN_SWEEPS[0].request
    return [first.model_validate(first.in_sweep({}))]


class SweepRequest(EvaluationRequest):
    """Methods x factors x lengths x evaluations, and the best and the cheapest adequate method for a length."""

    writes_prompts: ClassVar[bool] = True

    evaluation: Literal["sweep"] = "sweep"
    factors: Annotated[list[Annotated[float, Field(ge=1)]], Field(min_length=1, max_length=64)] | None = Field(
        None, description="Every method that takes a `factor` is measured under each of these; others once."
    )
    evaluations: Annotated[list[Part], Field(min_length=1, max_length=16)] = Field(
        default_factory=_default,
        description="Names of other evaluations, or their bodies without model, methods and lengths.",
    )
    target: Target = Field(default_factory=Target)

    @model_validator(mode="before")
    @classmethod
    def _factors_stand_in(cls, fields: Any) -> Any:
        """A method without its factor gets the first of ``factors``, which ``expanded`` replaces by every one."""
        factors = fields.get("factors") if isinstance(fields, Mapping) else None
        methods = fields.get("methods") if isinstance(fields, Mapping) else None
        if not isinstance(factors, list) or not factors or not isinstance(methods, str | Mapping | list):
            return fields
        methods = methods if isinstance(methods, list) else [methods]
        return {**fields, "methods": [_with_factor(method, factors[0]) for method in methods]}

    @model_validator(mode="after")
    def _parts_leave_the_rest_to_the_sweep(self) -> Self:
        for index, part in enumerate(self.evaluations):
            own = [name for name in THE_SWEEPS_OWN if name in part.model_fields_set]
            if own:
                raise problem("not_here", f"{', '.join(own)} belong to the sweep itself", f"evaluations.{index}")
        if self.factors is not None and not any(_takes_factor(method) for method in self.methods):
            raise problem("without_effect", "none of the methods takes a factor", "factors")
        if self.count() > MOST_ENCODINGS:
            why = f"methods times factors are {self.count()}, and at most {MOST_ENCODINGS} are taken"
            raise problem("too_many", why, "factors" if self.factors else "methods")
        if self.factors is not None and any(_takes_factor(method) and method.follows for method in self.methods):
            why = "an encoding that repeats the numbers of an answer has its factor already"
            raise problem("without_effect", why, "factors")
        for index, factor in enumerate(self.factors or ()):
            try:
                self._under(factor)
            except ValidationError as error:
                raise problem("no_encoding", problems_of(error.errors())[0].message, f"factors.{index}") from error
        return self

    def texts(self) -> list[str | list[int]]:
        return [text for part in self.evaluations for text in part.texts()]

    @classmethod
    def placed(cls, documents: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
        """Documents belong to the parts of a sweep."""
        if not documents:
            return dict(fields)
        parts = fields.get("evaluations") or [IN_SWEEPS[0].name]
        named = [_named(part) for part in parts]
        reads = [_reads_documents(part) for part in named]
        if "short_documents" in documents and any(map(_skips, named)):
            return cls.placed(
                {name: value for name, value in documents.items() if name != "short_documents"},
                {**fields, "evaluations": [_skipping(part, documents["short_documents"]) for part in named]},
            )
        if not any(reads):  # the first part refuses them
            reads[0] = isinstance(named[0], Mapping)
        each = zip(named, reads, strict=True)
        return {**fields, "evaluations": [_with_documents(documents, part) if own else part for part, own in each]}

    @classmethod
    def unknown_field(cls, name: str) -> str:
        owners = [evaluation.name for evaluation in IN_SWEEPS if name in evaluation.request.field_names()]
        if not owners:
            return super().unknown_field(name)
        return f"unknown field: put it into a part, such as evaluations[0].{name} of {owners[0]}"

    @classmethod
    def example(cls) -> dict[str, Any]:
        lengths = {"lengths": [256, 512, 1024], "target": {"length": 1024}}
        return {"methods": examples()[:4], "factors": [4, 8], **lengths}

    def count(self) -> int:
        """Methods times factors, those that are equal counted too."""
        factors = 1 if self.factors is None else len(self.factors)
        return sum(factors if _takes_factor(method) else 1 for method in self.methods)

    def expanded(self) -> list[Any]:
        """The methods under every factor, each encoding once, in the order of the request."""
        if self.factors is None:
            return list(dict.fromkeys(self.methods))
        by_factor = zip(*map(self._under, self.factors), strict=True)
        return list(dict.fromkeys(method for same in by_factor for method in same))

    def _under(self, factor: float) -> list[Any]:
        """The methods, those that take a factor with this one.

        Raises:
            ValidationError: for a factor that a method does not take.
        """
        return [_with_own_factor(method, factor) if _takes_factor(method) else method for method in self.methods]


def _reads_documents(part: Any) -> bool:
    known = EVALUATIONS.get(str(part.get("evaluation"))) if isinstance(part, Mapping) else None
    return known is not None and known.request.reads_documents(part)


def _skips(part: Any) -> bool:
    """True for a part that may skip short documents; others take a stretch of any."""
    known = EVALUATIONS.get(str(part.get("evaluation"))) if isinstance(part, Mapping) else None
    return known is not None and issubclass(known.request, ByLengthRequest)


def _skipping(part: Any, short: Any) -> Any:
    return {"short_documents": short, **part} if _skips(part) else part


def _with_documents(documents: Mapping[str, Any], part: Mapping[str, Any]) -> dict[str, Any]:
    """``part`` with ``documents``, whose names are not those of an input of the part."""
    unnamed = {"names": None} if "input" in part else {}
    return {**documents, **unnamed, **part}


def _with_factor(given: Any, factor: Any) -> Any:
    """``given`` with ``factor`` where its method requires one and has none; anything else as it is."""
    try:
        fields = from_shorthand(given) if isinstance(given, str) else given
    except ValueError:
        return given
    name = fields.get("method") if isinstance(fields, Mapping) else None
    field = METHODS[name].model_fields.get("factor") if isinstance(name, str) and name in METHODS else None
    if field is None or "factor" in fields:
        return given
    try:
        METHODS[str(name)].model_validate({**fields, "factor": factor})
    except ValidationError:  # the error is that of ``factors``
        factor = ANY_FACTOR
    return {**fields, "factor": factor}


def _with_own_factor(method: Any, factor: float) -> Any:
    return type(method).model_validate({**method.as_request(), "factor": factor})


def _takes_factor(method: Any) -> bool:
    return "factor" in type(method).model_fields
