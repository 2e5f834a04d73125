"""The example of a model that does not fit one GPU, whole on the fake EC2, with its checkpoints' parts in S3."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rubberband.executor.checkpoints import MARK
from tests.builders.command_line import ROOT
from tests.builders.ec2_runs import SHARDED_ON_EC2, each_iteration_once, ec2, words
from tests.ec2 import BUCKET

pytestmark = [pytest.mark.ray, pytest.mark.long, pytest.mark.timeout(600)]


def test_a_divided_model_is_searched_on_ec2_and_its_parts_are_in_s3(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    from examples.sharded import GPT

    with ec2(tmp_path) as command_line:
        for name in ("sharded.py", "sharded.yaml"):
            (command_line.folder / "examples" / name).write_text((ROOT / "examples" / name).read_text())
        command_line("run", "examples/sharded.yaml", *words(*SHARDED_ON_EC2))
        command_line("best", "sharded", "--out", "model.pt")
        result = command_line.result("sharded")
        assert result.outcome == "done"
        assert each_iteration_once(result)
        assert command_line.nothing_left()
        best = result.best
        assert best is not None
        assert best.checkpoint is not None
        assert len(best.checkpoint.parts) in (1, 3)
        objects = {f"s3://{BUCKET}/{key}" for key in command_line.aws.fake.world.buckets[BUCKET]}
        kept = [saved.checkpoint for trial in result.trials for saved in trial.checkpoints]
        assert {url for url in objects if not url.endswith(MARK)} == {file.url for ref in kept for file in ref.files()}
    GPT(width=48, layers=3).load_state_dict(torch.load(tmp_path / "code/model.pt", weights_only=True))
