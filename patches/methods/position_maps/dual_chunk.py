"""Dual chunk attention (ChunkLlama): keys count from the start of their chunk, queries by how far the chunk is.

An et al., arXiv:2402.17463; released code HKUNLP/ChunkLlama. Paper and code differ. In the paper distances end at
L0 - 1. In the code a chunk S is shorter than ``chunk_size`` by ``local_window``. A table of S query positions,
S .. 2S - 1 and at most ``chunk_size``, serves the chunk before; older chunks use its last entry. The paper's figures
are without the released temperature, which is ``attention_temperature`` chunk_llama.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field

from patches.encoding.bands import Band
from patches.encoding.fields import LONGEST, Length
from patches.encoding.geometry import RopeGeometry
from patches.encoding.masks import ChunkRange
from patches.encoding.method import BasedMethod
from patches.encoding.positions import Fixed, InChunk
from patches.encoding.recipe import Recipe


class DualChunk(BasedMethod):
    also: ClassVar[tuple[str, ...]] = ("dual_chunk_attention", "dca", "chunkllama")
    summary: ClassVar[str] = "Dual chunk attention: exact distances within a chunk and next to it, one cap beyond."
    use: ClassVar[str] = "Untuned extension to several times L0."
    avoid: ClassVar[str] = "Tasks that need the order of distant chunks: all of them look equally far."
    reach: ClassVar[str] = "any length while chunk_size stays below L0: no distance exceeds it (paper: L0 - 1)"
    evidence: ClassVar[str] = (
        "Llama-2-7B untuned, PG19: 7.87 / 7.67 / 7.64 / 7.89 / 15.87 at 4k / 8k / 16k / 32k / 64k "
        "(arXiv:2402.17463, table 1)."
    )
    formula: ClassVar[str] = "q - j mod S, with q = p mod S; min(p mod S + S, cap) to the chunk before; else cap"
    paper: ClassVar[str] = "Dual chunk attention, arXiv:2402.17463"
    training_free: ClassVar[str] = "Works without tuning; perplexity stays low up to about eight times L0."
    cost: ClassVar[str] = "three attentions over disjoint pairs"

    method: Literal["dual_chunk"] = "dual_chunk"
    formulation: Literal["repository", "paper"] = Field(
        "repository",
        description="`repository`: chunks of chunk_size - local_window, distances up to the lesser of chunk_size and "
        "two chunks - 1. `paper`: chunks of chunk_size, distances up to the trained length - 1.",
    )
    chunk_size: Length | None = Field(
        None, description="Chunk size in tokens; three quarters of the trained length when absent."
    )
    local_window: Annotated[int, Field(ge=0, le=LONGEST, strict=True)] | None = Field(
        None, description="Formulation repository only; an eighth of the trained length when absent."
    )

    @classmethod
    def candidates(cls, geometry: RopeGeometry, length: int) -> list[Self]:
        return [cls()]

    def encoding(self, geometry: RopeGeometry) -> Recipe:
        chunk, cap = self.chunk_and_cap(geometry)
        key = InChunk(chunk)
        same = Band(InChunk(chunk), key, ChunkRange(chunk, 0, 1))
        previous = Band(InChunk(chunk, chunk, cap), key, ChunkRange(chunk, 1, 2))
        older = Band(Fixed(cap), key, ChunkRange(chunk, 2))
        return self.on_base(geometry, same, previous, older)

    def chunk_and_cap(self, geometry: RopeGeometry) -> tuple[int, int]:
        """Tokens in a chunk, and the largest position of a query.

        Raises:
            ValueError: when a chunk would be empty or longer than the cap.
        """
        size, trained = self.size(geometry), self.trained_length(geometry)
        local = self.local(geometry)
        if local is None:
            if size >= trained:
                raise ValueError(f"chunk_size: must be below the trained length {trained} in formulation paper")
            return size, trained - 1
        if local >= size:
            raise ValueError(f"local_window: must be below chunk_size, so at most {size - 1}")
        chunk = size - local
        return chunk, min(2 * chunk - 1, size)

    def size(self, geometry: RopeGeometry) -> int:
        return self.chunk_size or self.trained_length(geometry) * 3 // 4

    def local(self, geometry: RopeGeometry) -> int | None:
        if self.formulation == "repository":
            return self.trained_length(geometry) // 8 if self.local_window is None else self.local_window
        if self.local_window is not None:
            raise ValueError("local_window: belongs to formulation repository; leave it out in formulation paper")
        return None

    def parameters(self, geometry: RopeGeometry) -> dict[str, Any]:
        in_effect = {"chunk_size": self.size(geometry), "local_window": self.local(geometry)}
        return super().parameters(geometry) | in_effect
