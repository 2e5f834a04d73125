"""Throughput, statistical efficiency and goodput of data-parallel training, as pure functions (Pollux, OSDI '21)."""
