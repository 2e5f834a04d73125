"""Submitted experiments: queue, start, watch, limits, logs."""
