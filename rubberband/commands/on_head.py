"""`--on head`: a run that a head on EC2 drives, without a session or a terminal there, and the commands that ask it."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from rubberband.commands.common import confirm_bill, say
from rubberband.errors import InputError, ProviderError, RubberbandError
from rubberband.installation import default_home, require
from rubberband.units import counted, format_duration, format_usd, parse_usd

if TYPE_CHECKING:
    from rubberband.cloud.aws.calls import AwsSession
    from rubberband.cloud.aws.head import HeadAnswer, HeadInstance, RemoteHead
    from rubberband.spec.experiment import Experiment
    from rubberband.spec.observers import NotifyAddress
    from rubberband.spec.resources import Resources

_FOLLOW_S = 3.0


def run_on_head(
    file: Path,
    experiment: Experiment,
    overrides: Sequence[str],
    words: list[str],
    *,
    new: bool = False,
    no_cap: bool,
    yes: bool,
) -> int:
    """Check, ask, start or find the head, send the folder, start the run there and follow it. Return its exit code."""
    from rubberband.cloud.aws.head import ensure_head, upload_folder
    from rubberband.cloud.aws.s3 import is_bucket
    from rubberband.executor.ray.code import pack
    from rubberband.executor.run.allowance import pledge_on_head
    from rubberband.running.check import named_entrypoint
    from rubberband.running.sending import require_sent
    from rubberband.running.starting import bound_of
    from rubberband.spec.loading import load_experiment

    resources, name = experiment.resources, experiment.name
    if not is_bucket(resources.checkpoints):
        raise InputError("resources.checkpoints: --on head sends the folder through a bucket; give s3://bucket/prefix")
    path = Path(os.path.abspath(file))
    root = root_of(path)
    entrypoint = named_entrypoint(experiment, (path.parent,))
    if entrypoint.command is not None:
        entrypoint.check(1, elsewhere=True)
        require_sent(experiment, entrypoint)
    secrets = _packed(resources.secrets, experiment.notify or ())
    if any(text in override for override in overrides for text in entrypoint.environment.masks()):
        raise InputError(
            "-s: a setting holds the value of a secret, which the history of Run Command would keep; let the trial "
            "read the variable"
        )
    session, what, idles = checked_head(experiment, no_cap=no_cap)
    most = bound_of(experiment.constraints.max_cost_usd)
    confirm_bill(f"{most}, and the head ({what}) before and after the run; it {idles}", "run", yes=yes)
    archive = pack([str(root)]).archive
    head = ensure_head(session, resources)
    say(f"head {head.instance_id} ({head.instance_type}, {head.zone})")
    remote, made_of = of_this_kind(session, experiment, head)
    settings = [word for override in overrides for word in ("-s", override)]
    if new and (free := _free_name(remote, name)) != name:
        say(f"the name {name} is taken: this run is {free}")
        name, settings = free, [*settings, "-s", f"name={free}"]
        resources = load_experiment(file, settings[1::2]).resources
    # The head may remember another bucket than this machine.
    settings += ["-s", f"resources.checkpoints={resources.checkpoints}"]
    packed = upload_folder(session, resources.checkpoints, name, archive)
    remember(resources, name, made_of)
    command = ["run", str(path.relative_to(root)), *settings, *words, "--yes"]
    pledge_on_head(default_home(), head_key(session, resources.aws.owner), experiment.constraints.max_cost_usd)
    return _followed(remote, name, lambda: remote.start(name, command, packed, made_of, secrets))


def checked_head(experiment: Experiment, *, no_cap: bool) -> tuple[AwsSession, str, str]:
    """Check the limits and the account for a head; return AWS, the head's type and price, and what ends it, in words.

    Raises InputError or InfeasibleError for an experiment that may not run there.
    """
    from rubberband.cloud.aws.calls import open_aws
    from rubberband.cloud.offers import offers
    from rubberband.executor.run.allowance import require_head, require_rate, require_runnable
    from rubberband.planning.fetching import with_fetch
    from rubberband.planning.prices_and_quotas import cloud_prices_and_quotas

    resources, home = experiment.resources, default_home()
    if resources.provider != "aws":
        raise InputError(
            f"resources.provider: {resources.provider} needs no head; write provider: aws, or give "
            "-s resources.provider=aws"
        )
    require("a head", "boto3")
    require_runnable(experiment, home, no_cap=no_cap)
    require_head(home, resources.region, resources.aws.head_instance_type)
    with_fetch(experiment, home, is_required=True)
    session = open_aws(resources.region)
    table = cloud_prices_and_quotas(experiment, home, say, on_head=False).table
    require_rate(experiment, home, table)
    usd, idle_s = 0.0, resources.aws.head_idle_s
    with suppress(InputError):  # a price that only EC2 knows
        usd = offers(resources, table=table)[0].head_price_usd_per_hour
    price = f"{format_usd(usd)} an hour" if usd else "its price is not known"
    idles = f"stops itself when nothing has run for {format_duration(idle_s)}" if idle_s else "never stops itself"
    return session, f"{resources.aws.head_instance_type}, {price}", idles


def of_this_kind(session: AwsSession, experiment: Experiment, head: HeadInstance) -> tuple[RemoteHead, str]:
    """Wait until a head is ready, and give it the code and packages of here, unless it has those; return also what it
    is made of then. Raises InputError while something runs there with others, ProviderError if that fails."""
    from rubberband.cloud.aws.head import head_boot

    resources = experiment.resources
    wanted = head_boot(session, resources)
    remote = remote_head(session, head.instance_id, resources.checkpoints, resources.aws.owner)
    found = remote.wait_until_ready(say)
    if found != wanted.made_of:
        say(f"the head has other code, packages or settings than {experiment.name} needs, and is updated")
        found = remote.remake(wanted.script, say)
    if found != wanted.made_of:
        raise ProviderError(
            f"the head {head.instance_id} could not be updated, and keeps what it had (its "
            "/var/log/rubberband.log.failed says why); try again, or replace it: `rubberband cloud down`, then run"
        )
    return remote, found


def _free_name(remote: RemoteHead, name: str) -> str:
    """Return the first name like this one that no experiment on the head has."""
    from rubberband.executor.journal.folder import free_name

    return free_name(name, {one["name"] for one in _told(remote, "ps")["experiments"]}.__contains__)


def forward(context: typer.Context) -> int:
    """Carry a command out on the head as it was typed here, but for `--on head`, and return its exit code.

    Raises InputError for options that mean nothing there.
    """
    from rubberband.executor.run.allowance import pledge_on_head, require_on_head
    from rubberband.running.starting import bound_of
    from rubberband.spec.observers import NotifyAddress

    command, params = str(context.info_name), context.params
    several = params.get("names") or ()
    name = str(params.get("name") or next(iter(several), ""))
    names = [str(one.name) for one in context.command.params]
    typed = {one for one in names if getattr(context.get_parameter_source(one), "name", "") == "COMMANDLINE"}
    if without := typed & {"server", "to", "out", "follow", *(["output"] if params.get("watch") else [])}:
        raise InputError(f"--{min(without)} does not go with --on head; leave one of them out")
    remote, known, made_of = _found(name)
    head = head_key(remote.session, known["owner"])
    words = _words(context, typed - {"on"})
    if command == "resume":
        if known.get("made_of", made_of) != made_of:
            raise InputError(
                f"the head has other code or packages than {name} was started with; give it those of here first: "
                "`rubberband cloud up FILE`"
            )
        status = _told(remote, "status", name)
        words_of_file, (most_usd, spent_usd) = status["words"], _limit_and_bill(status)
        asked = [NotifyAddress(**address) for address in words_of_file.get("notify") or ()]
        secrets = _packed(words_of_file.get("resources", {}).get("secrets", ()), asked)
        require_on_head(default_home(), most_usd, known.get("types", ()))
        bill = f"{bound_of(most_usd)}, {format_usd(spent_usd)} spent"
        confirm_bill(f"{name} continues on the head: {bill}", "go on", yes=bool(params["yes"]))
        pledge_on_head(default_home(), head, None if most_usd is None else max(0.0, most_usd - spent_usd))
        resumed = ["resume", *words] if params["yes"] else ["resume", "--yes", *words]
        return _followed(remote, name, lambda: remote.start(name, resumed, None, made_of, secrets))
    if params.get("watch"):
        return _followed(remote, name, None)
    if command in ("extend", "rm") and not (params["yes"] or params["dry_run"]):
        shown = remote.ask([command, "--dry-run", *words])
        if shown.exit_code:
            return _printed(shown)
        print(shown.err, end="", file=sys.stderr)
        question = f"Delete {counted(len(several), 'experiment')}?" if command == "rm" else "Apply it?"
        typer.confirm(question, abort=True, err=True)
        words = ["--yes", *words]
    if params.get("max_cost") is not None and not params["dry_run"]:
        most_usd, spent_usd = _limit_and_bill(_told(remote, "status", name))
        new_usd = parse_usd(params["max_cost"])
        require_on_head(default_home(), new_usd)
        pledge_on_head(default_home(), head, max(0.0, new_usd - (spent_usd if most_usd is None else most_usd)))
    return _printed(remote.ask([command, *words]), params.get("html") or params.get("file"))


def _words(context: typer.Context, names: Collection[str]) -> list[str]:
    """Return these parameters of a command as words of a command line; for a file that it writes, a place there."""
    from rubberband.cloud.aws.on_head import NEEDS_FILE

    options, arguments = list[str](), list[str]()
    for param in context.command.params:
        if str(param.name) not in names:
            continue
        value = context.params[str(param.name)]
        value = value.value if isinstance(value, Enum) else value
        if param.name in ("html", "file"):
            value = f"{NEEDS_FILE}{Path(value).suffix}"
        if param.param_type_name == "argument":
            arguments += map(str, value if isinstance(value, list | tuple) else [value])
        elif isinstance(value, bool):
            options.append((param.opts if value else param.secondary_opts)[0])
        else:
            options += [param.opts[0], str(value)]
    return [*options, *arguments]


def _printed(answer: HeadAnswer, path: str | Path | None = None) -> int:
    """Print the answer of a command, and write the file that it wrote."""
    print(answer.out, end="", flush=True)
    print(answer.err, end="", file=sys.stderr)
    if path is not None and answer.file is not None:
        try:
            Path(path).write_bytes(answer.file)
        except OSError as error:
            raise InputError(f"{path} cannot be written ({error.strerror}); give another path") from None
        say(f"written to {Path(path).absolute()}")
    return answer.exit_code


def _told(remote: RemoteHead, *words: str) -> Any:
    """Return the JSON that a command prints on the head. Raises ProviderError where it fails."""
    answer = remote.ask([*words, "--output", "json"])
    if answer.exit_code:
        raise ProviderError(answer.err.strip().removeprefix("error: ") or f"`rubberband {words[0]}` fails on the head")
    return json.loads(answer.out)


def _limit_and_bill(status: Mapping[str, Any]) -> tuple[float | None, float]:
    """Return the max_cost of an experiment on the head, and what it has cost, in USD."""
    return status["summary"]["max_cost_usd"], status["summary"]["cost_usd"]


def _packed(secrets: Iterable[str], notify: Iterable[NotifyAddress]) -> str:
    """Return the values of secrets and the addresses of notices here, packed for a head, which has none after its
    driver. Raises InputError if one is missing."""
    from rubberband.cloud.aws.handover import packed_secrets
    from rubberband.executor.run.notices import addresses
    from rubberband.spec.resources import Resources

    values = Resources(secrets=tuple(secrets)).environment(os.environ).secrets
    return packed_secrets({**values, **{one.variable: one.url for one in addresses(list(notify), os.environ)}})


def root_of(path: Path) -> Path:
    """Return the folder with the code: the working folder if the file is in it, else the file's own."""
    here = Path.cwd()
    return here if path.is_relative_to(here) else path.parent


def _followed(remote: RemoteHead, name: str, start: Callable[[], str] | None) -> int:
    """Start a run, unless it was started before; print its output until it ends, and return its exit code.

    Ctrl-C ends only this, and so does an error of AWS: a line says how to follow it again.
    """
    from rubberband.cloud.aws.head import HeadRefusedError

    key, seen, offset = None, None, 0
    try:
        key = None if start is None else start()
        while True:
            seen = remote.look(name, key, offset)
            sys.stdout.buffer.write(seen.log)
            sys.stdout.flush()
            offset += len(seen.log)
            if seen.more:
                continue
            if seen.exit_code is not None:
                return seen.exit_code
            if not seen.lives:
                break
            time.sleep(_FOLLOW_S)
    except HeadRefusedError:
        raise
    except (KeyboardInterrupt, RubberbandError) as error:
        state = "continues" if (key or seen) and isinstance(error, KeyboardInterrupt) else "may run"
        say(
            f"{name} {state} on the head: `rubberband status {name} --on head --watch` follows it, "
            f"`rubberband cancel {name} --on head` ends it"
        )
        raise
    raise InputError(f"the head stopped while {name} ran; `rubberband resume {name} --on head` continues it")


def _found(name: str) -> tuple[RemoteHead, Mapping[str, Any], str]:
    """Return the head on which an experiment was started, started again if it has stopped; also what is remembered of
    that start, and what the head is made of. Raises InputError."""
    from rubberband.cloud.aws.calls import open_aws
    from rubberband.cloud.aws.client import account_of
    from rubberband.cloud.aws.head import running_head
    from rubberband.executor.run.allowance import require_head
    from rubberband.spec.account import remembered
    from rubberband.spec.resources import Resources

    home, plain = default_home(), Resources()
    known = remembered(home)
    words: dict[str, Any] = {
        "region": plain.region if known is None else known.region,
        "owner": plain.aws.owner,
        "checkpoints": None if known is None else f"s3://{known.bucket}",
    }
    with suppress(OSError, ValueError):  # it was started elsewhere, or by hand on the head
        words |= json.loads((home / "heads" / f"{name}.json").read_text(encoding="utf-8"))
    if words["checkpoints"] is None:
        raise InputError(f"{name} was not started from here, and no bucket is known; run `rubberband aws setup`")
    session = open_aws(words["region"])

    def may_start(instance_id: str) -> None:
        require_head(home, words["region"])
        say(f"the head {instance_id} has stopped and is started again")

    if (head := running_head(session, words["owner"], may_start)) is None:
        raise InputError(
            f"owner {words['owner']} has no head in {session.region} of account {account_of(session)}; "
            "`rubberband run FILE --on head` starts one"
        )
    remote = remote_head(session, head.instance_id, words["checkpoints"], words["owner"])
    return remote, words, remote.wait_until_ready(say)


def remote_head(session: AwsSession, instance_id: str, checkpoints: str | None, owner: str) -> RemoteHead:
    """Return a head whose long answers and copies go to the bucket of this checkpoint store, if it is one, and whose
    month's bill counts in that of this home."""
    from rubberband.cloud.aws.head import RemoteHead
    from rubberband.cloud.aws.s3 import is_bucket, place_in
    from rubberband.executor.run.allowance import note_of_head

    store = f"s3://{place_in(checkpoints, '')[0]}/heads" if is_bucket(checkpoints) else ""

    def on_month(usd: float, open_usd: float, has_ended: bool) -> None:
        note_of_head(default_home(), head_key(session, owner), usd, open_usd, has_ended=has_ended)

    return RemoteHead(session=session, instance_id=instance_id, owner=owner, store=store, on_month=on_month)


def head_key(session: AwsSession, owner: str) -> str:
    """Return account, region and owner of a head. Raises InputError."""
    from rubberband.cloud.aws.client import account_of

    return f"{account_of(session)}.{session.region}.{owner}"


def remember(resources: Resources, name: str, made_of: str) -> None:
    """Note on which head an experiment is, and what that is made of."""
    from rubberband.cloud.catalogue import types_of
    from rubberband.files import make_directories, write_atomically

    folder = default_home() / "heads"
    words = {"region": resources.region, "owner": resources.aws.owner, "checkpoints": resources.checkpoints}
    make_directories(folder)
    content = json.dumps({**words, "types": list(types_of(resources)), "made_of": made_of}).encode()
    write_atomically(folder / f"{name}.json", content, durable=True)
