"""Graphs to an engine folder: targets, backends, parts, manifest."""
