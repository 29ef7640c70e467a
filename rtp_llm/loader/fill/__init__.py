"""The third step of a load: parameters get their memory and their bytes."""

from rtp_llm.loader.fill.fill import Filled, fill_parameters

__all__ = ["Filled", "fill_parameters"]
