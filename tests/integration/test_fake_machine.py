"""The fake's instances as processes: they boot, hold their lease, end themselves and are ended, and leave nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.builders.waiting import eventually
from tests.ec2.core import FakeAws
from tests.ec2.fake_cloud import FakeCloud, fake_cloud
from tests.ec2.instance import Instance

ARM = """
    DIR="${RUBBERBAND_ROOT:-}/var/lib/rubberband"
    mkdir -p "$DIR"
    touch -d "@$(($(date +%s) + LEASE))" "$DIR/lease"
    printf '%s\\n' 'if [[ $(date +%s) -ge $(stat -c %Y "$1") ]]; then' \\
        'echo lease ended; shutdown -h now; fi' > "$DIR/check"
    systemd-run --unit=rubberband-lease --on-active=0.2 --on-unit-active=0.2 --timer-property=AccuracySec=1s \\
        /bin/bash "$DIR/check" "$DIR/lease"
    systemd-run --unit=rubberband-stop --on-active=LIFETIME shutdown -h now
    echo armed
"""


AS_SOON_AS_EXTENDED = 'until [[ $(stat -c %Y "$DIR/lease") -gt $(($(date +%s) + 60)) ]]; do sleep 0.05; done; '
"""However long a test takes to extend a lease, nobody looks at it before."""


@pytest.fixture(scope="module")
def aws(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeCloud]:
    with fake_cloud(tmp_path_factory.mktemp("aws")) as running:
        yield running
    assert not running.machines.processes()
    assert not running.fake.living


def launch(aws: FakeCloud, script: str, **extra: Any) -> Instance:
    words = {"InstanceInitiatedShutdownBehavior": "terminate", "UserData": textwrap.dedent(script).lstrip()}
    return aws.fake.launched("g4dn.xlarge", **words, **extra)


def script(body: str, lease: int = 600, lifetime: float = 600) -> str:
    arm = ARM.replace("LEASE", str(lease), 1).replace("LIFETIME", str(lifetime), 1)
    return "#!/bin/bash\n" + textwrap.dedent(arm) + textwrap.dedent(body)


def ended(aws: FakeCloud, machine: Instance) -> bool:
    return not machine.lives() and not aws.machines.processes(machine.instance_id)


def says(aws: FakeCloud, machine: Instance, text: str) -> None:
    eventually(lambda: text in aws.machines.console(machine.instance_id), f"{text!r} on the console")


def test_user_data_runs_with_the_machines_own_environment(aws: FakeCloud, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_OF_THE_DRIVER", "1")
    machine = launch(
        aws,
        script("""
            python3 -c 'import sys, boto3, rubberband; print("python", sys.version_info[:2])'
            echo "secret=[${SECRET_OF_THE_DRIVER:-}] options=[$RUBBERBAND_RAY_OPTIONS] home=[$HOME]"
            sudo -E echo as root
            echo booted
        """),
    )
    says(aws, machine, "booted")
    console = aws.machines.console(machine.instance_id)
    assert f"python {sys.version_info[:2]}" in console
    assert "as root" in console
    assert "secret=[]" in console
    assert "--temp-dir /tmp/" in console
    assert f"home=[{aws.machines.disk(machine.instance_id)}/root]" in console
    assert machine.lives()
    aws.fake.power_off(machine.instance_id)


@pytest.mark.long
def test_a_machine_ends_with_its_lease_unless_it_is_extended(aws: FakeCloud) -> None:
    short = launch(aws, script("sleep 600", lease=2))
    extended = launch(aws, script("sleep 600", lease=2).replace("systemd-run", AS_SOON_AS_EXTENDED + "systemd-run", 1))
    lease = aws.machines.disk(extended.instance_id) / "var/lib/rubberband/lease"
    eventually(lease.with_name("check").exists, "a lease, and who will look at it")
    later = time.time() + 600
    os.utime(lease, (later, later))
    says(aws, extended, "armed")
    eventually(lambda: ended(aws, short), "the end of the lease")
    says(aws, short, "lease ended")
    assert short.state_reason == "Client.InstanceInitiatedShutdown"
    assert extended.lives()
    os.utime(lease, (0, 0))
    eventually(lambda: ended(aws, extended), "a lease that was moved to the past")
    assert extended.state_reason == "Client.InstanceInitiatedShutdown"


def test_the_hard_stop_ends_a_machine_with_any_lease(aws: FakeCloud) -> None:
    machine = launch(aws, script("sleep 600", lifetime=0.3))
    eventually(lambda: ended(aws, machine), "the hard stop")
    assert machine.state_reason == "Client.InstanceInitiatedShutdown"


def test_shutdown_from_inside_ends_everything_and_stops_the_bill(aws: FakeCloud) -> None:
    machine = launch(aws, script("(setsid sleep 600 &) ; env -i sleep 600 & shutdown -h now; sleep 600"))
    eventually(lambda: ended(aws, machine), "the end")
    line = next(line for line in aws.fake.bill().lines if line.instance_id == machine.instance_id)
    assert line.ended_at is not None
    assert not aws.machines.disk(machine.instance_id).exists()


@pytest.mark.parametrize("how", ["terminate", "reclaim", "crash"])
def test_any_end_of_a_machine_leaves_no_process(aws: FakeCloud, how: str) -> None:
    spot: dict[str, Any] = {"InstanceMarketOptions": {"MarketType": "spot"}} if how == "reclaim" else {}
    machine = launch(aws, script("trap '' TERM; (setsid nohup sleep 600 &); echo ready; sleep 600"), **spot)
    says(aws, machine, "ready")
    eventually(lambda: len(aws.machines.processes(machine.instance_id)) >= 3, "its processes")
    if how == "terminate":
        aws.fake.session("admin").client("ec2").terminate_instances(InstanceIds=[machine.instance_id])
    elif how == "reclaim":
        aws.fake.reclaim(machine.instance_id, notice_s=0.3)
    else:
        first = int((aws.machines.disk(machine.instance_id) / "run/init.pid").read_text())
        os.kill(first, signal.SIGKILL)
    eventually(lambda: ended(aws, machine), "the end of all processes")
    assert aws.machines.processes(machine.instance_id) == []


def test_units_start_when_asked_once_or_again_and_not_twice_under_a_name(aws: FakeCloud) -> None:
    machine = launch(
        aws,
        """
        #!/bin/bash
        export MINE=1
        systemd-run --unit=now --setenv=GIVEN=2 --property=TimeoutStopSec=10s -- \\
            /bin/bash -c 'echo "now [$MINE] [$GIVEN]"'
        systemd-run --unit=again --on-active=100ms --on-unit-active=0.1s /bin/bash -c 'echo tick'
        systemd-run --unit=again --on-active=1 true || echo "refused twice"
        systemd-run --unit=late --on-active="1h 30min" echo too soon
        systemd-run --on-unit-active=1 true || echo "refused endless"
        systemd-run --unit=missing /no/such/program
        systemd-run --no-such-option true || echo "refused option"
        """,
    )
    eventually(lambda: aws.machines.console(machine.instance_id).count("tick") >= 3, "three ticks")
    says(aws, machine, "refused option")
    says(aws, machine, "now [] [2]")
    console = aws.machines.console(machine.instance_id)
    assert "refused twice" in console
    assert "refused endless" in console
    assert "too soon" not in console.replace("echo too soon", "")
    aws.fake.power_off(machine.instance_id)


def test_a_machine_that_installs_rubberband_does_not_see_this_computers(aws: FakeCloud) -> None:
    machine = launch(aws, '#!/bin/bash\nREQUIREMENTS=(./wheels/a.whl)\necho "path=${PYTHONPATH:-none}"\n')
    says(aws, machine, "path=none")
    aws.fake.power_off(machine.instance_id)


def test_a_machine_boots_after_its_delay(tmp_path: Path) -> None:
    with fake_cloud(tmp_path, fake=FakeAws(time.time, pending_s=0.2), boot_s=0.3) as aws:
        machine = launch(aws, "#!/bin/bash\necho up")
        eventually(lambda: "up" in aws.machines.console(machine.instance_id), "booting")
        assert time.time() >= machine.running_at + 0.3
        assert machine.running_at == pytest.approx(machine.launched_at + 0.2)
        booting = launch(aws, "#!/bin/bash\necho up")
    assert not machine.lives()
    assert not booting.lives()


DYING_CLOUD = """
import sys
from pathlib import Path
from tests.ec2.fake_cloud import fake_cloud
from tests.builders.waiting import eventually
from tests.integration.test_fake_machine import launch, says, script
with fake_cloud(Path(sys.argv[1])) as aws:
    machine = launch(aws, script("trap '' TERM; (setsid sleep 600 &); echo ready; sleep 600"))
    says(aws, machine, "ready")
    eventually(lambda: len(aws.machines.processes()) >= 3, "its processes")
    print(*aws.machines.processes(), flush=True)
    sys.stdin.read()
"""


@pytest.mark.long
def test_machines_end_when_the_cloud_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", DYING_CLOUD, str(tmp_path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    cloud = subprocess.Popen(command, text=True, cwd=Path(__file__).parents[2], **pipes)
    assert cloud.stdin is not None
    assert cloud.stdout is not None
    processes = [int(word) for word in cloud.stdout.readline().split()]
    cloud.stdout.close()
    assert len(processes) >= 3
    cloud.kill()
    cloud.wait()
    cloud.stdin.close()
    eventually(lambda: not any(map(psutil.pid_exists, processes)), "the end of the machines")
