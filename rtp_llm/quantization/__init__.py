"""Quantisation: what a checkpoint declares, what its tensors are, and how a layer holds and uses them."""
