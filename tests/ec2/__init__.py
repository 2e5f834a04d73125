"""EC2 without Amazon, with faults and the bill, for tests and for trying a run; it rents nothing."""

from tests.ec2.core import FakeAws
from tests.ec2.faults import FakeCall, FakeDisconnect, FakeError, Fault
from tests.ec2.principals import BUCKET

__all__ = ["BUCKET", "FakeAws", "FakeCall", "FakeDisconnect", "FakeError", "Fault"]
