"""Planning asynchronous successive halving: many simulated runs side by side."""
