"""Every operation that the fake has: (service, operation) -> what carries it out."""

from __future__ import annotations

from collections.abc import Mapping

from rubberband.cloud.aws_fake.account import ACCOUNTS
from rubberband.cloud.aws_fake.buckets import BUCKETS
from rubberband.cloud.aws_fake.describing import DESCRIBING
from rubberband.cloud.aws_fake.images import IMAGES
from rubberband.cloud.aws_fake.launching import LAUNCHING
from rubberband.cloud.aws_fake.networks import NETWORKS
from rubberband.cloud.aws_fake.offerings import OFFERINGS
from rubberband.cloud.aws_fake.parameters import PARAMETERS
from rubberband.cloud.aws_fake.placement_groups import PLACEMENT_GROUPS
from rubberband.cloud.aws_fake.price_list import PRICE_LIST
from rubberband.cloud.aws_fake.request import Operation
from rubberband.cloud.aws_fake.schedules import SCHEDULES

OPERATIONS: Mapping[tuple[str, str], Operation] = {
    **LAUNCHING,
    **DESCRIBING,
    **NETWORKS,
    **PLACEMENT_GROUPS,
    **OFFERINGS,
    **IMAGES,
    **PARAMETERS,
    **ACCOUNTS,
    **PRICE_LIST,
    **BUCKETS,
    **SCHEDULES,
}
