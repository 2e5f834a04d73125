"""One wire model: the types that clients read are those that the service's answers have, and the results' own names."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from rubberband.api.store.schema import TokenRecord
from rubberband.client import models
from rubberband.executor import Extension, Outlook, TrialResult
from rubberband.executor.core.history import RungResult
from rubberband.executor.result.parts import StageResult
from rubberband.values.offer import BillLine
from rubberband.values.submission import Summary
from rubberband.values.worth import RestWorth
from tests.builders.fake_runs import fake_service, virtual_result


@pytest.mark.parametrize(
    ("wire", "result", "only_in_the_wire", "only_in_the_result"),
    [
        (models.SummaryView, Summary, set(), {"is_rehearsal", "is_charged"}),  # they are those of the experiment
        (models.StageView, StageResult, set(), set()),
        (models.RungView, RungResult, set(), set()),
        (models.TrialView, TrialResult, set(), {"curve", "balance", "batches", "updates", "use"}),
        (models.BillLineView, BillLine, set(), set()),
        (models.RestWorthView, RestWorth, set(), set()),
        (models.OutlookView, Outlook, set(), set()),
        (models.ExtensionView, Extension, {"added_s", "added_usd"}, set()),
        (models.TokenView, TokenRecord, set(), set()),
    ],
)
def test_it_has_the_fields_of_the_result(
    wire: Any, result: Any, only_in_the_wire: set[str], only_in_the_result: set[str]
) -> None:
    assert is_dataclass(result)
    ours, theirs = {*wire.__annotations__}, {field.name for field in fields(result)}
    assert (ours - theirs, theirs - ours) == (only_in_the_wire, only_in_the_result)


def test_answers_are_of_the_types_that_clients_read(tmp_path: Path) -> None:
    answers: dict[str, Any] = {
        "": models.ExperimentDetail,
        "/trials": models.TrialPage,
        "/allocations": models.Allocations,
        "/costs": models.Costs,
        "/decisions": models.Decisions,
        "/logs": models.LogPage,
        "/report": models.Report,
    }
    with fake_service(tmp_path) as service:
        service.add("digits")
        service.runs.results["digits"] = virtual_result()
        for path, of in {"/v1/experiments": models.ExperimentPage, "/readyz": models.Health}.items():
            TypeAdapter(of).validate_json(service.client.get(path).content, strict=True)
        for part, of in answers.items():
            TypeAdapter(of).validate_json(service.client.get(f"/v1/experiments/digits{part}").content, strict=True)
