"""Harnesses that take whole runs through faults; each replays one seed or point: `python -m tests.harness.…`."""
