"""The file of keys by itself: its commands, its names, and its second reading."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from service.api.http import access, key_file
from service.api.http.access import ApiKeys
from service.api.http.key_file import hash_of
from service.cli.commands import app as ropeway


def test_what_cannot_be_a_file_of_keys_is_left_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "keys"
    file.write_text("a shopping list")
    for command in (["new", "ann"], ["list"], ["revoke", "ann"]):
        refused = CliRunner().invoke(ropeway, ["keys", *command, "--file", str(file)])
        assert (refused.exit_code, refused.stdout) == (1, "")
        assert "line 1: not a SHA-256" in " ".join(refused.stderr.split())
    assert file.read_text() == "a shopping list"
    assert CliRunner().invoke(ropeway, ["keys", "list"]).exit_code == 2, "no file is named"
    monkeypatch.setenv("ROPEWAY_API_KEYS_FILE", str(tmp_path / "absent"))
    assert "cannot be read" in CliRunner().invoke(ropeway, ["keys", "list"]).stderr


def test_a_file_of_keys_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    file = tmp_path / "absent" / "keys"
    refused = CliRunner().invoke(ropeway, ["keys", "new", "ann", "--file", str(file)])
    assert (refused.exit_code, refused.stdout) == (1, "")
    assert refused.stderr.replace("\n", "") == f"error: {file}: No such file or directory"


def test_names_that_occur_twice_are_told_apart_by_their_hashes(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    first, second = "a" * 64, "ab" * 32
    file.write_text(f"# two of one name\n{first}  # ann\n\n{second}  # 2026-01-02 ann")
    assert [(str(key.created), key.name) for key in key_file.read(file)] == [("None", "ann"), ("2026-01-02", "ann")]
    with pytest.raises(key_file.UnknownKey, match="2 keys"):
        key_file.revoke(file, "ann")
    assert key_file.revoke(file, "ABABAB").digest == second
    assert file.read_text() == f"# two of one name\n{first}  # ann\n\n"


def test_two_threads_at_a_changed_file_both_see_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "keys"
    file.write_text("")
    keys = ApiKeys([], file)
    file.write_text(hash_of("new-key"))
    read, found = access.read_hashes, []

    def slowly(path: Path) -> tuple[str, ...]:
        monkeypatch.setattr(access, "read_hashes", read)
        found.append(keys.tenant_of(["new-key"]))  # as another thread, while this one reads
        return read(path)

    monkeypatch.setattr(access, "read_hashes", slowly)
    assert keys.tenant_of(["new-key"]) == hash_of("new-key")[:16]
    assert found == [hash_of("new-key")[:16]]
