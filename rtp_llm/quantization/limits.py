"""The values that a tensor may have, checked for all tensors of a model with one read from the device.

Minimum and maximum take two operations and no copy.  Reading a number waits for the device, so all are read at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

#: The largest byte of a scale of eight bits that is a number and not negative: E4M3 has one NaN, 0x7F, beside the sign; E8M0 is all
#: exponent, and 0xFF its NaN.
_LARGEST_BYTE = {"float8_e4m3fn": 0x7E, "float8_e8m0fnu": 0xFE, "uint8": 0xFE}


@dataclass(frozen=True, slots=True)
class ValueRange:
    """The range of every element; of its byte, for a float of eight bits."""

    least: float
    most: float


@dataclass(frozen=True, slots=True)
class ExactValues:
    """The elements are these."""

    values: tuple[int, ...]


#: By the tensor's name after the matrix's slot.
ValueChecks = Mapping[str, ValueRange | ExactValues]


def scale_limit(dtype: str) -> ValueRange:
    """The range of scales of torch's dtype ``name``: finite and not negative; ``uint8`` are exponents."""
    byte = _LARGEST_BYTE.get(dtype)
    return ValueRange(0, torch.finfo(getattr(torch, dtype)).max if byte is None else byte)


#: Where numbers are in what is read: their dtype, the first, and the end.
Seen = tuple[torch.dtype, int, int]


class DeferredChecks:
    """Collects numbers on a device, and reads all of them at once."""

    def __init__(self) -> None:
        self._parts: dict[torch.dtype, list[torch.Tensor]] = {}
        self._sizes: dict[torch.dtype, int] = {}

    def add(self, *numbers: torch.Tensor) -> Seen:
        """Adds tensors of one dtype, to be read as one list; the result is their key in :meth:`read`."""
        flat = [number.reshape(-1) for number in numbers]
        dtype = flat[0].dtype
        start = self._sizes.get(dtype, 0)
        self._parts.setdefault(dtype, []).extend(flat)
        self._sizes[dtype] = start + sum(part.numel() for part in flat)
        return dtype, start, self._sizes[dtype]

    def extremes(self, tensor: torch.Tensor) -> Seen:
        """Adds minimum and maximum (of the bytes, for floats of eight bits); ``tensor`` has at least one element."""
        bits = tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 and tensor.dtype.is_floating_point else tensor
        return self.add(*torch.aminmax(bits))

    def read(self, seen: Sequence[Seen]) -> list[list[float]]:
        """The numbers of each key; waits once for each dtype."""
        read = {dtype: torch.cat(parts).tolist() for dtype, parts in self._parts.items()}
        return [read[dtype][start:stop] for dtype, start, stop in seen]


def holds(limit: ValueRange | ExactValues, numbers: list[float]) -> bool:
    """Whether the extremes, or the elements, are allowed.  NaN never is."""
    if isinstance(limit, ExactValues):
        return tuple(numbers) == limit.values
    return limit.least <= numbers[0] and numbers[1] <= limit.most
