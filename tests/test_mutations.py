"""Mutations fit the sources: each finds its text once, and its tests exist."""

from __future__ import annotations

import pytest

from tests.conftest import ROOT
from tests.mutations import MUTATIONS
from tests.mutations.mutation import Mutation


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_its_text_and_its_tests_exist(mutation: Mutation) -> None:
    assert mutation.file(ROOT).is_file()
    for test in mutation.tests:
        file, *names = test.partition("[")[0].split("::")
        source = (ROOT / file).read_text(encoding="utf-8")
        assert all(f"def {name}(" in source or f"class {name}" in source for name in names), test
