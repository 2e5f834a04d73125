"""Overrides the settings of the script that executes this text: a file of settings, and --key=value."""

import sys
from ast import literal_eval

for arg in sys.argv[1:]:
    if "=" not in arg:
        assert not arg.startswith("--")
        print(f"Overriding config with {arg}:")
        exec(open(arg).read())
    else:
        assert arg.startswith("--")
        key, val = arg[2:].split("=", 1)
        if key not in globals():
            raise ValueError(f"Unknown config key: {key}")
        try:
            attempt = literal_eval(val)
        except (SyntaxError, ValueError):
            attempt = val
        assert type(attempt) is type(globals()[key]), f"{key} is a {type(globals()[key]).__name__}"
        print(f"Overriding: {key} = {attempt}")
        globals()[key] = attempt
