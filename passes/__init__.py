"""Graphs in, graphs out: capture, the graph with its text and diff, patterns, verifier, manager, and one file a pass."""
