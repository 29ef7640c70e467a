"""rtp_llm: from a Hugging Face checkpoint directory to rank-local, runtime-ready weights, plan first."""
