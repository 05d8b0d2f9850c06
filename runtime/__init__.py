"""Serves an engine folder: programs, sampling, generation. Never imports the passes."""
