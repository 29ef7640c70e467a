"""Python's cyclic garbage collector, kept from looking through catalogues and plans while they are made."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """Within it, the collector of this process does not run by itself; before and after, as it was.

    A catalogue or a plan is many small objects without cycles, all of which stay: the collector would look at them again and
    again as they grow, and free nothing.  For 100,000 tensors that took as long as everything else.  Memory that is counted, which
    is nearly all, is freed as ever.  A block that waits or moves bytes does not belong in here.
    """
    if not gc.isenabled():  # whoever paused it, perhaps another thread, starts it again
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        if not gc.get_freeze_count():  # else somebody has taken objects out, and would find them in again
            # To the oldest generation, where they belong; the collector would first look through all that is new, three times.
            gc.freeze()
            gc.unfreeze()
        gc.enable()
