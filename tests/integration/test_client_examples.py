"""The examples of the methods of `Client`, as they stand, beside a service with an experiment that has ended."""

from __future__ import annotations

import doctest
from pathlib import Path

import pytest

import rubberband
from tests.builders.server_process import serving
from tests.unit.test_python_examples import EXPERIMENT, METHODS, TRIALS

pytestmark = pytest.mark.long


def test_the_methods_of_the_client_do_as_their_examples_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "trials.py").write_text(TRIALS)
    (tmp_path / "experiment.yaml").write_text(EXPERIMENT)
    monkeypatch.chdir(tmp_path)
    options = ("--allow", "trials:*", "--code", str(tmp_path))
    with serving(tmp_path / "home", *options) as server, rubberband.Client(server.address) as client:
        monkeypatch.setenv("RUBBERBAND_SERVER", server.address)
        client.submit("experiment.yaml", overrides=["name=served"])
        assert client.wait("served", timeout_s=120)["state"] == "done"
        printed: list[str] = []
        for name in METHODS:
            (example,) = doctest.DocTestFinder(recurse=False).find(
                getattr(rubberband.Client, name), f"Client.{name}", globs={"rubberband": rubberband}
            )
            runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
            runner.run(example, out=printed.append)
        client.wait("submitted", timeout_s=120)
    faults = "".join(printed)
    assert faults == "", faults
