"""Rent: providers of instances, the catalogue and the prices."""
