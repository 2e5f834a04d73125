"""What a call to the fake EC2 costs in this process: `python -m tests.bench.bench_fake_ec2 [rounds]`.

One round launches an instance (with a token, tags and UserData), looks at it by its tag and ends it, as the driver with
the shipped policy, beside a cluster of so many that live on; with and without holding parameters against the model.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from tests.builders.fake_launches import Rental
from tests.ec2 import FakeAws

CLUSTERS = (0, 16)


def milliseconds_per_call(rounds: int, cluster: int, validates: bool) -> dict[str, float]:
    """Operation -> CPU milliseconds of a call."""
    rental = Rental(validates=validates)
    for _ in range(cluster):
        rental.launch(InstanceType="g5.xlarge")
    spent_s = dict.fromkeys(("run_instances", "describe_instances", "terminate_instances"), 0.0)

    def timed(name: str, **params: Any) -> dict[str, Any]:
        started_s = time.process_time()
        result: dict[str, Any] = getattr(rental.ec2, name)(**params)
        spent_s[name] += time.process_time() - started_s
        return result

    for index in range(rounds):
        launched = timed("run_instances", **rental.order(ClientToken=str(index), InstanceType="g5.xlarge"))
        timed("describe_instances", Filters=[{"Name": "tag:rubberband:run", "Values": ["r1"]}])
        timed("terminate_instances", InstanceIds=[launched["Instances"][0]["InstanceId"]])
        rental.clock.sleep(4000)
    return {name: 1000.0 * total_s / rounds for name, total_s in spent_s.items()}


def main() -> None:
    """Print a line for each setting."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    for validates in (True, False):
        for cluster in CLUSTERS:
            costs = milliseconds_per_call(rounds, cluster, validates)
            words = ", ".join(f"{name} {cost:.3f} ms" for name, cost in costs.items())
            print(f"{'validated' if validates else 'unvalidated'}, {cluster} live: {words}")
    started_s = time.process_time()
    for _ in range(rounds):
        FakeAws(time.time)
    print(f"a new account: {1000.0 * (time.process_time() - started_s) / rounds:.3f} ms")


if __name__ == "__main__":
    main()
