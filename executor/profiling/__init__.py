"""Measuring a profile: which points, by which runs, and what they add up to."""
