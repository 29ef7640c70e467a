"""rtp_llm: from a Hugging Face checkpoint directory to rank-local, runtime-ready weights, plan first.

from rtp_llm import LoadConfig, ParallelConfig, build_plan, load_model

loaded = load_model("path/to/checkpoint", device="cpu")
logits = loaded.model(input_ids)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from rtp_llm.version import __version__

if TYPE_CHECKING:
    from rtp_llm.config import LoadConfig, ParallelConfig
    from rtp_llm.errors import RtpLlmError
    from rtp_llm.loader import LoadedModel, build_plan, export_checkpoint, load_model

#: Where each public name lives.  Resolved on first use, so that ``import rtp_llm`` (and ``rtp-llm inspect``) does not
#: wait for torch.
_HOME = {
    "LoadConfig": "rtp_llm.config",
    "ParallelConfig": "rtp_llm.config",
    "RtpLlmError": "rtp_llm.errors",
    "LoadedModel": "rtp_llm.loader",
    "build_plan": "rtp_llm.loader",
    "export_checkpoint": "rtp_llm.loader",
    "load_model": "rtp_llm.loader",
}

__all__ = ["LoadConfig", "LoadedModel", "ParallelConfig", "RtpLlmError", "__version__", "build_plan", "export_checkpoint", "load_model"]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
