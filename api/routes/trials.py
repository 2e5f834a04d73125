"""`/v1/experiments/NAME/trials`: the trials of an experiment, their checkpoints, and all of them as a table."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Annotated
from urllib.parse import quote

from fastapi import APIRouter, Depends, Query, Request
from fastapi import Path as InPath
from fastapi import Path as PathParameter
from fastapi.responses import Response, StreamingResponse

from rubberband.api.problems import CONFLICT, INVALID, NOT_FOUND, UNAVAILABLE, HttpProblem
from rubberband.api.routes import Known, Reader, Serving, Submitter
from rubberband.api.routes.answers import IdempotencyKey, json_answer, only_documented, refusals
from rubberband.api.routes.details import begun, part
from rubberband.api.routes.experiments import acted, action
from rubberband.client import models
from rubberband.errors import CheckpointError, InputError
from rubberband.executor.checkpoints import store_of
from rubberband.executor.checkpoints.folders import is_archive
from rubberband.executor.core.events import CheckpointRef
from rubberband.executor.core.trial_state import TrialStatus
from rubberband.executor.result import rows
from rubberband.executor.result.parts import TrialResult
from rubberband.executor.result.result import Result
from rubberband.executor.result.rows import trial_at
from rubberband.units import counted, shown
from rubberband.values.submission import Submission
from rubberband.views import experiment as views_json
from rubberband.views.formatting import listed

router = APIRouter(tags=["experiments"], prefix="/v1/experiments", dependencies=[Depends(only_documented)])
_CSV = "text/csv"
_CHUNK_BYTES = 1 << 20


def trial_of(experiment: Submission, result: Result | None, number: str) -> tuple[Result, TrialResult]:
    """Return the result and one of its trials. Raises Problem NOT_FOUND."""
    if result is None or not result.trials:
        raise HttpProblem(NOT_FOUND, f"experiment {experiment.name!r} has no trials yet: it has not started")
    if not (number.isascii() and number.isdigit() and int(number) < len(result.trials)):
        last = len(result.trials) - 1
        raise HttpProblem(NOT_FOUND, f"experiment {experiment.name!r} has no trial {shown(number)}; it has 0 to {last}")
    return result, result.trials[int(number)]


def _known(
    service: Serving,
    experiment: Known,
    trial: Annotated[str, InPath(max_length=20, description="The trial's number.", examples=["0"])],
) -> tuple[Result, TrialResult]:
    return trial_of(experiment, service.runs.result(experiment.name), trial)


KnownTrial = Annotated[tuple[Result, TrialResult], Depends(_known)]


@part(
    router,
    "/trials",
    "List an experiment's trials",
    "listTrials",
    models.TrialPage,
    "A page of trials, by number.",
    "trials",
    INVALID,
)
def list_trials(
    service: Serving,
    _reader: Reader,
    experiment: Known,
    status: Annotated[list[TrialStatus] | None, Query(description="Only trials with this status; repeats.")] = None,
    limit: Annotated[int, Query(ge=1, le=10_000, description="The largest number to return.")] = 1000,
    cursor: Annotated[str | None, Query(max_length=20, description="`next` of the previous page.")] = None,
    curves: Annotated[
        bool, Query(description="With learning curves, batch sizes, shares of unequal workers and use of machines.")
    ] = False,
) -> Response:
    """Empty until it began."""
    result = service.runs.result(experiment.name)
    begin = 0 if cursor is None else _place(cursor)
    trials = () if result is None else result.trials[begin:]
    found = [trial for trial in trials if not status or trial.status in status]
    items = [views_json.trial_view(trial, curves=curves) for trial in found[:limit]]
    return json_answer({"items": items, "next": str(found[limit].trial) if len(found) > limit else None})


def _place(cursor: str) -> int:
    """Return the first trial of a page."""
    if not (cursor.isascii() and cursor.isdigit()):
        raise HttpProblem(
            INVALID, f"cursor {shown(cursor)} was not issued by this service; leave it out for the first page"
        )
    return int(cursor)


@part(
    router,
    "/trials/{trial}",
    "Get a trial",
    "getTrial",
    models.TrialDetail,
    "The trial, with its curve, its gangs and its share of the bill.",
    "trial",
)
def get_trial(_reader: Reader, found: KnownTrial) -> Response:
    """Its place among the others, its learning curve, and the GPUs that it had over time."""
    return json_answer(views_json.trial_detail(*found))


@action(
    router,
    "trials/{trial}/stop",
    "Stop a trial",
    "stopTrial",
    "Asked of the experiment's driver; `stopped_s` of the trial shows when it has stopped.",
)
async def stop_trial(
    request: Request,
    service: Serving,
    principal: Submitter,
    experiment: Known,
    found: KnownTrial,
    key: IdempotencyKey = None,
) -> Response:
    """The trial trains no more and is not promoted; its GPUs are free for others. The experiment goes on.

    Its latest report and checkpoint are kept: it is the best trial if its metric is the best.
    """
    effect = partial(service.runs.stop, trial=found[1].trial)
    return await acted(request, service, principal, key, effect, experiment.name)


@router.get(
    "/{name}/trials/{trial}/checkpoint",
    summary="Download a trial's checkpoint",
    operation_id="getCheckpoint",
    response_class=Response,
    response_model=None,
    responses={
        200: {
            "description": "The file: a tar archive of the files that the trial saved, or what its trial pickled.",
            "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
        },
        **refusals(NOT_FOUND, CONFLICT, INVALID, UNAVAILABLE),
    },
)
def get_checkpoint(
    _reader: Reader,
    experiment: Known,
    found: KnownTrial,
    iterations: Annotated[
        int | None, Query(ge=1, description="Iterations of one of `checkpoints`; the latest one by default.")
    ] = None,
    best: Annotated[
        bool, Query(description="Whether it is to be that of the best evaluated iteration; 404 if that was not kept.")
    ] = False,
) -> Response:
    """One that is kept, compared by its SHA-256 first. A pickle may run code when it is loaded."""
    result, trial = found
    kept = {saved.iterations: saved.checkpoint for saved in trial.checkpoints}
    if not kept or trial.checkpoints[0].checkpoint.url.startswith("virtual:"):
        why = "a virtual run trains no model" if kept else "it did not finish an iteration"
        raise HttpProblem(CONFLICT, f"trial {trial.trial} of {experiment.name!r} has no checkpoint: {why}")
    done = trial.checkpoints[0].iterations if iterations is None else iterations
    if best:
        try:
            done = trial_at(result, trial, "best").iterations
        except InputError as error:
            raise HttpProblem(NOT_FOUND, str(error)) from None
    if done not in kept:
        raise HttpProblem(
            NOT_FOUND,
            f"trial {trial.trial} of {experiment.name!r} has no checkpoint of {counted(done, 'iteration')}; it has "
            f"those of {listed(sorted(kept))}",
        )
    ref = kept[done]
    path, chunks = _opened(ref)
    kind = "tar" if is_archive(path) else "ckpt"
    name = f"{experiment.name}-trial-{trial.trial}-iterations-{done}.{kind}"
    size_bytes = path.stat().st_size  # of its parts together
    headers = {"Content-Disposition": f'attachment; filename="{name}"', "Content-Length": str(size_bytes)}
    return StreamingResponse(chunks, headers=headers, media_type="application/octet-stream")


@router.get(
    "/{name}/trials/{trial}/artifacts/{file:path}",
    summary="Download a file that a trial gave to be kept",
    operation_id="getArtifact",
    response_class=Response,
    response_model=None,
    responses={
        200: {
            "description": "The file.",
            "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
        },
        **refusals(NOT_FOUND, INVALID, UNAVAILABLE),
    },
)
def get_artifact(
    _reader: Reader,
    experiment: Known,
    found: KnownTrial,
    file: Annotated[
        str, PathParameter(description="Name of one of the trial's `artifacts`.", examples=["plots/roc.png"])
    ],
) -> Response:
    """One of the trial's `artifacts`, by its name; compared by its SHA-256 first."""
    _, trial = found
    ref = next((one.file for one in trial.artifacts if one.name == file), None)
    if ref is None:
        raise HttpProblem(NOT_FOUND, f"trial {trial.trial} of {experiment.name!r} has no artifact {file!r}")
    _, chunks = _opened(ref)
    name = quote(file.rpartition("/")[2])
    headers = {"Content-Disposition": f"attachment; filename*=UTF-8''{name}", "Content-Length": str(ref.size_bytes)}
    return StreamingResponse(chunks, headers=headers, media_type="application/octet-stream")


def _opened(ref: CheckpointRef) -> tuple[Path, Iterator[bytes]]:
    """Return the checkpoint as a file, and its content in parts; the file may go once these are read or dropped."""
    stack = ExitStack()
    try:
        store = store_of(ref)
        store.read_mark()
        path = stack.enter_context(store.file(ref))
    except (CheckpointError, InputError) as error:
        stack.close()
        raise HttpProblem(UNAVAILABLE, f"the checkpoint cannot be read: {error}") from error
    chunks = _chunks(stack, path)
    next(chunks)  # begun, so that it is also closed where nothing of it is sent
    return path, chunks


def _chunks(stack: ExitStack, path: Path) -> Iterator[bytes]:
    with stack, open(path, "rb") as file:
        yield b""
        while part := file.read(_CHUNK_BYTES):
            yield part


@router.get(
    "/{name}/export",
    summary="Export an experiment's trials",
    operation_id="exportTrials",
    response_class=Response,
    response_model=None,
    responses={
        200: {
            "description": "As `rubberband export` writes it: CSV with a header.",
            "content": {_CSV: {"schema": {"type": "string"}, "example": "trial,status,accuracy\n0,completed,0.97\n"}},
        },
        **refusals(NOT_FOUND, CONFLICT),
    },
)
def export_trials(
    service: Serving,
    _reader: Reader,
    experiment: Known,
    reports: Annotated[bool, Query(description="A row for each report, instead of one for each trial.")] = False,
) -> Response:
    """A row for each trial: configuration, metrics, iterations, status, GPU time, and its share of the bill."""
    result = begun(service, experiment)
    found = rows.report_rows(result) if reports else rows.trial_rows(result)
    name = f"{experiment.name}{'-reports' if reports else ''}.csv"
    headers = {"Content-Disposition": f'attachment; filename="{name}"'}
    return Response(rows.to_csv(found), media_type=_CSV, headers=headers)
