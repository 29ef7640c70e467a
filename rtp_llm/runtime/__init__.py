"""Enough of a runtime to prove the weights."""
