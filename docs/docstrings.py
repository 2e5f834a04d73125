"""Takes docstrings that are completed when their module is imported: those of the domains of a search space."""

import importlib
from typing import Any

import griffe


class Completed(griffe.Extension):
    """Replaces docstrings in the source by those of the imported functions."""

    def on_function_instance(self, *, func: griffe.Function, **_: Any) -> None:
        """Take the docstring of a function of the search space."""
        if func.parent is not None and func.parent.path == "rubberband.spec.space" and func.docstring is not None:
            func.docstring.value = getattr(importlib.import_module(func.parent.path), func.name).__doc__
