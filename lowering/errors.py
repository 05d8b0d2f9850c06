"""What can go wrong between a graph and a running engine; every message names what was found and what to do."""

from __future__ import annotations

from precede.model.errors import PrecedeError


class BackendUnavailable(PrecedeError):  # noqa: N818  the public name
    """A backend was asked for by name and cannot build or run here; says why, and which backend to use instead."""


class UnsupportedOnTarget(PrecedeError):  # noqa: N818  the public name
    """A target that this package does not know, or something that the chosen target cannot do."""


class EngineMismatch(PrecedeError):  # noqa: N818  the public name
    """A sound engine that does not fit what it meets (checkpoint, torch, machine); names expected and found."""


class BundleError(PrecedeError):
    """An engine folder or program part that is damaged or malformed, or that cannot be written."""
