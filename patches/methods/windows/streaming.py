"""StreamingLLM: a window and the first tokens, at their positions inside the cache.

Xiao et al., arXiv:2309.17453, section 3.2; code mit-han-lab/streaming-llm. The code evicts after each step, so
its ``recent_size`` R is a ``window`` of R + 1 here, the query's own token included.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field

from patches.encoding.bands import IDENTITY, Band
from patches.encoding.fields import LONGEST
from patches.encoding.geometry import RopeGeometry
from patches.encoding.masks import DistanceRange, FirstKeys
from patches.encoding.method import BasedMethod
from patches.encoding.positions import Capped
from patches.encoding.recipe import Recipe


class Streaming(BasedMethod):
    also: ClassVar[tuple[str, ...]] = ("streaming_llm", "attention_sinks", "sinks")
    summary: ClassVar[str] = "StreamingLLM: attends to a window and a few first tokens, positions by cache index."
    use: ClassVar[str] = "Endless streams whose past may be forgotten."
    avoid: ClassVar[str] = "Recall: nothing between the first tokens and the window is attended, so it is lost."
    reach: ClassVar[str] = (
        "any length for perplexity, sink_tokens + window for recall; L0 with absolute_positions, which let the "
        "first tokens drift to untrained distances"
    )
    evidence: ClassVar[str] = (
        "Llama-2-13B, first book of PG19: 5.40 with 4 + 1020 tokens attended, 5158.07 with 0 + 1024, 5.43 when the "
        "window is computed anew at every step (arXiv:2309.17453, table 1)."
    )
    formula: ClassVar[str] = "p - j below w; min(p, sinks + w - 1) - j for j < sinks; others not attended"
    paper: ClassVar[str] = "StreamingLLM, arXiv:2309.17453"
    training_free: ClassVar[str] = "Keeps perplexity flat without tuning; does not extend recall."
    cost: ClassVar[str] = "prefill and decoding run a second attention over the first tokens"

    method: Literal["streaming"] = "streaming"
    sink_tokens: Annotated[int, Field(ge=0, le=1 << 20, strict=True)] = Field(
        4, description="First tokens that stay attended; 0 is plain window attention, the paper's negative control."
    )
    window: Annotated[int, Field(ge=1, le=LONGEST, strict=True)] | None = Field(
        None,
        description="Last tokens attended, the query's own included; the trained length less sink_tokens when absent.",
    )
    absolute_positions: bool = Field(
        False,
        strict=True,
        description="Keep every token's own position instead of its index among the attended ones.",
    )

    @classmethod
    def candidates(cls, geometry: RopeGeometry, length: int) -> list[Self]:
        return [cls()]

    def encoding(self, geometry: RopeGeometry) -> Recipe:
        window = self.window_in_effect(geometry)
        position = IDENTITY if self.absolute_positions else Capped(self.sink_tokens + window - 1)
        near = Band(predicate=DistanceRange(0, window))
        if self.sink_tokens == 0:
            return self.on_base(geometry, near)
        first = Band(position, IDENTITY, FirstKeys(self.sink_tokens, window))
        return self.on_base(geometry, near, first)

    def window_in_effect(self, geometry: RopeGeometry) -> int:
        """The window.

        Raises:
            ValueError: when no window was given and the sinks leave none.
        """
        left = self.window or self.attended(geometry) - self.sink_tokens
        if left < 1:
            raise ValueError(
                f"sink_tokens: at most {self.attended(geometry) - 1} leave a window within the trained length; "
                "give window as well"
            )
        return left

    def parameters(self, geometry: RopeGeometry) -> dict[str, Any]:
        return super().parameters(geometry) | {"window": self.window_in_effect(geometry)}
