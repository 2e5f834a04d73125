"""The service; not built yet."""
