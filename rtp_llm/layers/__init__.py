"""Modules that state which slots fill their parameters."""
