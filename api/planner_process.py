"""The old name of `rubberband.api.plans.process`, which a service of version 0.1 starts."""

from __future__ import annotations

from rubberband.api.plans.process import main

if __name__ == "__main__":
    main()
