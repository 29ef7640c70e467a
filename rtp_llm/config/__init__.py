"""Settings, each declared once: flag, environment variable, default, allowed values, help, documentation."""

from rtp_llm.config.faults import ConfigFault
from rtp_llm.config.load import LoadConfig
from rtp_llm.config.parallel import ParallelConfig

__all__ = ["ConfigFault", "LoadConfig", "ParallelConfig"]
