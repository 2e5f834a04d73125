"""EC2 without Amazon: its behaviour (faults and the bill included) for tests and rehearsals; it rents nothing."""

from tests.ec2.core import FakeAws
from tests.ec2.faults import FakeCall, FakeDisconnect, FakeError, Fault
from tests.ec2.principals import BUCKET

__all__ = ["BUCKET", "FakeAws", "FakeCall", "FakeDisconnect", "FakeError", "Fault"]
