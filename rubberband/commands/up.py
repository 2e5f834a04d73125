"""`rubberband up`: start the head, a machine in the VPC from which experiments run on EC2."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rubberband.commands.estimate import Overrides
from rubberband.errors import InputError
from rubberband.units import format_duration

if TYPE_CHECKING:
    from rubberband.cloud.aws.head import HeadInstance
    from rubberband.cloud.aws.machines import Session
    from rubberband.experiment import Experiment


def up(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The experiment file.", show_default=False)],
    overrides: Overrides = None,
) -> None:
    """Start the head on EC2, or find it.

    The head is an instance in your VPC, with rubberband and the experiment's folder on it, from which `rubberband run`
    works as on any machine. There is one for each owner and region (resources.aws.owner, resources.region); it costs
    money until `rubberband down`. When nothing has run on it for resources.aws.head_idle (1 h) it stops itself, and
    then costs its disk alone. The folder comes along if resources.checkpoints is a bucket (s3://...).
    """
    from rubberband.cloud.aws.extra import open_aws
    from rubberband.files import load_experiment

    experiment = load_experiment(file, overrides or [])
    if experiment.resources.provider != "aws":
        raise InputError(
            f"resources.provider: {experiment.resources.provider} needs no head; write provider: aws, or give "
            "-s resources.provider=aws"
        )
    session = open_aws(experiment.resources.region)

    from rubberband.cloud.aws.head import ensure_head, upload_folder

    path = Path(os.path.abspath(file))
    root = _root(path)
    folder = upload_folder(session, experiment.resources.checkpoints, experiment.name, _packed(root))
    head = ensure_head(session, experiment.resources, folders=[folder] if folder else [])
    settings = [word for override in overrides or [] for word in ("-s", override)]
    run = shlex.join(("rubberband", "run", str(path.relative_to(root)), *settings))
    for line in _told(session, head, experiment, run, folder):
        print(line)


def _root(path: Path) -> Path:
    """What `rubberband run` searches for code: the working folder, if the file is in it, else the file's own."""
    here = Path.cwd()
    return here if path.is_relative_to(here) else path.parent


def _packed(root: Path) -> bytes:
    from rubberband.executor.ray.code import pack

    return pack([str(root)]).archive


def _told(session: Session, head: HeadInstance, experiment: Experiment, run: str, folder: str | None) -> list[str]:
    state = "was started; it installs rubberband for some minutes" if head.started else "runs already"
    lines = [
        f"head {head.instance_id} ({head.instance_type}, {head.zone}) {state}{_cost(session, head.instance_type)}",
        f"get in:  aws ssm start-session --target {head.instance_id} --region {session.region}",
        "follow:  tail -f /var/log/rubberband.log",
    ]
    if folder is None:
        lines.append("copy:    the experiment's folder to the head (resources.checkpoints is no bucket to pass it on)")
    else:
        if not head.started:
            lines.append(f"update:  sudo rubberband-fetch {folder}")
        run = f"cd /opt/rubberband/{experiment.name} && {run}"
    owner = experiment.resources.aws.owner
    return [
        *lines,
        f"run:     {run}  (in tmux, to outlive the session)",
        *_idle(experiment),
        f"end all: rubberband down --owner {owner} --region {session.region}",
    ]


def _idle(experiment: Experiment) -> list[str]:
    idle_s = experiment.resources.aws.head_idle_s
    if not idle_s:
        return []
    return [f"idle:    it stops itself when nothing has run for {format_duration(idle_s)}; its disk stays"]


def _cost(session: Session, instance_type: str) -> str:
    """What it costs; nothing where AWS does not tell."""
    from rubberband.cloud.aws.pricing import on_demand_price
    from rubberband.cloud.aws.resolving import in_one_line
    from rubberband.units import format_usd

    try:
        with in_one_line():
            price_usd = on_demand_price(session, instance_type)
    except InputError as error:
        print(f"note: what a {instance_type} costs is not known: {error}", file=sys.stderr)
        return ""
    return "" if price_usd is None else f"; {format_usd(price_usd)} an hour until `rubberband down`"
