"""`python -m tests.ec2 -- COMMAND`: try a run with `provider: aws` for nothing, without an account."""

from __future__ import annotations

import contextlib
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from rubberband.cloud.aws.calls import name_in
from rubberband.units import format_duration, format_usd
from tests.ec2.billing import Bill, BillLine
from tests.ec2.core import FakeAws
from tests.ec2.fake_cloud import fake_cloud
from tests.ec2.faults import FakeCall, Fault
from tests.ec2.instance import Instance

_CAPACITY = re.compile(
    r"(?P<type>[^:=]+)(:(?!spot=|on-demand=)(?P<zone>[^:=]+))?(:(?P<market>spot|on-demand))?=(?P<instances>\d+)"
)
_NOT_FOUND, _NOT_RUNNABLE = 127, 126


def main(
    command: Annotated[
        list[str], typer.Argument(metavar="COMMAND", help="What to run, such as `rubberband run experiment.yaml`.")
    ],
    directory: Annotated[
        Path | None,
        typer.Option(
            "--dir",
            metavar="D",
            help="Where consoles, S3 objects and rubberband's own folder (RUBBERBAND_HOME) go and stay. By default a "
            "new temporary folder.",
            show_default=False,
        ),
    ] = None,
    pending_s: Annotated[
        float, typer.Option("--pending", metavar="S", min=0, help="From a launch to running, where billing begins.")
    ] = 2.0,
    invisible_s: Annotated[
        float,
        typer.Option(
            "--invisible", metavar="S", min=0, help="For so long a launched instance is not seen in listings."
        ),
    ] = 0.0,
    capacity: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TYPE[:ZONE][:MARKET]=N",
            help="At most N instances at once of a type (* for any), in a zone, on a market (spot or on-demand). "
            "May be given again.",
            show_default=False,
        ),
    ] = None,
    interrupt_every_s: Annotated[
        float | None,
        typer.Option(
            "--interrupt-every",
            metavar="S",
            min=0.1,
            help="Take a running spot instance away about so often.",
            show_default=False,
        ),
    ] = None,
    notice_s: Annotated[
        float, typer.Option("--notice", metavar="S", min=0, help="Announce that so long before; 0: no notice.")
    ] = 120.0,
    faults: Annotated[
        float,
        typer.Option(
            metavar="P",
            min=0,
            max=0.9,
            help="Share of calls that fail: throttled, server errors, time-outs before and after the call took effect.",
        ),
    ] = 0.0,
    seed: Annotated[int, typer.Option(metavar="N", help="Of prices, faults and interruptions.")] = 0,
    administrator: Annotated[
        bool,
        typer.Option(
            "--admin", help="COMMAND runs with an administrator's keys outside the VPC, as for `rubberband cloud up`."
        ),
    ] = False,
) -> None:
    """Run COMMAND against an EC2 that is not Amazon's: nothing is rented, and no account is needed.

    Instances are processes of this computer which run their real boot scripts, hold their leases and answer for their
    metadata; EC2, SSM, S3, STS, Service Quotas and the price list are served on a local port, with permissions as the
    shipped policies give them. Afterwards everything is ended, the bill that EC2 would have sent is printed on stderr,
    and the exit code is COMMAND's.

    Boot scripts run on this computer as you: write `install: none` in the experiment file, so that machines have this
    computer's Python instead of installing their own, and mind what its set-up commands do.

    Example: python -m tests.ec2 --capacity g4dn.xlarge=2 -- rubberband run experiment.yaml
    """
    fake = FakeAws(time.time, seed=seed, pending_s=pending_s, shutting_down_s=1.0, visible_after_s=invisible_s)
    for word in capacity or []:
        _limit(fake, word)
    if faults:
        fake.fault = _random_faults(random.Random(seed), faults)
    where = _made(directory)
    with fake_cloud(where, fake=fake) as running:
        with _interruptions(fake, interrupt_every_s, notice_s or None, random.Random(seed)):
            code = _run(command, running.outside() if administrator else running.environment)
        left = fake.living
    for instance in left:
        print(f"still there when the command ended: {instance.instance_id} ({_name(instance)})", file=sys.stderr)
    print(_bill_text(fake.bill()), f"consoles and objects are in {where}", sep="\n", file=sys.stderr)
    raise typer.Exit(code)


def _made(directory: Path | None) -> Path:
    where = Path(tempfile.mkdtemp(prefix="rubberband-aws-")) if directory is None else directory.resolve()
    where.mkdir(parents=True, exist_ok=True)
    return where


def _limit(fake: FakeAws, word: str) -> None:
    match = _CAPACITY.fullmatch(word)
    if match is None:
        raise typer.BadParameter(f"{word!r} is not TYPE[:ZONE][:MARKET]=N", param_hint="--capacity")
    market: Any = match["market"]
    any_or = {None: None, "*": None}
    fake.set_capacity(
        int(match["instances"]),
        instance_type=any_or.get(match["type"], match["type"]),
        zone=any_or.get(match["zone"], match["zone"]),
        market=market,
    )


def _random_faults(rng: random.Random, share: float) -> Any:
    def hook(_: FakeCall) -> Fault | None:
        if rng.random() >= share:
            return None
        took_effect = rng.random() < 0.5
        kinds = (Fault.throttled(), Fault.server_error(took_effect=took_effect), Fault.timeout(took_effect=took_effect))
        return rng.choice(kinds)

    return hook


@contextlib.contextmanager
def _interruptions(fake: FakeAws, every_s: float | None, notice_s: float | None, rng: random.Random) -> Iterator[None]:
    """Let spot instances be taken away while in the block."""
    over = threading.Event()

    def interrupt() -> None:
        while every_s is not None and not over.wait(rng.expovariate(1.0 / every_s)):
            if candidates := [one for one in fake.living if _interruptible(one, fake.clock())]:
                fake.reclaim(rng.choice(candidates).instance_id, notice_s=notice_s)

    thread = threading.Thread(target=interrupt, name="interruptions", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _interruptible(instance: Instance, now: float) -> bool:
    return instance.market == "spot" and instance.reclaim_at is None and instance.state(now) == "running"


def _run(command: list[str], environment: dict[str, str]) -> int:
    """Run the command to its end and return its exit code; it hears the signals that this process is sent."""
    try:
        process = subprocess.Popen(command, env=environment)
    except OSError as error:
        print(f"error: {command[0]}: {error.strerror}", file=sys.stderr)
        return _NOT_FOUND if isinstance(error, FileNotFoundError) else _NOT_RUNNABLE
    before = {
        signal.SIGINT: signal.signal(signal.SIGINT, signal.SIG_IGN),  # the terminal sends it to the command as well
        signal.SIGTERM: signal.signal(signal.SIGTERM, lambda *_: process.terminate()),
    }
    try:
        code = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code


def _bill_text(bill: Bill) -> str:
    lines = [_line(line) for line in bill.lines]
    kinds = {"volume": "volumes", "address": "public IPv4 addresses", "nat": "NAT gateway"}
    lines += [f"{name}: {format_usd(bill.side_usd(kind))}" for kind, name in kinds.items() if bill.side_usd(kind)]
    return "\n".join([*lines, f"the bill: {format_usd(bill.total_usd)} for {len(bill.lines)} instances"])


def _line(line: BillLine) -> str:
    return (
        f"{line.instance_id}  {_name(line):12}  {line.instance_type}  {line.zone}  {line.market:9}  "
        f"{format_duration(line.billed_s):>8} at {line.price_usd_per_hour:.4f} USD/h = {format_usd(line.cost_usd)}"
    )


def _name(one: Instance | BillLine) -> str:
    return name_in(one.tags, one.launch_index) or one.tags.get("Name") or "no name"


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command(
        context_settings={"allow_interspersed_args": False, "help_option_names": ["--help", "-h"]}, no_args_is_help=True
    )(main)
    app(prog_name="python -m tests.ec2")
