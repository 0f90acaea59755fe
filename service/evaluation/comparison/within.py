"""The methods of one result beside the model's own encoding, as tables and pictures of that result show them."""

from __future__ import annotations

from service.evaluation.comparison.checks import COMPARABLE
from service.evaluation.comparison.comparing import compared
from service.evaluation.comparison.results import ComparisonResult
from service.evaluation.results import EvaluationResult
from service.evaluation.scores import Changes


def within(result: EvaluationResult) -> ComparisonResult | None:
    """``result`` compared with its own encoding, else with its first method.

    None for a single method, and for results without numbers by method and length.
    """
    if isinstance(result, ComparisonResult):
        return result
    if result.evaluation not in COMPARABLE or len(result.methods) < 2 or not result.scores().lengths():
        return None
    return compared([result], [""], [result.model])


def changes_of(result: EvaluationResult) -> Changes | None:
    """The table of ratios or differences beside the numbers of ``result``; None without partners."""
    comparison = within(result)
    return None if comparison is None else comparison.changes()
