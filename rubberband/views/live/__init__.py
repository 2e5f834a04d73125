"""A run while it runs: the live view, its lines, and its status."""
