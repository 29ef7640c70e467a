"""What each rank does in the tests of latent attention over ranks.  Imported anew by every process."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from rtp_llm import ParallelConfig, load_model
from rtp_llm.loader.export import export_checkpoint


def logits(
    folders: list[str], tp_size: int, ep_size: int, ids: torch.Tensor, steps: list[int]
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """For each checkpoint the logits of one pass, and of a pass in ``steps`` with a cache; each is exported beside."""
    rank = int(os.environ["RANK"])
    parallel = ParallelConfig(tp_size=tp_size, tp_rank=rank % tp_size, ep_size=ep_size, ep_rank=rank // tp_size)
    results = {}
    for folder in folders:
        loaded = load_model(folder, device="cpu", parallel=parallel)
        with torch.inference_mode():
            cache = loaded.model.new_cache(len(ids), ids.shape[1])
            stepped = torch.cat([loaded.model(part, cache) for part in ids.split(steps, dim=1)], dim=1)
            results[folder] = (loaded.model(ids), stepped)
        export_checkpoint(loaded, f"{folder}-out")
    dist.destroy_process_group()
    return results
