"""Every public name of Python has an example in its docstring, and each is true: it is run as it stands."""

from __future__ import annotations

import doctest
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import rubberband
from rubberband.api.settings import Settings
from tests.builders.browser import served
from tests.builders.trained import trained

NAMES = sorted(set(rubberband.__all__) - {"__version__"})
TRIALS = """\
import rubberband

def train(config):
    for epoch in range(1, 100):
        rubberband.report({"loss": config["lr"] / epoch}, checkpoint=epoch)
"""
EXPERIMENT = """\
name: first
entrypoint: trials:train
search:
  space: {lr: {type: loguniform, lower: 1e-4, upper: 1e-1}}
  scheduler: {type: sha, num_samples: 8, max_t: 4, reduction_factor: 2}
  metric: loss
  mode: min
constraints: {deadline: 10m, max_cost: 1}
resources: {provider: virtual, gpus_per_instance: 1, price_per_hour: 3, max_instances: 2}
profile: {seconds_per_iteration: {1: 10}}
"""


def _examples(name: str) -> list[doctest.DocTest]:
    found = doctest.DocTestFinder(recurse=False).find(getattr(rubberband, name), name, globs={"rubberband": rubberband})
    return [each for each in found if each.examples]


def _faults(name: str) -> str:
    printed: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    for example in _examples(name):
        runner.run(example, out=printed.append)
    return "".join(printed)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a trial, an experiment, and its run, which is that of `tune`'s own example; and a service."""
    from rubberband.api.app import create_app
    from rubberband.api.store import open_store

    folder = tmp_path_factory.mktemp("examples")
    (folder / "trials.py").write_text(TRIALS)
    (folder / "experiment.yaml").write_text(EXPERIMENT)
    home = folder / "home"
    app: Any = create_app(Settings(home=folder / "service"), store=open_store(None, folder / "service"))
    with pytest.MonkeyPatch.context() as patched, served(app) as address:
        patched.chdir(folder)
        patched.syspath_prepend(str(folder))
        patched.setenv("RUBBERBAND_HOME", str(home))
        patched.setenv("RUBBERBAND_SERVER", address)
        with trained():
            assert _faults("tune") == ""
        yield folder


@pytest.mark.parametrize("name", NAMES)
def test_a_public_name_has_an_example_that_runs(name: str, place: Path) -> None:
    assert _examples(name), f"rubberband.{name} has no example"
    if name != "tune":  # its example is the run that the others look at
        assert _faults(name) == ""


@pytest.mark.parametrize("name", [name for name in NAMES if inspect.isfunction(getattr(rubberband, name))])
def test_a_public_function_says_what_its_parameters_are(name: str) -> None:
    function = getattr(rubberband, name)
    written = inspect.getdoc(function) or ""
    for parameter in inspect.signature(function).parameters:
        assert f"\n    {parameter}: " in written, f"rubberband.{name}: {parameter} is not described"


def test_the_methods_of_a_torch_trial_say_what_their_parameters_are() -> None:
    for name, method in vars(rubberband.TorchTrial).items():
        if not inspect.isfunction(method) or name.startswith("_"):
            continue
        parameters = [each for each in inspect.signature(method).parameters if each not in ("self", "config", "model")]
        written = inspect.getdoc(method) or ""
        if len(parameters) > 0 and name not in ("load_state_dict",):
            assert all(f"\n    {each}: " in written for each in parameters), f"TorchTrial.{name}"


METHODS = [name for name, each in vars(rubberband.Client).items() if inspect.isfunction(each) and name[0] != "_"]


@pytest.mark.parametrize("name", METHODS)
def test_a_method_of_the_client_says_what_it_takes_returns_and_raises(name: str) -> None:
    method = getattr(rubberband.Client, name)
    written, signature = inspect.getdoc(method) or "", inspect.signature(method)
    for parameter in list(signature.parameters.values())[1:]:
        stars = "*" * (parameter.kind is inspect.Parameter.VAR_POSITIONAL)
        assert f"\n    {stars}{parameter.name}: " in written, f"Client.{name}: {parameter.name} is not described"
    if signature.return_annotation != "None":
        assert "\nReturns:\n" in written
        assert "\nRaises:\n" in written
    assert "\nExamples:\n    >>> " in written
