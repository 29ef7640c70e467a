"""The second step of a load: by which transport, and whether it fits."""

from rtp_llm.loader.budget.transport import SelectedTransport, fall_back, reader_pool, select_transport

__all__ = ["SelectedTransport", "fall_back", "reader_pool", "select_transport"]
