"""A loaded model, written back as the checkpoint that it came from."""

from rtp_llm.loader.export.export import export_checkpoint

__all__ = ["export_checkpoint"]
