"""Plan previews, and the processes that compute them."""
