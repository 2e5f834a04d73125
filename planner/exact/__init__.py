"""Planning with mean times: the exact search over stages and instances held."""
