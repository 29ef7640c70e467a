"""Quantisation: what a checkpoint declares, which tensors it has, and how a layer stores and uses them."""
