"""Products of linear layers, kept in the database for servers with the same processor."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import structlog
from sqlalchemy import select

from service.jobs.database.opening import Database, StoreOutOfReach
from service.jobs.database.statements import inserted
from service.jobs.database.tables import KeptProducts

log = structlog.get_logger()


class ProductMemory:
    """A ``Memory`` of ``service.models.linear.known``. The first choices hold; ``anew`` replaces them once.

    Without an answer of the database, a server has its own choices. Its fingerprints then differ.
    """

    def __init__(self, database: Database, *, anew: bool = False) -> None:
        self._database, self._anew = database, anew
        self._replaced: set[str] = set()

    def read(self, names: Collection[str]) -> dict[str, Any]:
        wanted = set(names) & self._replaced if self._anew else set(names)
        try:
            with self._database.reading() as session:
                found = session.scalars(select(KeptProducts).where(KeptProducts.kind.in_(wanted)))
                return {kept.kind: kept.choices for kept in found}
        except StoreOutOfReach as error:
            log.warning("products_not_read", error=str(error))
            return {}

    def keep(self, choices: Mapping[str, Any]) -> dict[str, Any]:
        replaced = choices.keys() - self._replaced if self._anew else set()
        try:
            with self._database.writing() as session:
                for kind, choice in sorted(choices.items()):  # in one order, so no two servers wait for each other
                    values = {"kind": kind, "choices": choice}
                    session.execute(inserted(session, KeptProducts, values, replaces=kind in replaced))
            self._replaced |= replaced
        except StoreOutOfReach as error:
            log.warning("products_not_kept", error=str(error))
            return dict(choices)
        return {**choices, **self.read(choices)}
