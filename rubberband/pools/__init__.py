"""Pools on this machine: the process of a broker, pages and charts of a pool, and simulations of one."""
