"""``python -m rtp_llm.cli``, for torchrun and for trees that are not installed."""

import sys

from rtp_llm.cli.app import main

if __name__ == "__main__":
    sys.exit(main())
