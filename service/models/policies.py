"""Policies of served models: read at start-up, checked against the model, or made by the rule."""

from __future__ import annotations

from pathlib import Path

import structlog

from patches import Method, label_of, ranges_by_rule
from service.models.registry import ModelRegistry, ServedModel
from service.policy.auto import Auto, Origin, Range
from service.policy.policy import InvalidPolicy, Policy

log = structlog.get_logger()


def auto_by_rule(served: ServedModel) -> Auto:
    """The method of ``auto`` for a model without a policy."""
    by_rule = ranges_by_rule(served.patch.geometry)
    ranges = tuple(Range(up_to=up_to, pe=method) for up_to, method in by_rule)
    return Auto(ranges=ranges, origin=Origin(source="rule"))


def check_policy(policy: Policy, served: ServedModel, models: ModelRegistry) -> None:
    """Raises:
    InvalidPolicy: when the policy is another model's, or an encoding does not fit this one.
    """
    if policy.fingerprint != served.contents:
        raise InvalidPolicy(
            f"fingerprint: the policy is for the model {policy.model!r} with {policy.fingerprint}, "
            f"and {served.name!r} has {served.contents}"
        )
    if policy.trained_length != served.trained_length:
        raise InvalidPolicy(
            f"trained_length: {policy.trained_length} in the policy, {served.trained_length} for {served.name!r}"
        )
    check_ranges(policy.ranges, served, models)


def check_ranges(ranges: tuple[Range, ...], served: ServedModel, models: ModelRegistry) -> None:
    """Every encoding must fit the model at both ends of its range, and must be answered by its weights.

    Raises:
        InvalidPolicy: naming the first range that does not.
    """
    shortest = 1
    for index, found in enumerate(ranges):
        longest = found.up_to or max(served.max_length, shortest)
        try:
            check_weights(found.pe, served, models)
            for length in (shortest, longest):
                served.patch.resolve(found.pe, length)
        except ValueError as error:
            raise InvalidPolicy(f"ranges.{index}.pe: {error}") from error
        shortest = longest + 1


def out_of_reach(length: int, served: ServedModel) -> list[str]:
    """The caution about a length that is measured, and that no request to generate has; none within the maximum."""
    most = served.max_length
    if length <= most:
        return []
    return [
        f"Requests to generate have at most {most:,} tokens here; {length:,} need a larger ROPEWAY_MAX_LENGTH or cache."
    ]


def check_weights(method: Method, served: ServedModel, models: ModelRegistry) -> None:
    """Raises:
    InvalidPolicy: when a variant of ``served`` answers under ``method``, with other weights.
    """
    answers = models.for_method(served, method)
    if answers is not served:
        raise InvalidPolicy(f"{answers.name!r} answers under {label_of(method)}: add use_variant false")


def assign_policies(policies: dict[Path, Policy], models: ModelRegistry) -> None:
    """Give the operator's policies to the served models, by the hash of configuration and weights.

    Raises:
        InvalidPolicy: when a policy names a served model with other weights, does not fit or is a second one. Also
            when no policy is for a served model.
    """
    for file, policy in policies.items():
        owners = [served for served in models if served.contents == policy.fingerprint]
        owners = owners or [served for served in models if served.name == policy.model]
        if not owners and len(policies) > 1:
            log.warning("policy_unused", file=str(file), model=policy.model)
        for served in owners or ([models.default] if len(policies) == 1 else []):
            try:
                check_policy(policy, served, models)
            except InvalidPolicy as error:
                raise InvalidPolicy(f"ROPEWAY_POLICY: {file}: {error}") from error
            if served.policy is not None:
                raise InvalidPolicy(f"ROPEWAY_POLICY: {file}: {served.name!r} has a policy from another file already")
            served.policy = policy
    if policies and all(served.policy is None for served in models):
        raise InvalidPolicy(f"ROPEWAY_POLICY: none of the {len(policies)} policies is for a served model")
