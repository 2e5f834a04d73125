"""`rubberband pool`: a broker's process from its start to its end, also one that is killed."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from rubberband.commands import pool
from rubberband.commands.common import TableFormat
from rubberband.errors import InputError
from rubberband.spec.pool import PoolFolder


def _broker(folder: PoolFolder) -> psutil.Process | None:
    """Return the process of the pool's broker."""
    for process in psutil.process_iter():
        try:
            if process.cmdline()[-2:] == ["rubberband.pools.process", str(folder.path)]:
                return process
        except psutil.Error:
            continue
    return None


def test_a_pool_comes_up_survives_its_broker_and_goes_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RUBBERBAND_HOME", str(tmp_path / "home"))
    file, folder = tmp_path / "team.yaml", PoolFolder(path=tmp_path / "home" / "pools" / "team")
    file.write_text("{instances: 2, gpus_per_instance: 2, price_per_hour: 3}")
    pool.up(file)
    assert "pool team is up: at most 2 instances" in capsys.readouterr().out
    broker = _broker(folder)
    assert broker is not None
    file.write_text("{instances: 3, gpus_per_instance: 2, price_per_hour: 3}")
    with pytest.raises(InputError, match="is up with another file"):
        pool.up(file)
    broker.send_signal(signal.SIGKILL)
    broker.wait(60)
    pool.status(output=TableFormat.json)
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert (found["name"], found["instances"], found["max_instances"]) == ("team", 0, 2)
    again = _broker(folder)
    assert again is not None
    pool.down()
    assert "pool team is down; it cost 0.00 USD" in capsys.readouterr().out
    again.wait(60)
    with pytest.raises(InputError, match="is down; start it again"):
        pool.status("team")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{gpus_per_instance: 2}", "instances: is required"),
        ("{instances: 2, gpus_per_instance: 1, policy: nosuch}", "policy 'nosuch' does not exist; choose one of"),
        ("{instances: 2, instance_type: p3.8xlarge, provider: aws}", "checkpoints: missing, and instances of EC2"),
        ("{instances: 2, instance_type: v, gpus_per_instance: 1, provider: virtual}", "can only be simulated"),
        ("{instances: 2, gpus_per_instance: 1, price_per_hour: 5, max_usd_per_hour: 4}", "does not cover one instance"),
    ],
)
def test_a_pool_that_cannot_be_is_refused_in_one_line(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "team.yaml"
    file.write_text(text)
    with pytest.raises(InputError) as found:
        pool.up(file)
    assert said in str(found.value)
    assert "\n" not in str(found.value)
