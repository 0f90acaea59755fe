"""The policies that calibrations of a tenant made, one per model."""

from __future__ import annotations

from datetime import UTC, datetime

from sqlalchemy.orm import Session

from service.jobs.database.statements import inserted
from service.jobs.database.tables import StoredPolicy
from service.policy.policy import Policy, parse_policy


def put(session: Session, tenant: str, policy: Policy) -> None:
    """Store ``policy`` in place of the tenant's last one for the same model."""
    values = {"tenant": tenant, "fingerprint": policy.fingerprint, "created_at": datetime.now(UTC)}
    values["policy"] = policy.model_dump(mode="json")
    session.execute(inserted(session, StoredPolicy, values, replaces=True))


def get(session: Session, tenant: str, fingerprint: str) -> Policy | None:
    """The tenant's policy for a model, None where there is none.

    Raises:
        InvalidPolicy: when this version cannot read it.
    """
    found = session.get(StoredPolicy, (tenant, fingerprint))
    return None if found is None else parse_policy(found.policy)


def drop(session: Session, tenant: str, fingerprint: str) -> bool:
    """Remove the tenant's policy for a model; false if there is none."""
    found = session.get(StoredPolicy, (tenant, fingerprint))
    if found is not None:
        session.delete(found)
    return found is not None
