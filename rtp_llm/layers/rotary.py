"""Rotary position embeddings (Su et al., 2021, arXiv:2104.09864) and the ways to stretch them over longer contexts.

A kind is a function from parameters and sequence length to inverse frequencies ``[dim / 2]`` and a factor on cosine and
sine.  Frequencies are computed in float32 on the CPU, like the references: float64 or
the device would give other last bits, which long positions multiply.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch


@dataclass(frozen=True, slots=True)
class RopeParameters:
    """Parameters of all kinds, under their names in ``rope_parameters`` of ``config.json``.

    ``dim`` is the number of rotated elements of a head (even); the rest of the head passes unchanged.
    ``max_position_embeddings`` is the length that the model is configured for, in tokens.
    """

    rope_type: str
    rope_theta: float
    dim: int
    max_position_embeddings: int
    original_max_position_embeddings: int
    factor: float | None = None
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    partial_rotary_factor: float = 1.0


Frequencies = tuple[torch.Tensor, float]


def _exponents(dim: int) -> torch.Tensor:
    return torch.arange(0, dim, 2, dtype=torch.float32) / dim


def _plain(theta: float, dim: int) -> torch.Tensor:
    return 1.0 / (theta ** _exponents(dim))


def _stretch(p: RopeParameters) -> float:
    """The factor; by default the ratio of the two lengths."""
    return p.factor if p.factor is not None else p.max_position_embeddings / p.original_max_position_embeddings


def _default(p: RopeParameters, length: int) -> Frequencies:
    return _plain(p.rope_theta, p.dim), 1.0


def _linear(p: RopeParameters, length: int) -> Frequencies:
    """Position interpolation (Chen et al., 2023, arXiv:2306.15595)."""
    return _plain(p.rope_theta, p.dim) / _stretch(p), 1.0


def _dynamic(p: RopeParameters, length: int) -> Frequencies:
    """NTK-aware scaling that grows with the sequence; without effect up to ``max_position_embeddings``."""
    factor, most = _stretch(p), p.max_position_embeddings
    growth = factor * max(length, most) / most - (factor - 1)
    return _plain(p.rope_theta * growth ** (p.dim / (p.dim - 2)), p.dim), 1.0


def _yarn(p: RopeParameters, length: int) -> Frequencies:
    """YaRN (Peng et al., 2023, arXiv:2309.00071): fast dimensions stay, slow ones are interpolated, a ramp lies between."""
    factor = _stretch(p)

    def dimension(rotations: float) -> float:
        """The dimension that turns ``rotations`` times over the original context."""
        return p.dim * math.log(p.original_max_position_embeddings / (rotations * 2 * math.pi)) / (2 * math.log(p.rope_theta))

    low, high = dimension(p.beta_fast), dimension(p.beta_slow)
    if p.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(float(low), 0.0), min(float(high), p.dim - 1.0)
    # A ramp of no width would divide by zero.
    width = high - low if high != low else 0.001
    ramp = ((torch.arange(p.dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    frequencies = p.rope_theta ** _exponents(p.dim)
    mixed = 1.0 / (factor * frequencies) * ramp + 1.0 / frequencies * (1 - ramp)
    return mixed, _yarn_attention(p, factor)


def _yarn_attention(p: RopeParameters, factor: float) -> float:
    """The temperature of YaRN, section 3.4; DeepSeek's configurations divide two of them."""

    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if p.attention_factor is not None:
        return p.attention_factor
    if p.mscale and p.mscale_all_dim:
        return mscale(p.mscale) / mscale(p.mscale_all_dim)
    return mscale(1.0)


def _longrope(p: RopeParameters, length: int) -> Frequencies:
    """LongRoPE (Ding et al., 2024, arXiv:2402.13753): one searched factor a dimension, another set beyond the original length."""
    factor, original = _stretch(p), p.original_max_position_embeddings
    factors = torch.tensor(p.long_factor if length > original else p.short_factor, dtype=torch.float32)
    scale = p.attention_factor
    if scale is None:
        scale = 1.0 if factor <= 1.0 else math.sqrt(1 + math.log(factor) / math.log(original))
    return 1.0 / (factors * p.rope_theta ** _exponents(p.dim)), scale


def _llama3(p: RopeParameters, length: int) -> Frequencies:
    """Llama 3.1: long waves are divided by the factor, short ones stay, those between are mixed."""
    original, factor = p.original_max_position_embeddings, _stretch(p)
    plain = _plain(p.rope_theta, p.dim)
    waves = 2 * math.pi / plain
    smooth = (original / waves - p.low_freq_factor) / (p.high_freq_factor - p.low_freq_factor)
    mixed = (1 - smooth) * plain / factor + smooth * plain
    long, short = waves > original / p.low_freq_factor, waves < original / p.high_freq_factor
    return torch.where(long, plain / factor, torch.where(short, plain, mixed)), 1.0


def _proportional(p: RopeParameters, length: int) -> Frequencies:
    """The first ``partial_rotary_factor`` of the frequencies turn, at the pace of the whole head; the others stand still."""
    turning = int(p.partial_rotary_factor * p.dim // 2)
    frequencies = torch.zeros(p.dim // 2, dtype=torch.float32)
    frequencies[:turning] = _plain(p.rope_theta, p.dim)[:turning]
    return frequencies / (p.factor if p.factor is not None else 1.0), 1.0


@dataclass(frozen=True, slots=True)
class RopeKind:
    """A kind's function, and its required and optional fields beside ``rope_theta``."""

    frequencies: Callable[[RopeParameters, int], Frequencies]
    required: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()


ROPE_KINDS: Mapping[str, RopeKind] = MappingProxyType(
    {
        "default": RopeKind(_default),
        "linear": RopeKind(_linear, ("factor",)),
        "dynamic": RopeKind(_dynamic, ("factor",)),
        "yarn": RopeKind(_yarn, (), ("factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate")),
        "longrope": RopeKind(_longrope, ("short_factor", "long_factor"), ("factor", "attention_factor")),
        "llama3": RopeKind(_llama3, ("factor", "low_freq_factor", "high_freq_factor")),
        "proportional": RopeKind(_proportional, (), ("factor", "partial_rotary_factor")),
    }
)


def _effective_length(p: RopeParameters, length: int) -> int:
    """One length for all those that give the same frequencies: two kinds depend on it, at a threshold."""
    if p.rope_type == "dynamic":
        return max(length, p.max_position_embeddings)
    if p.rope_type == "longrope":
        return p.original_max_position_embeddings + (length > p.original_max_position_embeddings)
    return 0


class Rotary:
    """Cosine and sine tables on demand; no parameters and no buffers, so nothing of it is ever loaded.

    Some kinds depend on the sequence's length at the time of the call.  Cached keys keep the rotation that they were written
    with, as in transformers.  ``wide``: tables are always float32, so that the rotation is computed in float32.
    """

    def __init__(self, parameters: RopeParameters, *, wide: bool = False) -> None:
        self.parameters = parameters
        self.wide = wide
        self._kind = ROPE_KINDS[parameters.rope_type]
        self._known: dict[tuple[int, torch.device], tuple[torch.Tensor, float]] = {}

    def _frequencies(self, lengths: Sequence[int], device: torch.device) -> tuple[torch.Tensor, torch.Tensor | float]:
        """Inverse frequencies ``[dim / 2]`` and their factor, where they are the same for all lengths; else ``[lengths, 1, dim / 2]``
        and ``[lengths, 1, 1]``."""
        keys = [(_effective_length(self.parameters, length), device) for length in lengths]
        for key in set(keys) - self._known.keys():
            inverse, scale = self._kind.frequencies(self.parameters, key[0])
            self._known[key] = inverse.to(device), scale
        # Keep those of this call: the next decode step mostly needs the same.
        self._known = {key: self._known[key] for key in keys}
        if len(self._known) == 1:
            return self._known[keys[0]]
        each = [self._known[key] for key in keys]
        return torch.stack([inverse for inverse, _ in each])[:, None], torch.tensor([scale for _, scale in each], device=device)[
            :, None, None
        ]

    def at(self, positions: torch.Tensor, lengths: Sequence[int], *, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Cosine and sine ``[rows * tokens, dim]`` of ``positions [rows, tokens]``, whose sequences have ``lengths`` tokens, one a row."""
        inverse, scale = self._frequencies(lengths, positions.device)
        angles = (positions.float()[..., None] * inverse).repeat(1, 1, 2)
        dtype = torch.float32 if self.wide else dtype
        return (angles.cos() * scale).to(dtype).flatten(0, 1), (angles.sin() * scale).to(dtype).flatten(0, 1)

    def tables(self, start: int, stop: int, *, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Cosine and sine ``[stop - start, dim]`` of the positions ``start`` to ``stop`` of a sequence that ends there."""
        return self.at(torch.arange(start, stop, device=device)[None], (stop,), dtype=dtype)


class Unrotated(Rotary):
    """No tables, for models without rotation."""

    def __init__(self) -> None:
        pass

    def at(self, positions: torch.Tensor, lengths: Sequence[int], *, dtype: torch.dtype) -> None:
        return None
