"""What several tests need: import as ``tests.support.<module>``."""
