"""Prefixes of tensor names in a checkpoint: a family lists them, and the names in the checkpoint decide.

Hugging Face's classes keep the layers of a model in a *body* (``model.``, ``bert.``), and heads beside it (``lm_head``).  A body that is
saved alone has no prefix; a multimodal wrapper adds another one.  Families spell names without prefix.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from rtp_llm.plan.rules import Mapping


@dataclass(frozen=True, slots=True)
class Prefix:
    """The prefix of names in the body, and that of heads."""

    body: str
    head: str = ""


@dataclass(frozen=True, slots=True)
class Prefixes:
    """The prefixes that a family's checkpoints may have, the usual one first.

    modules: first parts of names in the body, which identify a prefix.
    heads: first parts of names outside of the body.
    """

    modules: tuple[str, ...]
    heads: tuple[str, ...]
    known: tuple[Prefix, ...]

    def of(self, names: Collection[str]) -> Prefix:
        """The first prefix of a tensor of the body; the usual one if there is none.

        In a checkpoint with two prefixes no rule knows the tensors of the second one, which are refused.
        """
        for prefix in self.known:
            starts = tuple(f"{prefix.body}{module}." for module in self.modules)
            if any(name.startswith(starts) for name in names):
                return prefix
        return self.known[0]

    def stripped(self, names: Collection[str]) -> frozenset[str]:
        """The names of body and heads, without prefix."""
        prefix = self.of(names)
        heads = tuple(f"{prefix.head}{head}." for head in self.heads)
        found = {name.removeprefix(prefix.head) for name in names if name.startswith(heads)}
        return frozenset(found | {name.removeprefix(prefix.body) for name in names if name.startswith(prefix.body)})

    def mapping(self, mapping: Mapping, names: Collection[str]) -> Mapping:
        """A family's mapping with the prefix of the checkpoint's ``names``."""
        prefix = self.of(names)
        return mapping.under(prefix.body, prefix.head, self.heads)


#: Of a decoder with a head: saved whole, saved without its head, and in multimodal wrappers of transformers 5 and before.
CAUSAL = Prefixes(
    modules=("embed_tokens", "layers", "norm"),
    heads=("lm_head",),
    known=(Prefix("model."), Prefix(""), Prefix("model.language_model."), Prefix("language_model.model.", "language_model.")),
)


def encoder_prefixes(body: str, *heads: str) -> Prefixes:
    """Of an encoder: below ``body`` where it was saved with heads, else without a prefix."""
    return Prefixes(("embeddings", "encoder", "pooler"), heads, (Prefix(body), Prefix("")))
