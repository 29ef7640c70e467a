"""Weights through fastsafetensors: read in bounded chunks, on one rank or once for a group of them."""
