"""A matrix to be quantised, with the places for what is made of it."""

from __future__ import annotations

from typing import Any

import torch

from rtp_llm.plan.boxes import Box
from rtp_llm.quantization.inline import Quantiser
from rtp_llm.quantization.scaled import Grid


def on(shape: tuple[int, int], grid: Grid, device: str = "cpu") -> tuple[Quantiser, torch.Tensor, Box, list[tuple[str, Box, torch.Tensor]]]:
    """A transform with a matrix and its two places."""
    rows, columns = ((0, n) for n in shape)
    scales: dict[Any, Box] = {"tensor": ((0, 1),), "channel": (rows, (0, 1))}
    scale = scales.get(grid, tuple((0, -(-n // 128)) for n in shape))
    memory = torch.empty([b - a for a, b in scale], device=device)
    places = [("weight", (rows, columns), torch.empty(shape, dtype=torch.float8_e4m3fn, device=device)), ("weight_scale", scale, memory)]
    return Quantiser(grid), torch.randn(shape).to(device, torch.bfloat16), (rows, columns), places
