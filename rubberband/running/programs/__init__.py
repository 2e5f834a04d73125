"""Programs, sweeps and objectives that people have, as `rubberband init` and `check` read them."""
