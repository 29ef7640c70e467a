"""A bit-exact checksum of all weights, computed on their device.

It covers what a plan delivers: the content of each place, as the parameter's bits in row-major order.  A model loaded by a
plan has it in its parameters, fused and sliced.  Another loader's tensors have the checkpoint's names and shapes; the plan's
ops select the part of each place.

The bits, padded with zeros to words of 8 bytes, form a table :data:`COLUMNS` wide.  Each word is multiplied by fixed odd
numbers of its column and its row, and the products are summed modulo 2**64.  Odd numbers have inverses modulo 2**64, so a
change within one word always changes the sum.  Several changes cancel with a probability near 2**-60.  Sums of places are
multiplied by an odd number derived from their name and added, so their order does not matter.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from rtp_llm.plan.boxes import extent, view
from rtp_llm.plan.plan import Delivery, LoadPlan, Target

#: Words in a row of the table: 64 KiB, so that the columns' factors stay in a CPU's second-level cache.
COLUMNS = 8192

#: Rows multiplied at once on a GPU, where the products are written out before they are summed: 256 MiB of them.
_ROWS_AT_ONCE = 4096

_MODULUS = 2**64

#: The content of a place; None if the loader has none to compare.
Contents = Callable[[Delivery, Target], "torch.Tensor | None"]


@dataclass(frozen=True, slots=True)
class Sums:
    """``total``: the sum over all places found; ``by_tensor``: the same for each checkpoint tensor; ``places``: how many were found;
    ``wanted``: how many the plan has."""

    total: int
    by_tensor: dict[str, int]
    places: int
    wanted: int

    @property
    def text(self) -> str:
        """The total as 16 hexadecimal digits."""
        return f"{self.total:016x}"


def checksum(plan: LoadPlan, contents: Contents) -> Sums:
    """The sums over every place of ``plan`` that has ``contents``."""
    summers: dict[torch.device, BitsSum] = {}
    keys: list[tuple[str, int]] = []
    sums: list[torch.Tensor] = []
    wanted = 0
    for delivery in plan.deliveries:
        for target in delivery.targets:
            wanted += 1
            content = contents(delivery, target)
            if content is not None:
                keys.append((delivery.tensor.name, odd(f"{target.param} {target.box}")))
                sum_of = summers.get(content.device) or summers.setdefault(content.device, BitsSum(content.device))
                sums.append(sum_of(content))
    by_tensor: dict[str, int] = {}
    # One transfer for all sums: each alone would wait for the device.
    values = torch.stack(sums).tolist() if sums else []
    for (name, factor), value in zip(keys, values, strict=True):
        by_tensor[name] = (by_tensor.get(name, 0) + factor * value) % _MODULUS
    return Sums(sum(by_tensor.values()) % _MODULUS, by_tensor, len(keys), wanted)


def of_model(model: nn.Module, plan: LoadPlan) -> Contents:
    """The contents of a model loaded by ``plan``.

    Parameters that were quantised during the load have none to compare.
    """
    memory = {name: parameter.data for name, parameter in model.named_parameters()}

    def content(delivery: Delivery, target: Target) -> torch.Tensor | None:
        if target.param in plan.derived:
            return None
        return view(memory[target.param], target.box).reshape(extent(delivery.slot_box))

    return content


def of_tensors(get: Callable[[str], torch.Tensor | None], plan: LoadPlan) -> Contents:
    """The contents of a checkpoint's tensors, by name and in the shapes of its files."""
    dtypes = {p.name: getattr(torch, p.dtype) for p in plan.model.params}

    def content(delivery: Delivery, target: Target) -> torch.Tensor | None:
        raw = get(delivery.tensor.name)
        if raw is None or target.param in plan.derived or tuple(raw.shape) != delivery.tensor.shape:
            return None
        made = delivery.source.apply(view(raw, delivery.raw_box), delivery.slot_box)
        return made.to(dtypes[target.param])

    return content


class BitsSum:
    """Sums the bits of tensors on one device."""

    def __init__(self, device: torch.device) -> None:
        self._columns = factors(COLUMNS, 1, device)

    def __call__(self, content: torch.Tensor) -> torch.Tensor:
        """The sum of one tensor's bits, as an ``int64`` scalar on its device."""
        flat = content.detach().contiguous().reshape(-1).view(torch.uint8)
        body = flat.numel() // (COLUMNS * 8) * (COLUMNS * 8)
        total = self._table(flat[:body]) if body else torch.zeros((), dtype=torch.int64, device=flat.device)
        if body < flat.numel():
            rest = torch.zeros(-(-(flat.numel() - body) // 8) * 8, dtype=torch.uint8, device=flat.device)
            rest[: flat.numel() - body] = flat[body:]
            words = rest.view(torch.int64)
            total = total + (words * self._columns[: len(words)]).sum()
        return total

    def _table(self, flat: torch.Tensor) -> torch.Tensor:
        # Loads of 8 bytes must be aligned on a GPU, and torch asks the same of the offset within a storage.
        if flat.data_ptr() % 8 or flat.storage_offset() % 8:
            flat = flat.clone()
        table = flat.view(torch.int64).view(-1, COLUMNS)
        if table.device.type == "cpu":
            rows = torch.mv(table, self._columns)
        else:  # CUDA has no product of integer matrices
            rows = torch.cat([(table[i : i + _ROWS_AT_ONCE] * self._columns).sum(1) for i in range(0, len(table), _ROWS_AT_ONCE)])
        return (rows * factors(len(rows), 2, flat.device)).sum()


def factors(count: int, salt: int, device: torch.device) -> torch.Tensor:
    """``count`` odd ``int64`` numbers, the same everywhere: splitmix64 (Steele, Lea and Flood 2014) of the indexes."""
    z = torch.arange(1, count + 1, dtype=torch.int64, device=device) * _signed(0x9E3779B97F4A7C15) + salt
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z = (z ^ _shifted(z, shift)) * _signed(factor)
    return (z ^ _shifted(z, 31)) | 1


def _shifted(z: torch.Tensor, by: int) -> torch.Tensor:
    """Logical shift to the right; torch's own repeats the sign."""
    return (z >> by) & ((1 << (64 - by)) - 1)


def odd(text: str) -> int:
    """An odd number below 2**64 drawn from ``text``."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") | 1


def _signed(number: int) -> int:
    return number - _MODULUS if number >= _MODULUS // 2 else number


def differing(one: dict[str, int], other: dict[str, int]) -> Iterator[str]:
    """Names, sorted, of tensors that are in both and have other sums."""
    return (name for name in sorted(one.keys() & other.keys()) if one[name] != other[name])
