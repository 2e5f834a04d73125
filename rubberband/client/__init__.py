"""A client of the service, synchronous and asynchronous."""
