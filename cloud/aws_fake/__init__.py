"""EC2 without Amazon: its behaviour (faults and the bill included) for tests and rehearsals; it rents nothing."""

from rubberband.cloud.aws_fake.core import FakeAws
from rubberband.cloud.aws_fake.faults import FakeCall, FakeDisconnect, FakeError, Fault
from rubberband.cloud.aws_fake.principals import BUCKET

__all__ = ["BUCKET", "FakeAws", "FakeCall", "FakeDisconnect", "FakeError", "Fault"]
