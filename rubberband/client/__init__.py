"""Clients of the service, synchronous and asynchronous."""
