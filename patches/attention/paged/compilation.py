"""Resolved recipes as rows of numbers, or the reason why one has none."""

from __future__ import annotations

import math

import torch

from patches.attention.paged.rows import BandRow, BiasKind, BiasRow, Row, TemperatureRow
from patches.encoding.bands import Identity, PositionMap
from patches.encoding.biases import BucketBias, LinearBias, LogBias, PowerBias
from patches.encoding.masks import ChunkRange, DistanceRange, FirstKeys, Predicate
from patches.encoding.positions import (
    NO_LIMIT,
    Capped,
    Fixed,
    Grouped,
    GroupedPairs,
    InChunk,
    MapRow,
    Shifted,
    Stretched,
)
from patches.encoding.recipe import AttentionTemperature, ResolvedRecipe, ScoreBias
from patches.encoding.temperature import ConstantTemperature, FloorLogTemperature, LogLengthTemperature

KINDS = "patches/attention/paged/compilation.py has the kinds that fit"


class DoesNotFit(ValueError):
    """The encoding is no row of numbers: another attention has to compute it."""


def compiled(resolved: ResolvedRecipe, length: int) -> Row:
    """The row of an encoding, for sequences of up to ``length`` tokens.

    Raises:
        DoesNotFit: naming the part that no row expresses.
    """
    recipe = resolved.recipe
    if recipe.relative is not None:
        raise DoesNotFit("scores by distance that read the weights of each layer are no row of numbers")
    bands = tuple(
        BandRow(map_row(band.query_map), map_row(band.key_map), *_pairs(band.predicate)) for band in recipe.bands
    )
    return Row(
        bands,
        map_row(recipe.base),
        resolved.turns,
        bias_row(recipe.score_bias, length),
        temperature_row(recipe.attention_temperature),
        resolved.interleaved,
        resolved.offset,
    )


def map_row(position_map: PositionMap) -> MapRow:
    match position_map:
        case Identity():
            return MapRow()
        case Fixed(position):
            return MapRow(period=1, shifts=(position,))
        case Shifted(shift):
            return MapRow(shifts=(shift,))
        case Capped(last):
            return MapRow(cap=last)
        case Grouped(group_size, shift):
            return MapRow(groups=(group_size,), shifts=(shift,))
        case GroupedPairs(group_sizes, shifts):
            return MapRow(groups=group_sizes, shifts=shifts)
        case Stretched(divisor, shift):
            return MapRow(shifts=(shift,), divisor=divisor)
        case InChunk(size, shift, last):
            return MapRow(period=size, shifts=(shift,), cap=NO_LIMIT if last is None else last)
    raise DoesNotFit(f"no row expresses the position map {position_map}; {KINDS}")


def _pairs(predicate: Predicate) -> tuple[int, int, int, int]:
    """chunk, low, high and first of a band."""
    match predicate:
        case DistanceRange(low, high):
            return 1, low, NO_LIMIT if high is None else high, NO_LIMIT
        case FirstKeys(count, low):
            return 1, low, NO_LIMIT, count
        case ChunkRange(size, low, high):
            return size, low, NO_LIMIT if high is None else high, NO_LIMIT
    raise DoesNotFit(f"no row expresses the mask {predicate}; {KINDS}")


def mask_row(predicate: Predicate) -> BandRow:
    """The pairs of a layer's own mask.

    Raises:
        DoesNotFit: for a mask of another kind.
    """
    chunk, low, high, first = _pairs(predicate)
    if low > 0 or first < NO_LIMIT:
        raise DoesNotFit(f"no row expresses {predicate} as the mask of a layer")
    return BandRow(chunk=chunk, high=high)


def bias_row(bias: ScoreBias | None, length: int) -> BiasRow | None:
    match bias:
        case None:
            return None
        case LinearBias(slopes, scale, in_bfloat16):
            a = torch.tensor(slopes, dtype=torch.float32)
            if in_bfloat16:
                return BiasRow(BiasKind.BFLOAT16, a.bfloat16().float(), torch.full_like(a, scale))
            return BiasRow(BiasKind.LINEAR, a * scale, torch.zeros_like(a))
        case LogBias(r1, r2):
            return BiasRow(BiasKind.LOG, torch.tensor(r1, dtype=torch.float32), torch.tensor(r2, dtype=torch.float32))
        case PowerBias(r1, r2):
            return BiasRow(BiasKind.POWER, torch.tensor(r1, dtype=torch.float32), torch.tensor(r2, dtype=torch.float32))
        case BucketBias(_, max_distance):
            return _tabulated(bias, min(length, max_distance + 1))
        case _ if bias.by_distance:
            return _tabulated(bias, length)
    raise DoesNotFit(
        f"no row expresses the bias {type(bias).__name__}: only biases by distance alone fit, "
        "whose `by_distance` is true, and ALiBi's in bfloat16"
    )


def _tabulated(bias: ScoreBias, distances: int) -> BiasRow:
    """A bias that depends on the distance alone, for distances 0 .. distances - 1."""
    kv_idx = torch.arange(distances - 1, -1, -1)
    table = bias(torch.tensor([[distances - 1]]), kv_idx[None])[:, 0].float().contiguous()
    unused = table.new_zeros(len(table))
    return BiasRow(BiasKind.TABLE, unused, unused, table)


def temperature_row(temperature: AttentionTemperature | None) -> TemperatureRow:
    match temperature:
        case None:
            return TemperatureRow()
        case ConstantTemperature(multiplier):
            return TemperatureRow(multiplier)
        case LogLengthTemperature(trained_length):
            return TemperatureRow(0.0, 1.0 / math.log(trained_length), least=1.0)
        case FloorLogTemperature(beta, length, offset):
            return TemperatureRow(1.0, beta, length, offset)
    raise DoesNotFit(f"no row expresses the temperature {temperature}; {KINDS}")


def base_of(resolved: ResolvedRecipe) -> MapRow:
    """The map under which queries and keys of an encoding are written.

    Raises:
        DoesNotFit: for a map of another kind.
    """
    return map_row(resolved.recipe.base)
