"""The REST routes, a module for each kind of resource."""
