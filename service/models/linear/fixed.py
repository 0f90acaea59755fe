"""Weights of linear layers whose memory has a layout for products alone."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, Self

import torch
from torch.utils._pytree import tree_map_only

FIXED = "a weight in this layout is fixed: the layer needs another one"


class FixedWeight(torch.Tensor):
    """A weight [out_features, in_features] in another layout than by rows.

    Operations of torch get a plain copy, made for each. None may write into it.
    """

    @abstractmethod
    def plain(self) -> torch.Tensor:
        """A copy by rows."""

    @abstractmethod
    def again(self) -> Self:
        """Another tensor with the same memory."""

    @property
    def data(self) -> Self:
        return self.detach()  # type: ignore[return-value]

    @data.setter
    def data(self, other: torch.Tensor) -> None:
        raise TypeError(FIXED)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # its numbers are fixed

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            return args[0].again()
        if func._schema.is_mutable:
            raise TypeError(f"{FIXED} ({func})")
        plain = tree_map_only(FixedWeight, lambda weight: weight.plain(), (args, kwargs or {}))
        return func(*plain[0], **plain[1])
