"""Access to the service: tokens, their scopes, and limits of requests."""
