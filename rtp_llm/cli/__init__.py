"""The rtp-llm command."""
