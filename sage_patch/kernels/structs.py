"""C structs packed by the names of their fields.

The tables of library.py and pages.py list the fields of sage2.h's structs in order; a test reads every packed field
back in C by its name.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any


class CStruct:
    """A C struct of these fields, in order: name=code, a code of the struct module, with a count for an array ("3q").

    `pack(name=value, ...)` gives its bytes: a tuple for an array, zeros for what is not named. `pack_in_order(...)`: of
    all values, in the order of the fields.
    """

    pack: Callable[..., bytes]

    def __init__(self, **fields: str) -> None:
        self.fields = fields
        self._struct = struct.Struct("@" + "".join(fields.values()))
        self.size = self._struct.size
        self.pack_in_order = self._struct.pack
        # A function with the fields as its arguments: the call is checked by name and costs no dictionary.
        lengths = {name: int(code[:-1]) for name, code in fields.items() if len(code) > 1}
        arguments = ", ".join(f"{n}={(0,) * lengths[n] if n in lengths else 0}" for n in fields)
        values = ", ".join(f"*{n}" if n in lengths else n for n in fields)
        made: dict[str, Any] = {"packed": self._struct.pack}
        exec(f"def pack(*, {arguments}):\n return packed({values})", made)
        self.pack = made["pack"]

    def unpack(self, data: bytes) -> dict[str, Any]:
        """The fields of packed bytes by name, an array as a tuple."""
        values = iter(self._struct.unpack(data[: self.size]))
        counts = {name: int(code[:-1] or 1) for name, code in self.fields.items()}
        return {n: next(values) if c == 1 else tuple(next(values) for _ in range(c)) for n, c in counts.items()}
