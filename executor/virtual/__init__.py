"""Experiments on a virtual clock: for predictions that are checked, and for tests."""
