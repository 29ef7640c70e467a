"""What each rank does in the tensor-parallel tests.  Imported anew by every process."""

from __future__ import annotations

import torch

from rtp_llm import load_model


def causal(folders: list[str], ids: torch.Tensor, steps: list[int]) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """For each checkpoint the logits of one pass, and of a pass in ``steps`` with a cache."""
    results = {}
    for folder in folders:
        model = load_model(folder, device="cpu").model
        with torch.inference_mode():
            cache = model.new_cache(len(ids), ids.shape[1])
            stepped = torch.cat([model(part, cache) for part in ids.split(steps, dim=1)], dim=1)
            results[folder] = (model(ids), stepped)
    return results


def encoder(folders: list[str], ids: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
    """For each checkpoint the last hidden state."""
    with torch.inference_mode():
        return {folder: load_model(folder, device="cpu").model(ids, mask) for folder in folders}


def both(
    causal_folders: list[str], encoder_folders: list[str], ids: torch.Tensor, steps: list[int], mask: torch.Tensor
) -> tuple[dict[str, tuple[torch.Tensor, torch.Tensor]], dict[str, torch.Tensor]]:
    """Both, since starting a process costs more than either."""
    return causal(causal_folders, ids, steps), encoder(encoder_folders, ids, mask)
