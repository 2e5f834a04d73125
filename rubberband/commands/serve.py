"""`rubberband serve`: the service of a team, with plan previews, submissions and the dashboard."""

from __future__ import annotations

import logging
import math
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from rubberband.commands.common import option, say
from rubberband.errors import InputError
from rubberband.installation import require
from rubberband.units import parse_duration, parse_usd, shown
from rubberband.values.kinds import known_provider

if TYPE_CHECKING:
    from rubberband.api.app.serving import Transport
    from rubberband.api.settings import ServiceLimits, Settings, SharedPool
    from rubberband.api.store import Store

_T = TypeVar("_T")
_LEAST_KEPT_S = 3600.0


def repeated(name: str, metavar: str, help: str) -> Any:
    """Return an option that may be given several times."""
    return option(name, metavar, f"{help} Repeat for more.")


StoreOption = Annotated[
    str | None,
    option(
        "--store",
        "URL",
        "The database of the service and of the journals, such as postgresql+psycopg://USER@HOST/NAME. "
        "[default: RUBBERBAND_STORE, or SQLite files in RUBBERBAND_HOME]",
    ),
]
AuthOption = Annotated[
    bool | None,
    typer.Option("--auth/--no-auth", help="Require tokens. [default: beyond 127.0.0.1 only]", show_default=False),
]
AllowOption = Annotated[
    list[str] | None,
    repeated(
        "--allow",
        "MODULE:ATTRIBUTE",
        "An entry point that submissions may run; MODULE:* for all that a module defines.",
    ),
]
CodeOption = Annotated[
    list[Path] | None, repeated("--code", "FOLDER", "The folder with that code. [default: the current folder]")
]
AllowCommandsOption = Annotated[
    bool,
    typer.Option(
        "--allow-commands",
        help="Submissions may run commands (entrypoint.command), in the first --code folder: a shell on this "
        "machine for every token.",
    ),
]
HostNameOption = Annotated[
    list[str] | None, repeated("--host-name", "NAME", "A host name that the service answers for.")
]
ProviderOption = Annotated[
    list[str] | None,
    repeated(
        "--provider",
        "PROVIDER",
        "Providers that submissions may use: local, virtual, aws, ray, or of a package. [default: "
        "local, virtual, and the pool's]",
    ),
]
CheckpointsOption = Annotated[
    list[str] | None,
    repeated(
        "--checkpoints",
        "PREFIX",
        "A URL or folder below which submissions may keep checkpoints, such as s3://bucket/team/. "
        "[default: only in the experiment's folder]",
    ),
]
EnvOption = Annotated[
    list[str] | None, repeated("--env", "NAME", "A variable that submissions may set (resources.env).")
]
SecretOption = Annotated[
    list[str] | None,
    repeated(
        "--secret", "NAME", "A variable of the service's environment that submissions may use (resources.secrets)."
    ),
]
NotifyOption = Annotated[
    list[str] | None,
    repeated(
        "--notify",
        "NAME",
        "A variable of the service's environment with a Slack or other address, which gets a notice when an "
        "experiment ends, will be late or has trouble.",
    ),
]
MaxRunningOption = Annotated[
    int, typer.Option("--max-running", min=1, max=1000, help="Experiments that run at the same time.")
]
MaxCostOption = Annotated[
    str | None, option("--max-cost", "USD", "The highest max_cost of a submission; each must then have one.")
]
AutoResumeOption = Annotated[
    bool,
    typer.Option(
        "--auto-resume/--no-auto-resume",
        help="Restart submissions whose process was killed or lost with the machine; retry again only after progress.",
    ),
]
PoolOption = Annotated[
    Path | None,
    option(
        "--pool",
        "FILE",
        "A pool file. Experiments of its provider share its instances, which the service promises them.",
    ),
]
WeightOption = Annotated[
    list[str] | None, repeated("--weight", "NAME=N", "Share of a token's experiments in pool and queue; 1 by default.")
]
BudgetOption = Annotated[
    list[str] | None,
    repeated("--budget", "NAME=USD", "Most that a token's experiments may cost a month, in the pool and elsewhere."),
]
PlanningLimitOption = Annotated[
    str, typer.Option("--planning-limit", metavar="DURATION", help="Time limit for one plan.")
]
BodyLimitOption = Annotated[
    int, typer.Option("--body-limit", metavar="BYTES", min=1024, max=1 << 30, help="The largest body of a request.")
]
RateOption = Annotated[
    float, typer.Option("--rate", metavar="N", help="Requests a second of one token or address; 0 sets no limit.")
]
KeepEventsOption = Annotated[
    str,
    typer.Option(
        "--keep-events",
        metavar="DURATION",
        help="Time after which the feed drops events of ended experiments. Their journals keep all events.",
    ),
]
ProxyOption = Annotated[
    list[str] | None, repeated("--proxy", "ADDRESS", "A proxy in front, whose X-Forwarded-For and -Proto are trusted.")
]


def serve(
    host: Annotated[str, typer.Option("--host", help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="The port; 0: any that is free.")] = 8642,
    store: StoreOption = None,
    auth: AuthOption = None,
    allow: AllowOption = None,
    code: CodeOption = None,
    allow_commands: AllowCommandsOption = False,
    host_name: HostNameOption = None,
    provider: ProviderOption = None,
    checkpoints: CheckpointsOption = None,
    env: EnvOption = None,
    secret: SecretOption = None,
    notify: NotifyOption = None,
    max_running: MaxRunningOption = 4,
    max_cost: MaxCostOption = None,
    auto_resume: AutoResumeOption = True,
    pool: PoolOption = None,
    weight: WeightOption = None,
    budget: BudgetOption = None,
    planners: Annotated[int, typer.Option("--planners", min=1, max=64, help="Number of planning processes.")] = 1,
    planning_limit: PlanningLimitOption = "30s",
    body_limit: BodyLimitOption = 1 << 20,
    rate: RateOption = 200.0,
    keep_events: KeepEventsOption = "30d",
    ssl_certfile: Annotated[Path | None, option("--ssl-certfile", "FILE", "Serve HTTPS with this certificate.")] = None,
    ssl_keyfile: Annotated[Path | None, option("--ssl-keyfile", "FILE", "The certificate's key.")] = None,
    proxy: ProxyOption = None,
) -> None:
    """Serve previews, runs and the dashboard.

    A submission names the code to run, which --allow must list. Each experiment runs in its own process and continues
    when the service stops. Listening beyond this machine needs tokens (rubberband token create).
    """
    require("the service", "fastapi", "jinja2", "prometheus_client", "python_multipart", "uvicorn")
    from rubberband.api.app import serving
    from rubberband.api.settings import Keeping, Settings
    from rubberband.installation import default_home, default_store

    shared = _pool(pool, weight or [], budget or [])
    settings = Settings(
        home=default_home(),
        store=store or default_store(),
        host=host,
        port=port,
        auth=serving.require_auth(host, auth, proxy or []),
        hosts=serving.served_names(host, host_name or []),
        entrypoints=_each(_entrypoint, allow or []),
        code=_each(_folder, code or [Path.cwd()]),
        allow_commands=allow_commands,
        providers=_providers(provider, shared),
        checkpoints=_each(_prefix, checkpoints or []),
        env=_each(partial(_variable, "--env"), env or []),
        secrets=_each(partial(_variable, "--secret"), secret or []),
        notify=_each(_notified, notify or []),
        planners=planners,
        auto_resume=auto_resume,
        pool=shared,
        limits=_limits(body_limit, rate, planning_limit, max_running, max_cost),
        keeping=Keeping(events_s=_kept_s(keep_events)),
    )
    _serve(settings, serving.Transport(certfile=ssl_certfile, keyfile=ssl_keyfile, proxies=proxy or []))


def _limits(body_bytes: int, rate: float, planning: str, max_running: int, max_cost: str | None) -> ServiceLimits:
    from rubberband.api.settings import ServiceLimits

    return ServiceLimits(
        body_bytes=body_bytes,
        requests_per_s=_amount("--rate", rate),
        burst=max(2, math.ceil(2 * rate)),
        planning_s=_amount("--planning-limit", parse_duration(planning), zero=False),
        max_running=max_running,
        max_cost_usd=None if max_cost is None else _amount("--max-cost", parse_usd(max_cost), zero=False),
    )


def _serve(settings: Settings, transport: Transport) -> None:
    if transport.keyfile is not None and transport.certfile is None:
        raise InputError("--ssl-keyfile needs --ssl-certfile, the certificate that it is the key of")
    from rubberband.api.app import serving

    def announce(address: str, store: Store) -> None:
        for line in summary(settings, address, store):
            say(line)
        check = partial(check_entrypoints, settings.entrypoints, settings.code, say)
        threading.Thread(target=check, name="entrypoint-check", daemon=True).start()

    with _logging_to_stderr():
        serving.serve(settings, transport, announce)
    say("the service has stopped; running experiments continue, and it finds them again when it starts")


def summary(settings: Settings, address: str, store: Store) -> list[str]:
    """Return the summary that the operator sees when the service starts."""
    from rubberband.executor.journal.database import shown_url

    kept = "" if settings.store is None else f", journals in {shown_url(settings.store)}"
    code = ", ".join(str(folder) for folder in settings.code)
    may_run = "nothing, only plans are made (--allow MODULE:ATTRIBUTE)"
    if settings.entrypoints or settings.allow_commands:
        allowed = [*settings.entrypoints, *(["any command"] if settings.allow_commands else [])]
        may_run = f"{', '.join(allowed)} from {code}; on {', '.join(settings.providers)}"
    if settings.auth:
        number = sum(record.revoked_at is None for record in store.tokens())
        tokens = f"needed; there {'is 1' if number == 1 else f'are {number}'} (rubberband token list)"
    else:
        tokens = f"not needed: every user who reaches {settings.host} may do everything (--auth)"
    lines = [
        f"serving on   {address}",
        f"experiments  {settings.home / 'experiments'}{kept}; {settings.limits.max_running} at the same time",
        f"may be run   {may_run}",
        f"tokens       {tokens}",
    ]
    if (pool := settings.pool) is None:
        return lines
    rule, size = pool.autoscaling, f"{pool.instances} x {pool.gpus_per_instance} GPU"
    scaled = "" if rule is None else f", autoscaled to an efficiency of {rule.lower:g} to {rule.upper:g}"
    lines.append(f"pool         {pool.name}: {size}, shared by {pool.policy}{scaled}")
    valid = {record.name for record in store.tokens() if record.revoked_at is None}
    unknown = sorted((pool.budgets_usd.keys() | pool.weights.keys()) - valid)
    if settings.auth and unknown:
        lines.append(f"note         --budget and --weight name {', '.join(unknown)}, and no valid token has that name")
    return lines


@contextmanager
def _logging_to_stderr() -> Iterator[None]:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    root, own = logging.getLogger(), logging.getLogger("rubberband")
    before = own.level
    root.addHandler(handler)
    own.setLevel(logging.INFO)
    try:
        yield
    finally:
        own.setLevel(before)
        root.removeHandler(handler)


def _kept_s(text: str) -> float:
    kept_s = parse_duration(text)
    if kept_s < _LEAST_KEPT_S:
        raise InputError(
            f"--keep-events {shown(text)}: clients that reconnect need the events they missed; keep at least 1h"
        )
    return kept_s


def _each(read: Callable[[_T], _T], values: Sequence[_T]) -> tuple[_T, ...]:
    return tuple(dict.fromkeys(read(value) for value in values))


def _entrypoint(text: str) -> str:
    module, colon, attribute = text.strip().partition(":")
    names = [*module.split("."), *([] if attribute == "*" else attribute.split("."))]
    if not colon or not all(name.isidentifier() for name in names):
        raise InputError(
            f"--allow {shown(text)} is not MODULE:ATTRIBUTE or MODULE:*; write examples.digits:DigitsTrial"
        )
    return text.strip()


def _variable(option: str, name: str) -> str:
    """Return the name of a variable that submissions may use. Raises InputError for one that none may set."""
    from pydantic_core import PydanticCustomError

    from rubberband.spec.resources import variable_name

    try:
        return variable_name(name)
    except PydanticCustomError as error:
        raise InputError(f"{option}: {error.message()}; give a name, such as HF_TOKEN") from None


def _notified(name: str) -> str:
    """Return the name of a variable with the address of notices. Raises InputError if it holds none."""
    from pydantic_core import PydanticCustomError

    from rubberband.executor.run.notices import addresses
    from rubberband.spec.observers import NotifyAddress, notify_variable

    try:
        addresses([NotifyAddress(url_from=notify_variable(name))], os.environ)
    except PydanticCustomError as error:
        raise InputError(f"--notify {error.message()}") from None
    return name


def _folder(path: Path) -> Path:
    if not path.is_dir():
        raise InputError(f"--code {path} is not a folder; name the folder with the modules of --allow")
    return path.resolve()


def _prefix(prefix: str) -> str:
    if re.fullmatch(r"(\w+://|/).*[^/].*", prefix) is None:
        raise InputError(
            f"--checkpoints {shown(prefix)} is neither a URL nor a folder; write it as s3://bucket/folder/ or "
            "/shared/folder"
        )
    return prefix


def _amount(option: str, value: float, *, zero: bool = True) -> float:
    if not math.isfinite(value) or value < 0 or (value == 0 and not zero):
        raise InputError(f"{option} {value:g} must be {'0 or more' if zero else 'greater than 0'}, and finite")
    return value


def _pool(file: Path | None, weights: Sequence[str], budgets: Sequence[str]) -> SharedPool | None:
    """Bring the pool of a file up. Raises InputError for one that cannot be shared here."""
    from rubberband.api.settings import SharedPool
    from rubberband.installation import default_home
    from rubberband.planner.sharing import POLICIES, keeps_promises
    from rubberband.pools.simulating import autoscaling_of
    from rubberband.spec.loading import load_pool
    from rubberband.spec.pool import PoolFile

    if file is None:
        for name, given in (("--weight", weights), ("--budget", budgets)):
            if given:
                raise InputError(f"{name} {shown(given[0])} needs a pool; add --pool FILE")
        return None
    # Only here: it imports Ray, which a service without a pool does not need.
    from rubberband.pools.process import bring_up, simulated

    found = load_pool(file)
    if not keeps_promises(found.policy):
        able = ", ".join(name for name in POLICIES if keeps_promises(name))
        raise InputError(f"{file}: policy: {found.policy!r} knows no promises, which a service makes; use {able}")
    by_name = {"weights": _by_name("--weight", weights, float), "budgets_usd": _by_name("--budget", budgets, parse_usd)}
    folder = None if found.kind.is_simulated else bring_up(found, default_home(), say)
    priced = simulated(found) if folder is None else PoolFile(**folder.read())
    assert priced.gpus_per_instance is not None, "its GPUs are filled in"
    return SharedPool(
        name=found.name,
        provider=found.provider,
        instances=priced.instances_at_once(),
        gpus_per_instance=priced.gpus_per_instance,
        max_usd_per_month=priced.max_usd_per_month,
        policy=found.policy,
        autoscaling=autoscaling_of(found.autoscale),
        folder=None if folder is None else str(folder.path),
        **by_name,
    )


def _providers(given: Sequence[str] | None, pool: SharedPool | None) -> Sequence[str]:
    """Return the providers of submissions, by default with the pool's. Raises InputError for others than the pool's."""
    own = [] if pool is None else [pool.provider]
    if given is None:
        return tuple(dict.fromkeys(["local", "virtual", *own]))
    try:
        found = _each(known_provider, given)
    except InputError as error:
        raise InputError(f"--provider: {error}") from None
    if not set(own) <= set(found):
        raise InputError(f"--provider {' '.join(found)} leaves out that of the pool; add --provider {own[0]}")
    return found


def _by_name(option: str, given: Sequence[str], read: Callable[[str], float]) -> dict[str, float]:
    """Return the names of tokens -> their numbers, from NAME=N each. Raises InputError."""
    found: dict[str, float] = {}
    for text in given:
        name, equals, number = text.rpartition("=")
        try:
            amount = read(number)
        except (ValueError, InputError):
            amount = math.nan
        if not (name and equals and math.isfinite(amount) and amount > 0.0):
            raise InputError(f"{option} {shown(text)} is not NAME=N with N above 0; write ci=2")
        if name in found:
            raise InputError(f"{option} {shown(text)}: {name} has {found[name]:g} by an earlier {option}; give one")
        found[name] = amount
    return found


_IMPORT_S = 120
"""Time limit for the import of an entry point."""
_NICE = 10
"""Priority of such an import: requests come first."""
_SCRIPT = f"""\
import importlib, os, signal, sys
os.nice({_NICE})
signal.alarm({_IMPORT_S})
from rubberband.errors import RubberbandError
name, *folders = sys.argv[1:]
module, _, attribute = name.partition(":")
try:
    if attribute == "*":
        sys.path[:0] = folders
        importlib.import_module(module)
    else:
        from rubberband.executor.training.entrypoint import Entrypoint
        Entrypoint.parse(name, folders).load()
except RubberbandError as error:
    sys.exit(" ".join(str(error).split()))
except Exception as error:
    sys.exit(f"entrypoint {{name}} cannot be imported: {{type(error).__name__}}: {{' '.join(str(error).split())}}")
"""


def check_entrypoints(entrypoints: Sequence[str], code: Sequence[Path], say: Callable[[str], None]) -> None:
    """Import each entry point, and call `say` with a line for each that cannot be imported.

    Each import runs in a process of its own, as the service imports no code of submissions.
    """
    for name in entrypoints:
        ran = subprocess.run(
            [sys.executable, "-c", _SCRIPT, name, *map(str, code)],
            cwd=code[0] if code else None,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            check=False,
        )
        if ran.returncode:
            fault = [f"its import exited with status {ran.returncode}", *ran.stderr.strip().splitlines()][-1]
            fault = f"its import timed out after {_IMPORT_S} s" if ran.returncode == -signal.SIGALRM else fault
            say(f"note: --allow {name}: {fault}; submissions of it fail until this is fixed (see --code)")
