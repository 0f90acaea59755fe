"""Weights move into huge pages with their values, their sharing and their addresses in line."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from service.models import huge_pages
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


def huge_bytes() -> int:
    found = re.search(r"AnonHugePages:\s+(\d+) kB", Path("/proc/self/smaps_rollup").read_text(encoding="utf-8"))
    assert found is not None
    return int(found[1]) * 1024


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


@pytest.mark.skipif(
    not SETTING.exists() or "[never]" in SETTING.read_text(encoding="utf-8"), reason="this kernel gives no huge pages"
)
def test_the_kernel_gives_huge_pages_to_new_memory_and_to_old() -> None:
    size = 32 * huge_pages.PAGE
    moved, before = nn.Linear(size // 4 // 1024, 1024, bias=False), huge_bytes()
    huge_pages.move(moved)
    after_moving = huge_bytes()
    assert after_moving - before >= size // 2
    old = torch.ones(size, dtype=torch.uint8)

    def is_huge() -> bool:
        """The kernel refuses for the moment while it cannot take pages out of use."""
        huge_pages.advise([(old.data_ptr(), size // 2), (old.data_ptr() + size // 2, size // 2)])
        return huge_bytes() - after_moving >= size // 2

    wait_for(is_huge)
    assert bool((old == 1).all())
