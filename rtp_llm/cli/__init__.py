"""The command line; ``main`` is the console script ``rtp-llm``."""

from rtp_llm.cli.app import main

__all__ = ["main"]
