"""Loading measured: this package's transports and other loaders in turn, each in a process of its own, against the limits
of the machine.  ``rtp_llm.bench.measure.run_bench`` is the entry, ``rtp-llm bench`` the command."""
