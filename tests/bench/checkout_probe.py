"""What a checkout does, seen from outside. compare_checkouts runs it in a process with the checkout on its path.

It uses public names alone: `import rubberband`, the command line, the HTTP service and files. The clocks of commands
stand still, so that the same code always answers the same.

Run: python -P checkout_probe.py SECTION ANSWER.json
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import importlib
import importlib.util
import inspect
import io
import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

Answer = dict[str, Any]
"""What is compared -> what this checkout says of it."""
NOW_S = 1_800_000_000.0
"""Unix time for commands: 2027-01-15 08:00 UTC, which the deadlines of random_experiments surround."""
PUBLIC_MODULES = ("rubberband", "rubberband.client")
STARTED_MODULES = ("rubberband.cli",)
"""Modules that run as commands, which keep their names."""
VIEWS = ("", "/report", "/trials", "/costs", "/allocations", "/decisions", "/logs")
_OF_COMMAND = ("help", "short_help", "epilog", "hidden", "deprecated", "no_args_is_help")
_OF_PARAMETER = (
    *("opts", "secondary_opts", "metavar", "required", "nargs", "multiple", "default", "min", "max", "envvar"),
    *("help", "hidden", "is_flag", "count", "is_eager", "expose_value", "show_default"),
)
PATIENCE_S = 120.0


def stop_clocks() -> None:
    """Let Unix time and the time that planning takes stand still, in every module that is imported from now on."""
    time.time = lambda: NOW_S
    time.perf_counter = lambda: 0.0


def command(*words: str) -> Answer:
    """Carry out a `rubberband` command in this process: its exit code, and what it prints (JSON as its value)."""
    from rubberband import cli

    stdout, stderr, before = io.StringIO(), io.StringIO(), sys.argv
    sys.argv, code = ["rubberband", *words], 0
    try:
        with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
            cli.main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except Exception as error:
        return {"raised": f"{type(error).__name__}: {error}"}
    finally:
        sys.argv = before
    return {"exit": code, "stdout": _parsed(stdout.getvalue()), "stderr": stderr.getvalue()}


def _parsed(text: str) -> Any:
    with contextlib.suppress(ValueError):
        return json.loads(text)
    return text


def plans() -> Answer:
    """What `rubberband estimate` says of every experiment file; of every tenth, the tables too."""
    stop_clocks()
    answer: Answer = {}
    for index, words in enumerate(json.loads(Path("commands.json").read_text(encoding="utf-8"))):
        answer[" ".join(words)] = command("estimate", *words, "-o", "json")
        if index % 10 == 0:
            answer[f"{' '.join(words)} as tables"] = command("estimate", *words)
    return answer


def record() -> Answer:
    """Run the virtual experiments to their end, so that there are journals."""
    stop_clocks()
    return {path.stem: command("run", str(path)) for path in sorted(Path("virtual").glob("*.yaml"))}


def replays() -> Answer:
    """What is read of the journals that lie in the home, how the cut ones go on, and the same runs made afresh."""
    stop_clocks()
    names = _experiments()
    answer: Answer = {"ps": command("ps", "-o", "json")}
    for name in names:
        answer |= _read(name)
    for name in names:
        if name.endswith("-cut"):
            extension = ("extend", name, "--deadline", "9h", "--max-cost", "900", "--yes", "-o", "json")
            for words in (extension, ("resume", name)):
                answer[" ".join(words)] = command(*words)
            answer |= {f"resumed: {key}": value for key, value in _read(name).items()}
    os.environ["RUBBERBAND_HOME"] = str(Path("fresh").resolve())
    answer |= {f"run {name}": text for name, text in record().items()}
    for path in sorted(Path("virtual").glob("*.yaml")):
        answer |= {f"afresh: {key}": value for key, value in _read(path.stem).items()}
    return answer


def _experiments() -> list[str]:
    """The experiments of the home."""
    return sorted(path.name for path in (Path(os.environ["RUBBERBAND_HOME"]) / "experiments").iterdir())


def _read(name: str) -> Answer:
    """What the commands that change nothing say of an experiment."""
    lines = [(verb, name, *form) for verb in ("report", "status") for form in ((), ("-o", "json"))]
    return {" ".join(words): command(*words) for words in (*lines, ("logs", name))}


def service() -> Answer:
    """The service's OpenAPI document, what it says of the journals in the home, and previews of some plans."""
    with _serving() as address:
        answer: Answer = {"openapi.json": _ask(f"{address}/openapi.json")}
        names = _experiments()
        answer["listed"] = _without_instants(_listed(address, len(names)))
        for name in names:
            for view in VIEWS:
                path = f"/v1/experiments/{name}{view}"
                answer[f"GET {path}"] = _without_instants(_ask(address + path))
        for path in _quick_files()[:16]:
            asked = _ask(f"{address}/v1/plans", path.read_bytes())
            answer[f"POST /v1/plans {path.name}"] = _without_instants(asked)
    return answer


def _quick_files() -> list[Path]:
    """Experiment files whose previews do not depend on the service's clock: no instant, and no noise."""
    files = sorted(Path("experiments").glob("*.yaml"))
    return [path for path in files if not re.search(r"T08:00|_cv|cv:|samples:|spot:", path.read_text(encoding="utf-8"))]


def _listed(address: str, count: int) -> Answer:
    """The service's list of experiments, once it has found as many as lie in its home."""
    until = time.monotonic() + PATIENCE_S
    while True:
        found = _ask(f"{address}/v1/experiments?limit=100")
        if json.dumps(found).count('"name"') >= count or time.monotonic() > until:
            return found
        time.sleep(0.2)


@contextlib.contextmanager
def _serving() -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["serve", "--port", str(port), "--no-auto-resume"]
    with (
        Path("serve.log").open("wb") as log,
        subprocess.Popen([sys.executable, "-P", "-m", "rubberband.cli", *words], stdout=log, stderr=log) as process,
    ):
        address, until = f"http://127.0.0.1:{port}", time.monotonic() + PATIENCE_S
        try:
            while not _is_ready(address):
                if process.poll() is not None or time.monotonic() > until:
                    raise RuntimeError(f"the service did not start: {Path('serve.log').read_text(errors='replace')}")
                time.sleep(0.2)
            yield address
        finally:
            process.terminate()


def _is_ready(address: str) -> bool:
    try:
        return int(_ask(f"{address}/readyz")["status"]) == 200
    except OSError:
        return False


def _ask(url: str, body: bytes | None = None) -> Answer:
    headers = {} if body is None else {"Content-Type": "application/yaml"}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=PATIENCE_S) as reply:
            return {"status": reply.status, "body": _parsed(reply.read().decode())}
    except urllib.error.HTTPError as error:
        return {"status": error.code, "body": _parsed(error.read().decode())}


def _without_instants(value: Any) -> Any:
    """The value without what is of this moment: instants, identifiers, and how long planning took."""
    if isinstance(value, list):
        return [_without_instants(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        key: _without_instants(item)
        for key, item in value.items()
        if key not in ("id", "instance", "planning_s", "request_id") and not key.endswith("_at")
    }


def names() -> Answer:
    """Public names with signatures and members, the schema of an experiment, and which modules run as commands."""
    answer: Answer = {}
    for module_name in PUBLIC_MODULES:
        module = importlib.import_module(module_name)
        for name in sorted(getattr(module, "__all__", ())):
            answer[f"{module_name}.{name}"] = _described(getattr(module, name))
    import rubberband

    answer["schema of an experiment"] = rubberband.Experiment.model_json_schema()
    for name in STARTED_MODULES:
        answer[f"python -m {name}"] = importlib.util.find_spec(name) is not None
    return answer


def _described(value: Any) -> Any:
    if not inspect.isclass(value):
        return _signature(value) if callable(value) else _plain(value)
    import rubberband

    bases = [base for base in value.__mro__[1:] if base.__module__ == "builtins" or base.__name__ in rubberband.__all__]
    described: Answer = {"signature": _signature(value), "is a": [base.__name__ for base in bases]}
    if dataclasses.is_dataclass(value):
        described["fields"] = [f"{field.name}: {field.type}" for field in dataclasses.fields(value)]
    for base in value.__mro__:
        if base.__module__.partition(".")[0] == "rubberband":
            for name, member in vars(base).items():
                if not name.startswith("_"):
                    described.setdefault(name, _member(value, name, member))
    return described


def _member(owner: type, name: str, member: Any) -> Any:
    if isinstance(member, property):
        return f"property {_signature(member.fget)}"
    if isinstance(member, classmethod | staticmethod):
        return f"{type(member).__name__} {_signature(getattr(owner, name))}"
    return _signature(member) if callable(member) else _plain(member)


def _signature(value: Callable[..., Any] | None) -> str:
    try:
        return _unplaced(str(inspect.signature(value)) if value is not None else "")
    except (TypeError, ValueError):
        return "no signature"


def _unplaced(text: str) -> str:
    """Text without the modules that names live in, and without addresses in memory."""
    return re.sub(r" at 0x[0-9a-f]+", "", re.sub(r"\brubberband(\.\w+)*\.(?=\w)", "", text))


def flags() -> Answer:
    """All commands with their arguments, options, defaults and help."""
    import typer.main

    from rubberband import cli

    answer: Answer = {}
    _walk(typer.main.get_command(cli.app), "rubberband", None, answer)
    return answer


def _walk(found: Any, path: str, parent: Any, answer: Answer) -> None:
    context = found.make_context(path.rpartition(" ")[2], [], parent=parent, resilient_parsing=True)
    made = context.command
    answer[path] = {
        "help page": made.get_help(context),
        **_facts(made, _OF_COMMAND),
        "parameters": [
            {**_facts(parameter, _OF_PARAMETER), "type": _type(parameter)} for parameter in made.get_params(context)
        ],
    }
    if hasattr(made, "list_commands"):
        for name in made.list_commands(context):
            _walk(made.get_command(context, name), f"{path} {name}", context, answer)


def _type(parameter: Any) -> Any:
    """The values of a choice, or else the name of the type; where typer does not tell, the parameter's kind."""
    annotation = getattr(getattr(parameter, "type_descriptor", None), "annotation", type(parameter))
    if inspect.isclass(annotation) and issubclass(annotation, enum.Enum):
        return [_plain(choice) for choice in annotation]
    return getattr(annotation, "__name__", _unplaced(str(annotation)))


def _facts(described: Any, attributes: Sequence[str]) -> Answer:
    return {name: _plain(getattr(described, name)) for name in attributes if hasattr(described, name)}


def _plain(value: Any) -> Any:
    """The value as JSON holds it."""
    if isinstance(value, enum.Enum):
        return _plain(value.value)
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return type(value).__name__ if " object" in repr(value) else _unplaced(repr(value))


SECTIONS = {probe.__name__: probe for probe in (service, plans, record, replays, names, flags)}


def main() -> None:
    section, path = sys.argv[1:]
    answer = SECTIONS[section]()
    import rubberband

    document = {"imported": str(Path(rubberband.__file__).parents[1]), "answer": answer}
    Path(path).write_text(json.dumps(document), encoding="utf-8")


if __name__ == "__main__":
    main()
