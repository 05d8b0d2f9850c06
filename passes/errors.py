"""What can go wrong between an eager model and a rewritten graph."""

from __future__ import annotations

from precede.model.errors import PrecedeError


class CaptureError(PrecedeError):
    """A model or a batch that cannot become one graph; names the module and the source line."""


class GraphError(PrecedeError):
    """A question about a graph that has no answer (no such value, wrong number of inputs)."""


class PatternError(PrecedeError):
    """A pattern that cannot be traced or whose scalars change its structure; names the pattern."""


class RewriteError(PrecedeError):
    """A replacement that would change a value's type or use it before it exists; names the values."""


class VerifyError(PrecedeError):
    """A pass that left an illegal graph; names the pass and the node."""


class PassError(PrecedeError):
    """A pipeline that did not do what it promised, or was asked for something unknown; names the pass."""
