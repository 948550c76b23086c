"""What was found out about a kind of call, kept for the next call of that kind.

A key holds everything that an entry was made from, and entries are never changed: so none can be stale, and threads
need no lock. What is neither in a key nor fixed for the life of a process must not decide anything.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

_MOST = 4096  # kinds of calls; a model has some tens for each length


class PlanCache:
    """A bounded dictionary: full, it starts again from nothing, which costs each kind of call its checks once more."""

    def __init__(self) -> None:
        self._held: dict[Hashable, Any] = {}
        self.get = self._held.get
        self.clear = self._held.clear

    def put(self, key: Hashable, entry: Any) -> None:
        if len(self._held) >= _MOST:
            self.clear()
        self._held[key] = entry

    def __len__(self) -> int:
        return len(self._held)


PLANS = PlanCache()  # of the library, and of what stands on it
