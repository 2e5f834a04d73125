"""The logs of trials: how a worker writes them, and pages of them."""
