"""load_model(): the whole road, step by step."""
