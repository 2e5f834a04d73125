"""The old name of `rubberband.app.hosted`, which a service of version 0.1 starts."""

from __future__ import annotations

import runpy

if __name__ == "__main__":
    runpy.run_module("rubberband.app.hosted", run_name="__main__", alter_sys=True)
