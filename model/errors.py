"""What can go wrong on the user's side, as one family: every message says what was found, where, and what to do."""

from __future__ import annotations


def shown(value: object) -> str:
    """`value` as a message quotes it: its repr on one line, cut where it is long."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # an integer of too many digits has no repr, and neither have some objects of users
        return f"a {type(value).__name__} that cannot be printed"
    return text if len(text) <= 200 else f"{text[:197]}..."


class PrecedeError(Exception):
    """Base of all errors that a user can cause; the command line prints them in one line and exits with 2."""


class ConfigError(PrecedeError):
    """A config.json that does not describe a model of this family; names the offending key."""


class CheckpointError(PrecedeError):
    """A checkpoint directory that cannot be read; names the tensor and the file."""


class BatchError(PrecedeError):
    """A step that no batch can be built from (ids out of range, pages missing, too many tokens)."""
