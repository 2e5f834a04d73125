"""`rubberband pool up`, `status` and `down`: instances that several experiments share; and `rubberband simulate`.

A simulation tries sharing policies on a workload, on a virtual clock. It starts and spends nothing.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rubberband.commands.common import (
    HtmlOption,
    TableFormat,
    TableOption,
    YesOption,
    argument,
    confirm_bill,
    group,
    option,
    print_json,
    print_table,
    say,
    write_page,
)
from rubberband.errors import InputError
from rubberband.units import counted, format_duration, format_usd

if TYPE_CHECKING:
    from rubberband.spec.pool import PoolFolder

pool = group("pool", "Manage a pool that experiments share.")


def pool_names(incomplete: str) -> list[str]:
    """Return the names of the pools that are up and begin so, for completion in a shell."""
    from rubberband.installation import default_home
    from rubberband.spec.pool import pools_up

    return [folder.name for folder in pools_up(default_home()) if folder.name.startswith(incomplete)]


NameArgument = Annotated[
    str | None, argument("NAME", "The pool's name; needed if several are up.", autocompletion=pool_names)
]


@pool.command()
def up(file: Annotated[Path, argument("FILE", "The pool file.")], yes: YesOption = False) -> None:
    """Start a pool, or find it.

    A pool costs nothing until an experiment asks for an instance. Experiments with `resources: {pool: NAME}` share its
    instances: one gives them back warm, and the next one takes them. Idle instances are released after `idle` (5 min).
    A pool on EC2 needs max_usd_per_hour or max_usd_per_month; on a terminal the command shows them and asks first.
    """
    from rubberband.installation import default_home
    from rubberband.pools.process import bring_up
    from rubberband.spec.loading import load_pool
    from rubberband.spec.pool import PoolFile

    found = load_pool(file)
    folder = bring_up(found, default_home(), say, lambda bill: confirm_bill(bill, "start the pool", yes=yes))
    at_once = PoolFile(**folder.read()).instances_at_once()
    pays = "" if at_once == found.instances else f" (max_usd_per_hour pays for {at_once} of {found.instances})"
    print(
        f"pool {folder.name} is up: at most {counted(at_once, 'instance')}{pays}, none until an experiment asks for one"
    )
    if found.autoscale is not None:
        print("scale:   `rubberband serve --pool FILE` scales the pool; a run without a service does not")
    print(f"use:     rubberband run FILE -s resources.pool={folder.name}")
    print(f"look:    rubberband pool status {folder.name}")
    print(f"end all: rubberband pool down {folder.name}")


@pool.command()
def status(name: NameArgument = None, output: TableOption = TableFormat.table, html: HtmlOption = None) -> None:
    """Show a pool's instances, holders and cost."""
    from rubberband.cloud.pool import RemotePool

    folder = _chosen(name)
    if not folder.is_up:
        raise InputError(f"pool {folder.name} is down; start it again with `rubberband pool up FILE`")
    found = RemotePool(folder).status()
    if html is not None:
        from rubberband.pools.report import render_pool

        write_page(html, render_pool(found))
    if output is TableFormat.json:
        print_json(found)
        return
    print(_headline(found))
    if found["machines"]:
        rows = [_machine_row(each, found["now"]) for each in found["machines"]]
        print_table(("instance", "status", "free GPUs", "held by", "runs for", "cost"), rows)
    if found["tenants"]:
        print_table(("experiment", "GPUs", "waits for", "cost"), [_tenant_row(each) for each in found["tenants"]])


def _headline(found: dict[str, Any]) -> str:
    usd = found["usd"]
    cap = "" if usd["max_per_month"] is None else f" of {format_usd(usd['max_per_month'])}"
    from rubberband.pools.report import autoscaled_words

    scaled = autoscaled_words(found)
    return (
        f"pool {found['name']}: {found['instances']} of {counted(found['max_instances'], 'instance')}, "
        f"{scaled}{', ' if scaled else ''}"
        f"{found['free_gpus']} of {counted(found['gpus'], 'GPU')} free; "
        f"{format_usd(usd['month'])}{cap} this month ({format_usd(usd['bill'])} in all, "
        f"{format_usd(usd['idle'])} of it idle)"
    )


def _machine_row(machine: dict[str, Any], now: float) -> tuple[str, ...]:
    runs = "" if machine["running_at"] is None else format_duration(now - machine["running_at"])
    status = f"{machine['status']}: {machine['why']}" if machine["why"] else machine["status"]
    free = f"{machine['free_gpus']} of {machine['gpus']}"
    return machine["machine"], status, free, ", ".join(machine["held_by"]) or "-", runs, format_usd(machine["usd"])


def _tenant_row(tenant: dict[str, Any]) -> tuple[str, ...]:
    waits = f"{counted(tenant['waiting_gpus'], 'GPU')}" if tenant["waiting_gpus"] else "-"
    return tenant["experiment"], str(tenant["gpus"]), waits, format_usd(tenant["usd"])


@pool.command()
def down(
    name: NameArgument = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="End it even if experiments hold instances.")] = False,
) -> None:
    """End a pool and release its instances.

    Its broker stops.

    Experiments on it lose their instances; `rubberband resume` continues them once the pool is up again.
    """
    from rubberband.cloud.pool import RemotePool
    from rubberband.pools.process import take_down

    folder = _chosen(name)
    if not folder.is_up:
        print(f"pool {folder.name} is down already")
        return
    held = [each["experiment"] for each in RemotePool(folder).status()["tenants"] if each["gpus"]]
    if held and not yes:
        raise InputError(f"pool {folder.name} is in use by {', '.join(sorted(set(held)))}; end it anyway with --yes")
    usd = take_down(folder)
    print(f"pool {folder.name} is down; it cost {format_usd(usd['bill'])}, {format_usd(usd['idle'])} of it idle")


def _chosen(name: str | None) -> PoolFolder:
    """Return the folder of a pool, or of the only one. Raises InputError."""
    from rubberband.installation import default_home
    from rubberband.spec.pool import pool_folder

    home = default_home()
    names = [name] if name else pool_names("")
    if not names:
        raise InputError("no pool is up here; start one with `rubberband pool up FILE`")
    if len(names) > 1:
        raise InputError(f"which pool is meant? those that are up: {', '.join(names)}; give its name")
    folder = pool_folder(names[0], home)
    folder.read()
    return folder


class WorkloadFormat(StrEnum):
    """Format of a workload."""

    rubberband = "rubberband"
    adaptdl = "adaptdl"


TracesArgument = Annotated[
    Path | None, typer.Argument(metavar="TRACES_DIR", help="Folder of traces, for --format adaptdl.")
]
PolicyOption = Annotated[
    list[str] | None, option("--policy", "NAME", "Simulate this policy; repeats. [default: the pool's own, and equal]")
]
FormatOption = Annotated[
    WorkloadFormat,
    typer.Option("--format", help="rubberband: columns at, name, kind and iterations; adaptdl: that of Pollux."),
]
InterferenceOption = Annotated[
    float,
    option(
        "--interference",
        "SHARE",
        "Gangs that span instances and share one with another such gang lose this share of their speed: at 0.25 "
        "they train at 75 % of it.",
    ),
]
ShareMachinesOption = Annotated[
    bool, typer.Option("--share-machines", help="Let such gangs share instances. By default, policies avoid it.")
]


def simulate(
    pool: Annotated[Path, argument("POOL", "The pool file.")],
    workload: Annotated[Path, argument("WORKLOAD", "The workload: a CSV file with one job per row.")],
    traces: TracesArgument = None,
    policy: PolicyOption = None,
    format: FormatOption = WorkloadFormat.rubberband,
    interference: InterferenceOption = 0.0,
    share_machines: ShareMachinesOption = False,
    output: TableOption = TableFormat.table,
    html: HtmlOption = None,
) -> None:
    """Simulate policies that share a pool.

    Shows the mean, median and 99th percentile of the job completion times (JCT), the makespan, finish-time fairness,
    and the use and cost of the pool for each policy. KIND.json beside the workload file is the profile of its jobs of
    that kind.
    """
    from rubberband.pools.simulating import simulated
    from rubberband.spec.loading import load_pool

    if (format is WorkloadFormat.adaptdl) != (traces is not None):
        raise InputError("--format adaptdl and TRACES_DIR need each other; give both, or none")
    asked = load_pool(pool)
    policies = list(dict.fromkeys(policy or [asked.policy, "equal"]))
    found = simulated(asked, workload, policies, traces, say, interference=interference, share_machines=share_machines)
    if output is TableFormat.json:
        print_json(found.to_json())
    else:
        from rubberband.pools.report import policy_table

        table = policy_table(found)
        print(table.title)
        print_table(table.header, table.rows, words=table.words)
    if html is not None:
        from rubberband.pools.report import render_simulation

        write_page(html, render_simulation(found))
