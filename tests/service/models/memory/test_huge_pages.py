"""Weights move into huge pages with their values, their sharing and their addresses in line."""

from __future__ import annotations

import ctypes
import mmap
import re
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from service.models.memory import huge_pages
from tests.service.serving import wait_for

SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux is asked for huge pages")


def model() -> nn.ModuleDict:
    """Weights at odd addresses, as in a mapped safetensors file, and two that are one."""
    layers = nn.ModuleDict({"first": nn.Linear(700, 900), "second": nn.Linear(900, 700), "tied": nn.Linear(700, 900)})
    memory = torch.randn(1 + 700 * 900)
    layers["first"].weight.data = memory[1:].view(900, 700)
    layers["tied"].weight.data = layers["first"].weight.data
    return layers


def huge_bytes(*tensors: torch.Tensor) -> int:
    """Bytes in huge pages of the mappings that hold ``tensors``. Other mappings come and go with other tests."""
    found, inside = 0, False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        if mapping := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            start, stop = int(mapping[1], 16), int(mapping[2], 16)
            inside = any(start < one.data_ptr() + one.nbytes and one.data_ptr() < stop for one in tensors)
        elif inside and line.startswith("AnonHugePages:"):
            found += int(line.split()[1]) * 1024
    return found


def test_values_and_sharing_stay_and_addresses_are_aligned() -> None:
    moved = model()
    before = {name: weight.detach().clone() for name, weight in moved.named_parameters()}
    addresses = {weight.data_ptr() for weight in moved.parameters()}
    huge_pages.move(moved)
    for name, weight in moved.named_parameters():
        assert torch.equal(weight, before[name])
        assert weight.data_ptr() % huge_pages.LINE == 0
        assert weight.data_ptr() not in addresses
        assert weight.requires_grad
    assert moved["first"].weight.data_ptr() == moved["tied"].weight.data_ptr()
    assert moved["first"].weight.data_ptr() != moved["second"].weight.data_ptr()


def test_several_areas_keep_every_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "AREA", 1000)
    moved = model()
    before = {name: weight.detach().clone() for name, weight in moved.named_parameters()}
    huge_pages.move(moved)
    assert all(torch.equal(weight, before[name]) for name, weight in moved.named_parameters())


def test_weights_stay_where_memory_for_a_copy_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "available_bytes", lambda: 1000)
    stays = model()
    addresses = [weight.data_ptr() for weight in stays.parameters()]
    huge_pages.move(stays)
    assert [weight.data_ptr() for weight in stays.parameters()] == addresses


def test_weights_that_are_not_plain_stay() -> None:
    stays = nn.Linear(8, 8, device="meta")
    strided = nn.Linear(8, 8)
    strided.weight.data = strided.weight.data.t()
    address = strided.weight.data_ptr()
    huge_pages.move(nn.ModuleList([stays, strided]))
    assert stays.weight.is_meta
    assert strided.weight.data_ptr() == address
    assert not strided.weight.is_contiguous()


gives_huge_pages = pytest.mark.skipif(
    not SETTING.exists() or "[never]" in SETTING.read_text(encoding="utf-8"), reason="this kernel gives no huge pages"
)


@gives_huge_pages
def test_the_kernel_gives_huge_pages_to_new_memory_and_to_old() -> None:
    size = 32 * huge_pages.PAGE

    def new_is_huge() -> bool:
        """The kernel refuses for the moment while it has no whole page free."""
        moved = nn.Linear(size // 4 // 1024, 1024, bias=False)
        huge_pages.move(moved)
        return huge_bytes(moved.weight) >= size // 2

    wait_for(new_is_huge)
    old = torch.ones(size, dtype=torch.uint8)

    def old_is_huge() -> bool:
        """The kernel refuses for the moment while it cannot take pages out of use."""
        huge_pages.advise([(old.data_ptr(), size // 2), (old.data_ptr() + size // 2, size // 2)])
        return huge_bytes(old) >= size // 2

    wait_for(old_is_huge)
    assert bool((old == 1).all())


@gives_huge_pages
def test_a_neighbour_that_cannot_be_huge_costs_its_own_page_only(tmp_path: Path) -> None:
    """A file is mapped up to the middle of a page, where old memory begins."""
    page, size = huge_pages.PAGE, 32 * huge_pages.PAGE
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    room = mmap.mmap(-1, size + page, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    whole = torch.frombuffer(room, dtype=torch.uint8)
    first = -whole.data_ptr() % page
    old = whole[first + page // 2 : first + size].fill_(1)
    (tmp_path / "file").write_bytes(bytes(page))
    fixed = 0x10
    with (tmp_path / "file").open("rb") as file:
        start = whole.data_ptr() + first
        mapped = libc.mmap(start, page // 2, mmap.PROT_READ, mmap.MAP_PRIVATE | fixed, file.fileno(), 0)
    assert mapped == start

    def is_huge() -> bool:
        huge_pages.advise([(old.data_ptr(), old.nbytes)])
        return huge_bytes(old) >= size // 2

    wait_for(is_huge)
    assert bool((old == 1).all())
