"""How often the interpreter looks for garbage that refers to itself.

Routers and gateways keep hundreds of thousands of objects for as long as they run (an index of
blocks, decisions that are open, a vocabulary), and make few cycles: reference counts free nearly
everything. As it comes, CPython looks at all young objects again and again, and now and then at all
there are, which takes up to a tenth of a second and empties the processor's caches.
"""

from __future__ import annotations

import gc

THRESHOLDS = (10_000, 20, 20)
"""More young objects than were freed, before they are looked at; and how often that is done before
older ones are: seldom, but what a cycle holds does not wait for ever."""


def settle() -> None:
    """To be called when a process has made what is permanent: no collection walks over that."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
