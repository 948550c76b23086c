"""The base of every error that sage_patch raises on purpose, so that one `except` finds them all.

Each error is also the builtin it is a case of: a `ConfigError` is a ValueError, a `BuildError` a RuntimeError. A class
of its own exists where somebody may want to catch that error alone; it stands beside the code that raises it.
"""

from __future__ import annotations


class SagePatchError(Exception):
    """Something that sage_patch refuses or cannot do; the message says what was asked, what was found, what to do."""


class ModelError(SagePatchError, ValueError):
    """A model that cannot be loaded as it was asked for; the message says what was looked for and what to do."""
