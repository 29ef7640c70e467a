"""A checkpoint's declaration of its quantisation, which is untrusted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rtp_llm.checkpoint.fields import FieldFaults, FieldReader
from rtp_llm.quantization.faults import QuantFault, QuantizationError
from rtp_llm.quantization.names import Match, Names, texts
from rtp_llm.quantization.scheme import Spec


@dataclass(frozen=True, slots=True)
class Group:
    """Modules that ``names`` match are quantised by ``spec``; all linear layers where ``names`` is None."""

    spec: Spec
    names: Names | None = None


@dataclass(frozen=True, slots=True)
class Declared:
    """A declaration, in any format.

    ``groups`` are tried in order.  ``complete``: the lists name every plain linear layer, so another plain one
    is a contradiction; else the tensors alone decide.
    ``experts_only``: the method quantises experts alone.
    ``options``: what reports show of the declaration.
    """

    method: str
    groups: tuple[Group, ...]
    excluded: Names = Names()
    complete: bool = False
    options: tuple[tuple[str, str], ...] = ()
    experts_only: bool = False

    @property
    def specs(self) -> tuple[Spec, ...]:
        return tuple(group.spec for group in self.groups)

    def group_of(self, name: str) -> tuple[Group | None, tuple[str, ...]]:
        """The group of the module ``name`` (the checkpoint's spelling), and the entries that match; None if it is excluded or in
        no group."""
        entries = self.excluded.matching(name)
        if entries:
            return None, entries
        for group in self.groups:
            if group.names is None:
                return group, ()
            entries = group.names.matching(name)
            if entries:
                return group, entries
        return None, ()


#: Formats write null for absent fields, and words in any case.
_FAULTS = FieldFaults(QuantFault.BAD_DECLARATION, QuantFault.UNSUPPORTED_SCHEME, QuantizationError, lenient=True)


def declaration(raw: Mapping[str, Any], file: str, path: str) -> FieldReader:
    """A reader of the declaration in ``file`` under ``path``; it raises ``QuantizationError``."""
    return FieldReader(raw, _FAULTS, file=file, path=path)


def read_names(fields: FieldReader, match: Match, *lists: str) -> Names:
    """The module names of all these fields, as one list."""
    found: list[str] = []
    for name in lists:
        listed = texts(fields.raw.get(name))
        if listed is None:
            fields.fail(name, "a list of names")
        else:
            found += listed
    return Names(tuple(found), match)
