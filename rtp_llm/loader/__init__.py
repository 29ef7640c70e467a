"""load_model(): the whole road, step by step."""

from rtp_llm.loader.export import export_checkpoint
from rtp_llm.loader.load import LoadedModel, build_plan, load_model
from rtp_llm.loader.report import LoadReport

__all__ = ["LoadReport", "LoadedModel", "build_plan", "export_checkpoint", "load_model"]
