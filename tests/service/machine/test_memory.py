"""Free memory inside a container is what the container may still take."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
import torch

from service.machine import memory

GIB = 1 << 30


@pytest.fixture
def cgroups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(memory, "CGROUPS", tmp_path)
    return tmp_path


def second(folder: Path, limit: str) -> None:
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{GIB // 2}\n")
    (folder / "memory.stat").write_text(f"anon 12\nfile 99\ninactive_file {GIB // 8}\n")


def test_the_limit_of_a_container_counts(cgroups: Path) -> None:
    second(cgroups, str(GIB))
    assert memory.available_bytes() == min(psutil.virtual_memory().available, GIB // 2 + GIB // 8)


def test_the_first_version_of_control_groups_counts_too(cgroups: Path) -> None:
    (cgroups / "memory").mkdir()
    (cgroups / "memory/memory.limit_in_bytes").write_text(str(GIB))
    (cgroups / "memory/memory.usage_in_bytes").write_text(str(GIB // 4))
    (cgroups / "memory/memory.stat").write_text("total_inactive_file 4096\n")
    assert memory.available_bytes() == min(psutil.virtual_memory().available, GIB - GIB // 4 + 4096)


@pytest.mark.parametrize("limit", ["max", str(1 << 62), "nonsense"])
def test_without_a_limit_the_machine_counts(cgroups: Path, limit: str) -> None:
    second(cgroups, limit)
    available = psutil.virtual_memory().available
    assert memory.available_bytes() == pytest.approx(available, rel=0.2)


def test_a_container_that_is_full_has_nothing(cgroups: Path) -> None:
    second(cgroups, str(GIB // 4))
    assert memory.available_bytes() == 0


def test_free_memory_is_that_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 0 < memory.free_bytes(torch.device("cpu")) <= psutil.virtual_memory().total
    for name, value in (("mem_get_info", (100, 900)), ("memory_reserved", 70), ("memory_allocated", 30)):
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    free = memory.free_bytes(torch.device("cuda:0"))
    assert free == 100 + 70 - 30, "what torch keeps unused is free"
