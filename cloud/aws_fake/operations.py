"""Every operation that the fake has: (service, operation) -> what carries it out."""

from __future__ import annotations

from collections.abc import Mapping

from rubberband.cloud.aws_fake.describing import DESCRIBING
from rubberband.cloud.aws_fake.launching import LAUNCHING
from rubberband.cloud.aws_fake.request import Operation

OPERATIONS: Mapping[tuple[str, str], Operation] = {**LAUNCHING, **DESCRIBING}
