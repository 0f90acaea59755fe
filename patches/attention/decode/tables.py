"""Tables that decode steps ask for again: moves of positions, rotations by them, biases by distances, or ends.

A position map moves the keys near a query by equal positions every few steps, whichever the sequence. Each table is
made once and shared, in inference on a CPU. Larger tables are made anew: they would take memory.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from patches.encoding.rotary import per_pair, rotary_table, signed

if TYPE_CHECKING:
    from patches.encoding.bands import PositionMap
    from patches.encoding.recipe import ResolvedRecipe, ScoreBias

Table = tuple[torch.Tensor, torch.Tensor]

MOST_POSITIONS = 512
"""Rows of a rotation, and positions that move. 64 tables of 512 rows of 128 numbers, cos and sin, take 34 MB; their
keys take up to 17 MB."""
NARROW = 16
"""Rows of a table of few positions. Some encodings need another one in every step; they leave the wide tables alone."""
BLOCK = 256
"""Positions whose moves are made at once. 512 blocks of 64 pairs take 34 MB, of one 0.5 MB."""
ROTATIONS = 64
"""Positions whose rotations are made at once. 512 blocks of 128 numbers, cos and sin, take 34 MB."""
MOST_DISTANCES = 16384
"""Columns of a bias. 16 tables for 32 heads take 34 MB."""
MOST_ENDS = 1 << 18
"""Numbers of a bias that excludes the last keys. 16 tables of so many take 17 MB."""


def moves(to: PositionMap, base: PositionMap, positions: range, device: torch.device) -> torch.Tensor:
    """``moved`` of ``positions``: maps consist of several small operations."""
    if not _is_shared(device) or len(positions) > MOST_POSITIONS:
        return moved(to, base, torch.arange(positions.start, positions.stop, device=device))
    first, last = positions.start // BLOCK, (positions.stop - 1) // BLOCK
    blocks = [_block(to, base, number) for number in range(first, last + 1)]
    whole = blocks[0] if first == last else torch.cat(blocks)
    return whole[positions.start - first * BLOCK : positions.stop - first * BLOCK]


def moved(to: PositionMap, base: PositionMap, position: torch.Tensor) -> torch.Tensor:
    """Distances int64 or float64 [n, 1 or pairs] from ``position`` [n] under ``base`` to those under ``to``."""
    return per_pair(to(position)) - per_pair(base(position))


@lru_cache(512)
def _block(to: PositionMap, base: PositionMap, number: int) -> torch.Tensor:
    by = moved(to, base, torch.arange(number * BLOCK, (number + 1) * BLOCK, device="cpu"))
    return by if by.is_floating_point() else by.int()  # positions are below 2^24: half the bytes will do


def shared_rotation(by: torch.Tensor, resolved: ResolvedRecipe) -> Table:
    """``rotation`` by at least one position."""
    if not _is_shared(by.device) or len(by) > MOST_POSITIONS:
        return rotation(by, resolved.turns, resolved.interleaved)
    shared = _narrow if len(by) <= NARROW else _wide
    return shared(by.numpy().tobytes(), by.dtype, by.shape, resolved.turns, resolved.interleaved)


def rotations(to: PositionMap, resolved: ResolvedRecipe, positions: range) -> Table:
    """The rotations of states at ``positions`` from the base of ``resolved`` to ``to``, on a CPU in inference."""
    first, last = positions.start // ROTATIONS, (positions.stop - 1) // ROTATIONS
    blocks = [_rotations(to, resolved, number) for number in range(first, last + 1)]
    cos, sin = blocks[0] if first == last else (torch.cat(parts) for parts in zip(*blocks, strict=True))
    own = slice(positions.start - first * ROTATIONS, positions.stop - first * ROTATIONS)
    return cos[own], sin[own]


@lru_cache(512)
def _rotations(to: PositionMap, resolved: ResolvedRecipe, number: int) -> Table:
    positions = torch.arange(number * ROTATIONS, (number + 1) * ROTATIONS, device="cpu")
    return rotation(moved(to, resolved.recipe.base, positions), resolved.turns, resolved.interleaved)


def rotation(by: torch.Tensor, turns: tuple[float, ...], interleaved: bool) -> Table:
    """The rotation of states by ``by`` positions [n, 1 or pairs]: cos and ``signed`` sin."""
    # With its dtype: while a model loads, transformers changes the default of the process.
    inv_freq = torch.tensor(turns, dtype=torch.float32, device=by.device)
    cos, sin = rotary_table(by, inv_freq, 1.0, interleaved=interleaved)  # states have the attention factor
    return cos, signed(sin, interleaved=interleaved)


def _by_value(
    positions: bytes, dtype: torch.dtype, shape: torch.Size, turns: tuple[float, ...], interleaved: bool
) -> Table:
    by = torch.frombuffer(bytearray(positions), dtype=dtype).view(shape)
    return rotation(by, turns, interleaved)


_narrow, _wide = lru_cache(1024)(_by_value), lru_cache(64)(_by_value)


def bias_by_distance(score_bias: ScoreBias, distances: range, device: torch.device) -> torch.Tensor:
    """Bias [heads or 1, 1, distances] of one query, from the largest of ``distances`` down."""
    count = 1 << max(distances.stop - 1, 0).bit_length()
    if not _is_shared(device) or count > MOST_DISTANCES:
        return _biases(score_bias, distances.stop, device)[..., : len(distances)]
    table = _shared_biases(score_bias, count, device)
    return table[..., count - distances.stop : count - distances.start]


def _biases(score_bias: ScoreBias, count: int, device: torch.device) -> torch.Tensor:
    """The biases [heads or 1, 1, count] at distances count - 1 .. 0."""
    kv_idx = torch.arange(count, device=device)
    return score_bias(kv_idx[-1:, None], kv_idx[None])


@lru_cache(16)
def _shared_biases(score_bias: ScoreBias, count: int, device: torch.device) -> torch.Tensor:
    return _biases(score_bias, count, device)


def ends(missing: tuple[int, ...], length: int, dtype: torch.dtype) -> torch.Tensor | None:
    """Bias [sequences, 1, 1, length] that excludes the last ``missing`` keys of each sequence; None if none is missing.

    While a batch decodes, its sequences grow alike.
    """
    if not any(missing):
        return None
    count = 1 << (length - 1).bit_length()
    is_shared = count * len(missing) <= MOST_ENDS and _is_shared(torch.device("cpu"))
    table = _shared_ends(missing, count, dtype) if is_shared else _ends(missing, length, dtype)
    return table[..., -length:]


def _ends(missing: tuple[int, ...], count: int, dtype: torch.dtype) -> torch.Tensor:
    behind = torch.arange(count) >= count - torch.tensor(missing)[:, None]
    return torch.zeros(behind.shape, dtype=dtype).masked_fill_(behind, torch.finfo(dtype).min)[:, None, None]


_shared_ends = lru_cache(16)(_ends)


def _is_shared(device: torch.device) -> bool:
    """Tables of inference serve no training: autograd refuses them."""
    return device.type == "cpu" and torch.is_inference_mode_enabled()
