"""What is in a checkpoint directory: headers, index, catalogue. No torch.nn, no model knowledge."""
