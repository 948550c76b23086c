"""What was measured so far, in a file: whatever stops a run loses the piece of work at hand, and no more.

Started again with the same identity (configuration, model and versions), a run goes on from there.
"""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

from sage_patch.errors import SagePatchError
from sage_patch.evaluation.tables import plain, write_whole


class CheckpointError(SagePatchError, RuntimeError):
    """A file cannot be written, or is not ours; the message says what is safe and what to do."""


class Checkpoint:
    """A file of what a run has measured.

    identity: what must be equal for it to be used again, by name. found: what the file holds of this identity, or {}.
    note: what became of a file of another identity; it is kept beside, under another name. ours: nobody else has files
    of this name, so one that is no JSON was cut off and is kept beside too. Raises CheckpointError for one that is not.
    """

    def __init__(self, path: Path, identity: dict[str, Any], fresh: bool = False, ours: bool = False):
        self.path = path
        self.identity: dict[str, Any] = json.loads(json.dumps(plain(identity)))
        self.found: dict[str, Any] = {}
        self.note = ""
        old = self._read(ours)
        if old is None:
            return
        if old.get("identity") == self.identity and not fresh:
            self.found = old
            return
        os.replace(path, kept_as(path))
        self.note = f"{path} is kept as {kept_as(path).name}: {'asked to start anew' if fresh else self._changed(old)}"

    def write(self, content: dict[str, Any], kept: str = "") -> None:
        """The file appears whole or stays what it was. kept: what the file of before holds, for the error's message."""
        text = json.dumps(plain(content | {"identity": self.identity}), indent=1, allow_nan=False) + "\n"
        write_kept(self.path, text, f"the file of before is whole{kept}" if self.path.is_file() else "")

    def _read(self, ours: bool) -> dict[str, Any] | None:
        if not self.path.is_file():
            return None
        try:
            found = json.loads(self.path.read_text(encoding="utf-8"))
        except ValueError:
            if ours:
                return {}
            message = f"{self.path} is not JSON; move it away, or choose another folder with --output"
            raise CheckpointError(message) from None
        return found if isinstance(found, dict) else {}

    def _changed(self, old: dict[str, Any]) -> str:
        """What of the identity is not as it was."""
        before = old.get("identity")
        if not isinstance(before, dict):
            return "it is of another command; starting anew"
        changed = [name for name in self.identity if before.get(name) != self.identity[name]]
        return f"it is of another {' and another '.join(changed)}; starting anew"


def kept_as(path: Path) -> Path:
    """Where a file of another identity is kept: results.previous.json."""
    return path.with_name(f"{path.stem}.previous{path.suffix}")


def write_kept(path: Path, text: str, kept: str) -> None:
    """Write a whole file, or raise CheckpointError, which says what is `kept`; an older file stays as it was."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text)
    except OSError as error:
        full = "the disk is full: " if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        raise CheckpointError(
            f"{full}{path} could not be written ({error.strerror or error})"
            + (f"; {kept}" if kept else "")
            + ". Make room or name another place, and give the same command again: it goes on from there"
        ) from error
