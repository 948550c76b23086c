"""Work in parts, each written to results.json when it is done, so that whatever stops a run loses one part at most.

Started again with the same configuration, model and versions, a run continues after the last part.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sage_patch.errors import SagePatchError
from sage_patch.evaluation.tables import plain, write_whole

KEPT = "results.previous.json"


class PartsError(SagePatchError, RuntimeError):
    """The results cannot be written, or are not ours; the message says what is safe and what to do."""


class Parts:
    """results.json of one run: facts that are there from the start, and what its parts add.

    identity: what must be equal for finished parts to be used again, by name. `note` says what was found: nothing,
    parts to continue after, or results of another identity, which are kept beside under another name.
    """

    def __init__(self, folder: Path, facts: dict[str, Any], identity: dict[str, Any], fresh: bool = False):
        self.path = folder / "results.json"
        self.note = ""
        config_hash = hashlib.sha256(json.dumps(plain(identity), sort_keys=True).encode()).hexdigest()
        own = {"config_hash": config_hash, "identity": plain(identity)}
        self.results = facts | own | {"complete": False, "parts": [], "resumed": 0, "seconds": 0.0}
        old = _read(self.path)
        if old is None:
            return
        if old.get("config_hash") == config_hash and not fresh:
            done = old["parts"]
            self.note = f"{self.path} holds {len(done)} finished parts of this run ({', '.join(done)}): continuing"
            if old["complete"]:
                self.note = f"{self.path} is complete: nothing is measured again (--fresh measures anew)"
            kept = {k: v for k, v in old.items() if k not in facts} | {"resumed": old["resumed"] + 1}
            self.results |= kept
            if old["complete"]:
                self.results = old
            return
        os.replace(self.path, self.path.with_name(KEPT))
        what = "asked to start anew" if fresh else _difference(old.get("identity"), own["identity"])
        self.note = f"{self.path} is kept as {KEPT}: {what}"

    @property
    def complete(self) -> bool:
        return bool(self.results["complete"])

    def run(self, parts: Mapping[str, Callable[[dict[str, Any]], None]], clock: Callable[[], float]) -> None:
        """Run what is not done yet: each part gets the results and adds to them. clock: seconds, as time.monotonic."""
        for name, part in parts.items():
            if name in self.results["parts"]:
                continue
            start = clock()
            part(self.results)
            self.results["parts"].append(name)
            self.results["seconds"] += clock() - start
            self.write()

    def write(self) -> None:
        """results.json appears whole or stays what it was. Raises PartsError if the disk is full."""
        try:
            write_whole(self.path, json.dumps(plain(self.results), indent=1, allow_nan=False) + "\n")
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            done = len((_read(self.path) or {}).get("parts", []))
            raise PartsError(
                f"the disk is full: {self.path} could not be written; the file of before is whole, with {done} "
                "finished parts. Free some space and give the same command again: it continues there"
            ) from error


def _read(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        raise PartsError(f"{path} is not JSON; move it away, or choose another folder with --output") from None
    return found if isinstance(found, dict) else {}


def _difference(old: Any, new: dict[str, Any]) -> str:
    """What of the identity is not as it was."""
    if not isinstance(old, dict):
        return "it is of another command; starting anew"
    changed = [name for name in new if old.get(name) != new[name]]
    return f"it is of another {' and another '.join(changed)}; starting anew"
