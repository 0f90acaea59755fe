"""Serve's number of replicas by requests and jobs. No torch here: Serve's controller imports this."""

from __future__ import annotations

from typing import Any

JOBS = "unfinished_jobs"
"""Name of the number that each replica reports: unfinished jobs in the database that all share."""

POLICY = "service.scale.autoscaling:by_work"


def by_work(context: Any) -> tuple[float, dict[str, Any]]:
    """(replicas for all requests and jobs, no state) from Serve's ``AutoscalingContext``; a job counts as a request.

    Serve applies the bounds and delays of its configuration.
    """
    jobs = max(context.aggregated_metrics.get(JOBS, {}).values(), default=0)
    return (context.total_num_requests + jobs) / context.config.target_ongoing_requests, {}
