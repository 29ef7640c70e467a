"""Rotary parameters from ``config.json``, in the old spelling (``rope_theta``, ``rope_scaling``) and the new (``rope_parameters``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rtp_llm.layers.rotary import ROPE_KINDS, RopeParameters
from rtp_llm.models.faults import ModelFault
from rtp_llm.models.reader import MAX_POSITIONS, FieldReader

#: transformers' default (``RotaryEmbeddingConfigMixin.default_theta``).
DEFAULT_THETA = 10_000.0


def read_rope(reader: FieldReader, head_dim: int, max_position_embeddings: int, *, partial: bool = False) -> RopeParameters:
    """The rotary parameters of a family that has one set for all its layers.

    As in transformers, ``rope_scaling`` that is not empty comes before ``rope_parameters``; and ``rope_theta`` or
    ``partial_rotary_factor`` inside of it before those outside.  ``partial``: ``partial_rotary_factor`` may rotate a part of
    each head; other families refuse it.
    """
    inner = reader.nested("rope_scaling") or reader.nested("rope_parameters") or reader.beside({}, "")
    _refuse_layers(inner)
    fields = _gathered(reader, inner)
    kind = fields.choice("rope_type", "default", ROPE_KINDS)
    for name in ROPE_KINDS[kind].required:
        if fields.raw.get(name) is None:
            fields.fail(name, f"a value, as rope_type {kind!r} needs one", fault=ModelFault.ABSENT_FIELD)
    dim = _rotated(fields, kind, head_dim, partial)
    # The dynamic kind has dim - 2 in a denominator.
    least = 4 if kind == "dynamic" else 2
    if dim % 2 or dim < least:
        # If head_dim follows from two other fields, their problem is the one to report.
        if reader.raw.get("head_dim") is not None or reader.sound("hidden_size", "num_attention_heads"):
            reader.fail("head_dim", f"an even number of rotated elements, at least {least}", actual=dim)
        dim = least
    original = fields.integer("original_max_position_embeddings", max_position_embeddings, most=MAX_POSITIONS)
    return _parameters(fields, kind, dim, max_position_embeddings, original)


def _refuse_layers(inner: FieldReader) -> None:
    """Refuses parameters for each layer type, which would otherwise silently give the default rotation."""
    for name, value in inner.raw.items():
        if isinstance(value, Mapping):
            inner.fail(
                str(name), "one set of parameters for all layers", fault=ModelFault.UNSUPPORTED_FIELD, actual="an object for a layer type"
            )


def _gathered(reader: FieldReader, inner: FieldReader) -> FieldReader:
    """All fields as one object, under the path of the nested one."""
    fields: dict[str, Any] = {}
    for name in ("rope_theta", "partial_rotary_factor"):
        if name in reader.raw:
            fields[name] = reader.raw[name]
    fields |= inner.raw
    if "rope_type" not in fields and "type" in fields:
        fields["rope_type"] = fields["type"]
    if "original_max_position_embeddings" in reader.raw:
        # Phi-3 writes it outside, where it takes precedence.
        fields["original_max_position_embeddings"] = reader.raw["original_max_position_embeddings"]
    return reader.beside(fields, "rope_parameters." if inner.raw else "")


def _rotated(fields: FieldReader, kind: str, head_dim: int, partial: bool) -> int:
    """The rotated elements of a head; ``proportional`` itself rotates a part of them."""
    dim = head_dim
    if kind != "proportional" and fields.raw.get("partial_rotary_factor") is not None:
        share = fields.number("partial_rotary_factor", 1.0)
        if not partial and share != 1.0:
            fields.fail("partial_rotary_factor", "1.0, as this family turns whole heads", fault=ModelFault.UNSUPPORTED_FIELD)
        elif share > 1.0:
            fields.fail("partial_rotary_factor", "at most 1.0")
        else:
            dim = int(head_dim * share)
    return dim


def _parameters(fields: FieldReader, kind: str, dim: int, longest: int, original: int) -> RopeParameters:
    known = {*ROPE_KINDS[kind].required, *ROPE_KINDS[kind].optional}

    def number(name: str) -> float | None:
        return fields.optional_number(name) if name in known else None

    def factors(name: str) -> tuple[float, ...]:
        return fields.numbers(name, dim // 2) if name in known and fields.raw.get(name) is not None else (1.0,) * (dim // 2)

    # Frequencies must fall with the dimension, and YaRN divides by the logarithm.
    theta = fields.number("rope_theta", DEFAULT_THETA, above=1.0)
    low, high = number("low_freq_factor") or 1.0, number("high_freq_factor") or 4.0
    if high <= low:
        fields.fail("high_freq_factor", f"more than low_freq_factor ({low:g})")
    if kind == "longrope" and original < 2:
        fields.fail("original_max_position_embeddings", "at least 2", actual=original)
    return RopeParameters(
        rope_type=kind,
        rope_theta=theta,
        dim=dim,
        max_position_embeddings=longest,
        original_max_position_embeddings=original,
        factor=number("factor"),
        attention_factor=number("attention_factor"),
        beta_fast=number("beta_fast") or 32.0,
        beta_slow=number("beta_slow") or 1.0,
        mscale=number("mscale"),
        mscale_all_dim=number("mscale_all_dim"),
        truncate=fields.boolean("truncate", True) if "truncate" in known else True,
        short_factor=factors("short_factor"),
        long_factor=factors("long_factor"),
        low_freq_factor=low,
        high_freq_factor=high,
        partial_rotary_factor=min(number("partial_rotary_factor") or 1.0, 1.0),
    )
