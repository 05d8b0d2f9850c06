"""The dialect `precede::*`. Importing this package registers every op."""

from . import collectives, engram, gate, indexer, kv, linear, quant, rows
from .registry import OPS, Op

__all__ = ["OPS", "Op", "collectives", "engram", "gate", "indexer", "kv", "linear", "quant", "rows"]
