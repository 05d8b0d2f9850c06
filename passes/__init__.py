"""Graphs in, graphs out: capture, the graph, its text and diff, patterns, verifier, manager, and one file a pass."""
