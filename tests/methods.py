"""One row per method: request fields that are easy, fields that are hard, and what must hold of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

Fields = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """``easy`` is a typical request, ``hard`` sets every parameter away from its default.

    ``identity`` are the fields that make the method plain RoPE (None: none do). Within the trained
    length, ``plain_when_short`` methods are plain RoPE whatever their fields. ``rope_type`` is the
    method's name in transformers, where it has one.
    """

    name: str
    easy: Fields = field(default_factory=dict)
    hard: Fields = field(default_factory=dict)
    identity: Fields | None = None
    rotates: bool = True
    bands: int = 1
    depends_on_length: bool = False
    plain_when_short: bool = False
    rope_type: str | None = None

    @property
    def requests(self) -> list[Fields]:
        """The two requests as ``parse`` takes them."""
        return [{"method": self.name, **self.easy}, {"method": self.name, **self.hard}]


def rows(pairs: int = 32, trained_length: int = 256) -> list[Row]:
    """The table for a model with ``pairs`` rotary pairs; LongRoPE's lists have one value per pair."""
    short = [1.0 + 0.01 * i for i in range(pairs)]
    long = [1.0 + 0.25 * i for i in range(pairs)]
    other_length = trained_length // 2
    return [
        Row("default", hard={"rope_theta": 5e5}, identity={}, rope_type="default"),
        Row("none", hard={"attention_temperature": 1.5}, rotates=False),
        Row("linear", {"factor": 4.0}, {"factor": 3.7, "rope_theta": 5e5}, {"factor": 1.0}, rope_type="linear"),
        Row("ntk", {"factor": 4.0}, {"factor": 7.3, "rope_theta": 5e5}, {"factor": 1.0}),
        Row(
            "dynamic",
            {},
            {"factor": 2.5, "rope_theta": 5e5, "original_max_position_embeddings": other_length},
            {"factor": 1.0},
            depends_on_length=True,
            plain_when_short=True,
            rope_type="dynamic",
        ),
        Row(
            "ntk_by_parts",
            {"factor": 4.0},
            {
                "factor": 7.3,
                "beta_0": 2.0,
                "beta_1": 0.5,
                "gamma_0": 12.0,
                "gamma_1": 3.0,
                "original_max_position_embeddings": other_length,
            },
            {"factor": 1.0},
        ),
        Row(
            "yarn",
            {"factor": 4.0},
            {
                "factor": 7.3,
                "beta_fast": 16.0,
                "beta_slow": 2.0,
                "truncate": False,
                "mscale": 1.5,
                "mscale_all_dim": 0.5,
                "original_max_position_embeddings": other_length,
            },
            {"factor": 1.0},
            rope_type="yarn",
        ),
        Row(
            "llama3",
            {},
            {
                "factor": 7.3,
                "low_freq_factor": 0.7,
                "high_freq_factor": 5.5,
                "original_max_position_embeddings": other_length,
            },
            {"factor": 1.0},
            rope_type="llama3",
        ),
        Row(
            "longrope",
            {"short_factor": short, "long_factor": long, "factor": 4.0},
            {
                "short_factor": short[::-1],
                "long_factor": long[::-1],
                "attention_factor": 1.3,
                "original_max_position_embeddings": other_length,
            },
            {"short_factor": [1.0] * pairs, "long_factor": [1.0] * pairs, "factor": 1.0},
            depends_on_length=True,
            rope_type="longrope",
        ),
        Row("alibi", hard={"alibi_bias_max": 16.0, "use_variant": False}, rotates=False),
        Row(
            "self_extend",
            {"group_size": 4, "neighbor_window": 16},
            {"group_size": 3, "neighbor_window": 7, "log_n": True, "original_max_position_embeddings": 16},
            {"group_size": 1, "neighbor_window": 16},
            bands=2,
        ),
    ]


ROWS = rows()
REQUESTS = [request for row in ROWS for request in row.requests]
"""Every method twice, easy and hard, for 32 pairs."""


def request_id(request: Fields) -> str:
    """Short name of a request for test ids."""
    numbers = [f"{k}={v}" for k, v in request.items() if k != "method" and not isinstance(v, list)]
    return "-".join([str(request["method"]), *numbers])
