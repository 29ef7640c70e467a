"""The first step of a load: headers and config.json become a checked plan and an empty model."""

from rtp_llm.loader.prepare.prepared import Prepared, prepare

__all__ = ["Prepared", "prepare"]
