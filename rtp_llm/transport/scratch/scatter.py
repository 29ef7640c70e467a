"""Scatters a buffer that holds many parts to their places, by few calls of torch.

Each call of torch releases the interpreter's lock, and then waits for it behind all other readers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import itemgetter

import torch

from rtp_llm.transport.interface import Memory, Place


def cut(memory: torch.Tensor, spans: Iterable[tuple[int, int]]) -> list[torch.Tensor]:
    """Pieces of flat ``memory``, given as (first byte, bytes) in rising order, by one call of torch."""
    sizes: list[int] = []
    wanted: list[int] = []
    behind = 0
    for at, nbytes in spans:
        if at > behind:
            sizes.append(at - behind)
        wanted.append(len(sizes))
        sizes.append(nbytes)
        behind = at + nbytes
    pieces = memory.split_with_sizes([*sizes, memory.numel() - behind])
    return [pieces[number] for number in wanted]


def scatter(parts: Sequence[tuple[Place, torch.Tensor]]) -> None:
    """Copies flat ``uint8`` contents to their places: one call of torch for each memory, and one for all copies."""
    within: dict[Memory, list[tuple[int, torch.Tensor]]] = {}
    for place, content in parts:
        within.setdefault(place.memory, []).append((place.at, content))
    places: list[torch.Tensor] = []
    contents: list[torch.Tensor] = []
    for memory, pieces in within.items():
        pieces.sort(key=itemgetter(0))
        places += cut(memory.tensor, [(at, content.numel()) for at, content in pieces])
        contents += [content for _, content in pieces]
    if places:
        torch._foreach_copy_(places, contents, non_blocking=True)
