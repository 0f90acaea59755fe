"""Causes of rounding beside the code and the weights. Results have them, so this loads no library."""

from __future__ import annotations

from pydantic import BaseModel, Field


class Numerics(BaseModel):
    """The numerics that a model runs with. Sums of ``tensor_parallel`` processes are added in another order.

    Products are timed, but equal servers of one database agree on them (``service.models.linear.known``).
    """

    torch: str
    transformers: str
    device: str
    hardware: str
    dtype: str
    threads: int
    tensor_parallel: int
    products: list[str] = Field(description="Those of linear layers on a CPU other than torch's.")
