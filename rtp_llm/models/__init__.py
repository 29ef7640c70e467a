"""Model families: configuration, mapping, model."""
