"""Columns of tables: one schema per evaluation, whatever was measured."""

from __future__ import annotations

from types import NoneType
from typing import get_args

import pyarrow
import pytest
from pydantic import BaseModel

from tests.service.figures.examples import EVERY


def emptied(value: object) -> None:
    """Set every field inside ``value`` that may be None to None."""
    if isinstance(value, list):
        for item in value:
            emptied(item)
    elif isinstance(value, BaseModel):
        for name, field in type(value).model_fields.items():
            if NoneType in get_args(field.annotation):
                setattr(value, name, None)
            else:
                emptied(getattr(value, name))


@pytest.mark.parametrize("evaluation", EVERY)
def test_tables_of_one_evaluation_have_one_schema(evaluation: str) -> None:
    whole, empty = EVERY[evaluation](), EVERY[evaluation]()
    emptied(empty)
    tables = [whole.to_arrow(), empty.to_arrow()]
    assert pyarrow.null() not in tables[1].schema.types
    assert pyarrow.concat_tables(tables).num_rows == len(whole.rows()) + len(empty.rows())
    assert tables[0].schema.names[:3] == ["method", "model", "length"]


@pytest.mark.parametrize("evaluation", EVERY)
def test_only_declared_columns_are_ever_empty(evaluation: str) -> None:
    empty = EVERY[evaluation]()
    emptied(empty)
    assert {name for row in empty.rows() for name, value in row.items() if value is None} <= set(empty.optional)
