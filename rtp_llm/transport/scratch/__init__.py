"""The own reader: threads, pread, straight into the parameter."""
