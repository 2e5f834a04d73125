"""The old name of `rubberband.app.hosted`, which a service of version 0.1 starts."""

from __future__ import annotations

import faulthandler
import sys

from rubberband.app.hosted import main

if __name__ == "__main__":
    faulthandler.enable()
    sys.exit(main(sys.argv[1:]))
