"""Client of the service.

with rubberband.Client("http://127.0.0.1:8642") as client:
    print(client.plan("digits.yaml")["prediction"]["cost_usd"]["mean"])
    client.submit("digits.yaml")
    print(client.wait("digits")["summary"]["best_value"])
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote

import httpx
from httpx_sse import connect_sse

from rubberband.client import calls, models
from rubberband.client.calls import (
    FEED_FAILURES,
    RECONNECT_S,
    STREAM_TIMEOUT,
    Call,
    Connected,
    FeedPlace,
    T,
    connection,
    raise_for,
    require_time,
)
from rubberband.client.models import EventView, ExperimentDetail
from rubberband.states import ACTIVE, State


class Client(Connected):
    """Client of a `rubberband serve`, safe to use from several threads. Close it, or use it in a `with`.

    Every method raises the same errors as without a service (InputError, NameTakenError, InfeasibleError, …), and
    ServiceError if the service does not answer or fails. Calls are retried a few times where that is safe.

    Examples:
        >>> with rubberband.Client() as client:  # RUBBERBAND_SERVER, or http://127.0.0.1:8642
        ...     for experiment in client.experiments():
        ...         print(experiment["name"], experiment["state"])
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        token: str | None = None,
        transport: httpx.BaseTransport | None = None,
        sleep: Callable[[float], None] = time.sleep,
        **options: Any,
    ) -> None:
        """Connect to a service, at the first call.

        Args:
            url: Its address. By default RUBBERBAND_SERVER, or http://127.0.0.1:8642.
            token: A token of it. By default RUBBERBAND_TOKEN.
            transport: Transport of httpx, such as one of a test.
            sleep: Function that pauses between two tries.
            **options: Further options of `httpx.Client`.

        Raises:
            InputError: `url` is not the address of a service.
        """
        found = connection(url, token)
        self._url = found["base_url"]
        self._http = httpx.Client(**{**found, "transport": transport, **options})
        self._sleep = sleep

    def plan(
        self,
        experiment: calls.Submittable,
        *,
        overrides: Sequence[str] = (),
        policy: str = "optimal",
        frontier: bool = False,
        size: bool = False,
        seed: int = 0,
    ) -> dict[str, Any]:
        """Predict the time and cost of an experiment. Spends nothing.

        Args:
            experiment: An Experiment, its keys as a mapping, or the path of its file.
            overrides: Values over those of the file, such as `"constraints.deadline=2h"`.
            policy: `optimal`, `greedy`, `static` or `naive_elastic`.
            frontier: Whether the answer has the cheapest plan for each deadline.
            size: Whether the search is first sized to the limits.
            seed: Seed of the simulated noise.

        Returns:
            What `rubberband estimate -o json` prints, with the `id` of the plan.

        Raises:
            InputError: A key or a value of the experiment is not accepted.
            InfeasibleError: No plan keeps the limits; it has the nearest ones.

        Examples:
            >>> with rubberband.Client() as client:
            ...     client.plan("experiment.yaml", overrides=["constraints.deadline=1h"])["feasible"]
            True
        """
        words = calls.self_contained(experiment, overrides)
        return self._send(calls.post("/v1/plans", words, policy=policy, frontier=frontier, size=size, seed=seed))

    def stored_plan(self, id: str) -> dict[str, Any]:
        """Return a plan of an earlier preview.

        Args:
            id: The `id` of a plan that `plan` returned.

        Returns:
            The plan, as `plan` returned it.

        Raises:
            InputError: The service has no such plan, or no longer.

        Examples:
            >>> with rubberband.Client() as client:
            ...     client.stored_plan(client.plan("experiment.yaml")["id"])["experiment"]
            'first'
        """
        return self._send(calls.get(f"/v1/plans/{quote(id, safe='')}"))

    def plan_option(self, id: str, scheduler: str = "asha") -> models.OptionView:
        """Return the option of another scheduler that a plan left `pending`: it is simulated now.

        Args:
            id: The `id` of a plan that `plan` returned.
            scheduler: The `scheduler` of the option.

        Returns:
            The option, with its plan and prediction, as `rubberband estimate -o json` has it.

        Raises:
            InputError: The service has no such plan, or no longer, or the plan has no such option.

        Examples:
            >>> with rubberband.Client() as client:
            ...     client.plan_option(client.plan("experiment.yaml")["id"])["feasible"]
            True
        """
        return self._send(calls.get(f"/v1/plans/{quote(id, safe='')}/options/{quote(scheduler, safe='')}"))

    def submit(
        self,
        experiment: calls.Submittable,
        *,
        overrides: Sequence[str] = (),
        policy: str = "optimal",
        plan: str | None = None,
        idempotency_key: str | None = None,
    ) -> models.SubmittedView:
        """Plan an experiment and start it.

        Args:
            experiment: An Experiment, its keys as a mapping, or the path of its file.
            overrides: Values over those of the file.
            policy: `optimal`, `greedy`, `static` or `naive_elastic`.
            plan: The `id` of a preview; another plan than that one is refused.
            idempotency_key: A submission that is repeated with the same key starts one experiment.

        Returns:
            Its name, state and plan.

        Raises:
            InputError: A key or a value of the experiment is not accepted.
            InfeasibleError: No plan keeps the limits.
            NameTakenError: There is an experiment of its name.

        Examples:
            >>> with rubberband.Client() as client:
            ...     client.submit("experiment.yaml", overrides=["name=submitted"])["name"]
            'submitted'
        """
        words = calls.self_contained(experiment, overrides)
        call: Call[models.SubmittedView]
        call = calls.act("/v1/experiments", words, key=idempotency_key, policy=policy, plan=plan)
        return self._send(replace(call, asks_first=True))

    def experiments(
        self, *states: State, search: str = "", tags: Sequence[str] = (), archived: bool = False
    ) -> Iterator[models.ExperimentView]:
        """Iterate over the experiments, newest first.

        Args:
            *states: Only those in one of these states, such as `"running"`; all, if none is given.
            search: Words, each of which is part of the name, owner, state, note or a tag.
            tags: Tags, all of which an experiment has.
            archived: Whether to iterate over the archived ones instead.

        Returns:
            An iterator, which asks for a page at a time.

        Raises:
            InputError: A state is unknown.

        Examples:
            >>> with rubberband.Client() as client:
            ...     all(found["state"] == "done" for found in client.experiments("done", search="digits"))
            True
        """
        asked = {"search": search or None, "archived": "true" if archived else None, "limit": 100}
        return self._pages("/v1/experiments", state=states, tag=tags, **asked)

    def experiment(self, name: str) -> ExperimentDetail:
        """Return one experiment: its status, stages and forecast.

        Args:
            name: Its name.

        Returns:
            Its `state`, limits, stages, forecast and latest decisions.

        Raises:
            InputError: There is no experiment of that name.

        Examples:
            >>> with rubberband.Client() as client:
            ...     client.experiment("served")["state"]
            'done'
        """
        return self._send(calls.get(calls.path(name)))

    def trials(self, name: str, *, curves: bool = False) -> Iterator[dict[str, Any]]:
        """Iterate over the trials of an experiment.

        Args:
            name: The experiment.
            curves: Whether each trial has its learning curve.

        Returns:
            An iterator, which asks for a page at a time.

        Raises:
            InputError: There is no experiment of that name.

        Examples:
            >>> with rubberband.Client() as client:
            ...     len(list(client.trials("served", curves=True)))
            8
        """
        return self._pages(calls.path(name, "/trials"), curves=curves, limit=500)

    def allocations(self, name: str) -> models.Allocations:
        """Return the instances of an experiment, the use of their GPUs, and the plan.

        Args:
            name: The experiment.

        Returns:
            `instances`, the `busy` GPUs over time, and those that were `planned`.

        Raises:
            InputError: There is no experiment of that name.

        Examples:
            >>> with rubberband.Client() as client:
            ...     len(client.allocations("served")["instances"]) > 0
            True
        """
        return self._send(calls.get(calls.path(name, "/allocations")))

    def costs(self, name: str) -> models.Costs:
        """Return the bill of an experiment, by stage and instance.

        Args:
            name: The experiment.

        Returns:
            The bill, in US dollars or, on a Ray cluster without a price, in GPU-hours.

        Raises:
            InputError: There is no experiment of that name.

        Examples:
            >>> with rubberband.Client() as client:
            ...     client.costs("served")["cost_usd"] > 0
            True
        """
        return self._send(calls.get(calls.path(name, "/costs")))

    def decisions(self, name: str) -> models.Decisions:
        """Return the decisions at each SYNC, the extensions of the limits, and what the rest might bring.

        Args:
            name: The experiment.

        Returns:
            The decisions as `items`, with their reasons, the `extensions`, and the `worths` of the rest.

        Raises:
            InputError: There is no experiment of that name.

        Examples:
            >>> with rubberband.Client() as client:
            ...     sorted(client.decisions("served"))
            ['extensions', 'items', 'worths']
        """
        return self._send(calls.get(calls.path(name, "/decisions")))

    def report(self, name: str) -> dict[str, Any]:
        """Return the result of an experiment.

        Args:
            name: The experiment.

        Returns:
            What `rubberband report -o json` prints.

        Raises:
            InputError: There is no experiment of that name.

        Examples:
            >>> with rubberband.Client() as client:
            ...     client.report("served")["best"]["iterations"]
            4
        """
        return self._send(calls.get(calls.path(name, "/report")))

    def save_artifact(self, name: str, trial: int, artifact: str, to: str | os.PathLike[str]) -> Path:
        """Download a file that a trial gave to `rubberband.artifact`.

        Args:
            name: The experiment.
            trial: The trial's number.
            artifact: The file's name among the trial's, such as `plots/roc.png`.
            to: The file to write; folders are made.

        Returns:
            The file's path.

        Raises:
            InputError: The trial has no such artifact, or `to` exists.

        Examples:
            >>> with rubberband.Client() as client:
            ...     client.save_artifact("served", 0, "plots/roc.png", "roc.png")
            Traceback (most recent call last):
            ...
            rubberband.errors.InputError: trial 0 of 'served' has no artifact 'plots/roc.png'
        """
        return self._save(calls.artifact(name, trial, artifact), Path(to))

    def save_checkpoint(
        self, name: str, trial: int, to: str | os.PathLike[str], *, iterations: int | None = None, best: bool = False
    ) -> Path:
        """Download a trial's checkpoint, by default the latest: a tar archive, or what its trial pickled.

        `rubberband best NAME --out PATH` writes the files or the model in it.

        Args:
            name: The experiment.
            trial: The trial's number.
            to: The file to write; folders are made.
            iterations: The iterations that it holds, if it is not the latest.
            best: Whether it is that of the best evaluated iteration.

        Returns:
            The file's path.

        Raises:
            InputError: The checkpoint was not kept, or `to` exists.

        Examples:
            >>> with rubberband.Client() as client:
            ...     best = client.experiment("served")["summary"]["best_trial"]
            ...     client.save_checkpoint("served", best, "best.ckpt")
            Traceback (most recent call last):
            ...
            rubberband.errors.InputError: trial 0 of 'served' has no checkpoint: a virtual run trains no model
        """
        return self._save(calls.checkpoint(name, trial, iterations, best), Path(to))

    def logs(
        self,
        name: str,
        *,
        trial: int | None = None,
        rank: int | None = None,
        source: str = "trials",
        follow: bool = False,
        every_s: float = 1.0,
    ) -> Iterator[models.LogLine]:
        """Iterate over the lines that trials have printed.

        Args:
            name: The experiment.
            trial: Only the lines of this trial.
            rank: Only the lines of the worker of this rank, where a trial trained on several.
            source: `"trials"`, or `"process"` for those of the experiment's own process.
            follow: Whether to wait for more lines until the experiment has ended.
            every_s: Seconds between two looks.

        Returns:
            An iterator over lines, each with its `trial`, `rank` and `text`.

        Raises:
            InputError: There is no experiment of that name.

        Examples:
            >>> with rubberband.Client() as client:
            ...     for line in client.logs("served", trial=0):
            ...         print(line["text"])
        """
        cursor: str | None = None
        is_over = not follow
        while True:
            page = self._send(calls.logs(name, source, trial, rank, cursor))
            yield from page["lines"]
            goes_on, cursor = bool(page["lines"]) or page["next"] != cursor, page["next"]
            if goes_on:
                continue
            if is_over:
                return
            is_over = self.experiment(name)["state"] not in ACTIVE
            if not is_over:
                self._sleep(every_s)

    def cancel(self, name: str, *, idempotency_key: str | None = None) -> models.ExperimentView:
        """Request a clean end: instances are released, and the best result so far is kept.

        Args:
            name: The experiment.
            idempotency_key: A request that is repeated with the same key has one effect.

        Returns:
            The experiment, which has `is_ending` until it has ended.

        Raises:
            InputError: There is no experiment of that name, or it has ended.

        Examples:
            >>> with rubberband.Client() as client:
            ...     client.cancel("served")
            Traceback (most recent call last):
            rubberband.errors.InputError: experiment 'served' is done...
        """
        return self._send(calls.act(calls.path(name, "/cancel"), key=idempotency_key))

    def resume(self, name: str, *, idempotency_key: str | None = None) -> models.ExperimentView:
        """Resume an experiment that was interrupted.

        Args:
            name: The experiment.
            idempotency_key: A request that is repeated with the same key has one effect.

        Returns:
            The experiment.

        Raises:
            InputError: There is no experiment of that name, or it is done.

        Examples:
            >>> with rubberband.Client() as client:
            ...     client.resume("served")
            Traceback (most recent call last):
            rubberband.errors.InputError: experiment 'served' is done...
        """
        return self._send(calls.act(calls.path(name, "/resume"), key=idempotency_key))

    def tag(
        self,
        name: str,
        *add: str,
        remove: Sequence[str] = (),
        note: str | None = None,
        note_before: str | None = None,
        archived: bool | None = None,
    ) -> models.ExperimentView:
        """Label an experiment, and archive it. Lists leave out archived ones, unless they run.

        Args:
            name: The experiment.
            *add: Tags to add.
            remove: Tags to remove.
            note: A text in place of the note; None leaves it.
            note_before: The note that `note` replaces; one that was written meanwhile stays. None replaces any.
            archived: Whether the experiment is archived; None leaves it.

        Returns:
            The experiment, with its `tags`.

        Raises:
            InputError: There is no experiment of that name, a tag has other characters than it may, or the note is not
                `note_before`.

        Examples:
            >>> with rubberband.Client() as client:
            ...     client.tag("served", "vision", note="the first one")["tags"]
            ['vision']
        """
        change = {"add_tags": add, "remove_tags": remove, "note": note, "archived": archived} | {
            "note_before": note_before
        }
        body = {word: value for word, value in change.items() if value not in (None, ())}
        return self._send(calls.patch(calls.path(name), body))

    def delete(self, name: str, *, dry_run: bool = False, idempotency_key: str | None = None) -> models.RemovalView:
        """Delete an experiment that has ended, with its journal, logs and checkpoints.

        Checkpoints in a bucket stay, and its cost counts on.

        Args:
            name: The experiment.
            dry_run: Whether only to say what would be deleted.
            idempotency_key: A request that is repeated with the same key has one effect.

        Returns:
            The files and bytes, and what stays.

        Raises:
            InputError: There is no experiment of that name, or it may hold instances.

        Examples:
            >>> with rubberband.Client() as client:
            ...     client.delete("served", dry_run=True)["name"]
            'served'
        """
        return self._send(calls.delete(calls.path(name), key=idempotency_key, dry_run="true" if dry_run else None))

    def extend(
        self,
        name: str,
        *,
        deadline: str | float | None = None,
        max_cost: str | float | None = None,
        target: float | None = None,
        num_samples: str | int | None = None,
        dry_run: bool = True,
        idempotency_key: str | None = None,
    ) -> models.ExtensionView:
        """Show the effect of more time, money or trials, or of another target; with `dry_run=False`, grant it.

        Args:
            name: The experiment, which runs, or was ended by its budget or its target; more trials are also for one
                that is done. A resume continues it then.
            deadline: A duration from the start, as in the file, or a time with its zone.
            max_cost: US dollars, such as 5 or `"$5"`.
            target: The value of the metric that ends the search.
            num_samples: More trials, such as `"+16"`, or how many the search is to have in all.
            dry_run: Whether only to show the effect.
            idempotency_key: A grant that is repeated with the same key has one effect.

        Returns:
            The limits before and after, and the forecasts with both.

        Raises:
            InputError: There is no experiment of that name, or it has ended.
            InfeasibleError: No plan keeps the new limits either.

        Examples:
            >>> with rubberband.Client() as client:
            ...     client.extend("served", deadline="3h")
            Traceback (most recent call last):
            rubberband.errors.InputError: experiment 'served' is done...
        """
        limits = {"deadline": deadline, "max_cost": max_cost, "target": target, "num_samples": num_samples}
        body = {word: value for word, value in limits.items() if value is not None} | {"dry_run": dry_run}
        send = calls.post if dry_run else calls.act
        return self._send(send(calls.path(name, "/extend"), body, key=None if dry_run else idempotency_key))

    def add(
        self,
        name: str,
        configuration: Mapping[str, Any] | None = None,
        *,
        clone_of: int | None = None,
        from_checkpoint: bool = False,
        dry_run: bool = True,
        idempotency_key: str | None = None,
    ) -> models.ExtensionView:
        """Show the effect of a configuration that is added to a search; with `dry_run=False`, add it.

        Args:
            name: The experiment, which runs or is done: a resume continues it then.
            configuration: Values of parameters; what they leave out is drawn.
            clone_of: A trial: what is left out is as in that.
            from_checkpoint: Whether it continues from that trial's latest checkpoint.
            dry_run: Whether only to show the effect.
            idempotency_key: A request that is repeated with the same key has one effect.

        Returns:
            The time and the cost before and after, and the trial in `trials`.

        Raises:
            InputError: There is no experiment or no trial of that name, a value is outside the space, the experiment
                ended early, or the trial does not fit its deadline and max_cost.

        Examples:
            >>> with rubberband.Client() as client:
            ...     client.add("served", {"lr": 0.1})["trials"][0]["lr"]
            0.1
        """
        asked = {"configuration": dict(configuration or {}), "from_checkpoint": from_checkpoint, "dry_run": dry_run}
        body = asked if clone_of is None else {**asked, "clone_of": clone_of}
        send = calls.post if dry_run else calls.act
        return self._send(send(calls.path(name, "/trials"), body, key=None if dry_run else idempotency_key))

    def limit(
        self, name: str, max_instances: int | None, *, idempotency_key: str | None = None
    ) -> models.ExperimentView:
        """Limit the instances of a running experiment from now on.

        Args:
            name: The experiment.
            max_instances: The largest number; 0 pauses it, None lifts the limit.
            idempotency_key: A request that is repeated with the same key has one effect.

        Returns:
            The experiment.

        Raises:
            InputError: There is no experiment of that name, or it has ended.

        Examples:
            >>> with rubberband.Client() as client:
            ...     client.limit("served", 2)
            Traceback (most recent call last):
            rubberband.errors.InputError: experiment 'served' is done...
        """
        body = {"max_instances": max_instances}
        return self._send(calls.act(calls.path(name, "/limit"), body, key=idempotency_key))

    def stop(self, name: str, trial: int, *, idempotency_key: str | None = None) -> models.ExperimentView:
        """Stop one trial of a running experiment for good; its latest report and checkpoint are kept.

        Args:
            name: The experiment.
            trial: The number of the trial.
            idempotency_key: A request that is repeated with the same key has one effect.

        Returns:
            The experiment.

        Raises:
            InputError: The experiment has ended, or the trial is over or unknown.

        Examples:
            >>> with rubberband.Client() as client:
            ...     client.stop("served", 3)
            Traceback (most recent call last):
            rubberband.errors.InputError: experiment 'served' is done...
        """
        return self._send(calls.act(calls.path(name, f"/trials/{trial}/stop"), key=idempotency_key))

    def prices(self, *types: str, region: str = "us-east-1") -> models.PriceList:
        """Return the resources and prices of instance types.

        Args:
            *types: Their names; all that are known, if none is given.
            region: A region of AWS.

        Returns:
            A row for each type, with USD per hour, GPUs, memory and vCPUs.

        Raises:
            InputError: A type is unknown.

        Examples:
            >>> with rubberband.Client() as client:
            ...     client.prices("p3.2xlarge")["types"][0]["gpus"]
            1
        """
        return self._send(calls.get("/v1/prices", type=types, region=region))

    def wait(self, name: str, *, timeout_s: float | None = None, every_s: float = 1.0) -> ExperimentDetail:
        """Wait until the experiment has ended, or only a resume continues it.

        Args:
            name: The experiment.
            timeout_s: Seconds to wait; without end by default.
            every_s: Seconds between two looks.

        Returns:
            The experiment, as `experiment` returns it.

        Raises:
            ServiceError: It still runs after `timeout_s`.
            InputError: There is no experiment of that name.

        Examples:
            >>> with rubberband.Client() as client:
            ...     client.wait("served", timeout_s=300)["state"]
            'done'
        """
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            found = self.experiment(name)
            if found["state"] not in ACTIVE:
                return found
            require_time(found, until, timeout_s)
            self._sleep(every_s)

    def events(self, experiment: str | None = None, *, after: int | None = None) -> Iterator[EventView]:
        """Iterate without end over the events of the feed, each once and in order.

        A lost connection is opened again where it was, also while the service's store is away.

        Args:
            experiment: Only the events of this experiment.
            after: The id of an event: only those after it.

        Returns:
            An iterator that waits for the next event.

        Raises:
            ServiceError: The connection cannot be opened again.

        Examples:
            >>> with rubberband.Client() as client:
            ...     next(client.events("served"))["experiment"]
            'served'
        """
        place = FeedPlace(after, self.url)
        while True:
            try:
                yield from self._stream(experiment, place)
                self._sleep(RECONNECT_S)
            except FEED_FAILURES as error:
                self._sleep(place.pause_s(error))

    def _stream(self, experiment: str | None, place: FeedPlace) -> Iterator[EventView]:
        with connect_sse(self._http, **place.request(experiment), timeout=STREAM_TIMEOUT) as source:
            if not source.response.is_success:
                source.response.read()
                raise_for(source.response)
            place.was_open = True
            for sent in source.iter_sse():
                if (event := place.next(sent.data)) is not None:
                    yield event

    def _pages(self, path: str, **params: Any) -> Iterator[Any]:
        cursor: str | None = None
        while True:
            page: dict[str, Any] = self._send(calls.get(path, cursor=cursor, **params))
            yield from page["items"]
            cursor = page["next"]
            if cursor is None:
                return

    def _send(self, call: Call[T]) -> T:
        if call.asks_first:
            self._send(calls.WHO)
        for tried in count(1):
            outcome: httpx.Response | httpx.TransportError
            try:
                outcome = self._http.request(call.method, call.path, **call.options())
            except httpx.TransportError as error:
                outcome = error
            pause_s = calls.wait_s(call, tried, outcome)
            if pause_s is None:
                break
            self._sleep(pause_s)
        return calls.answer_of(call, outcome, self.url)

    def _save(self, call: Call[Any], place: Path) -> Path:
        try:
            with calls.download(place) as file, self._http.stream(call.method, call.path, **call.options()) as answer:
                if not answer.is_success:
                    answer.read()
                raise_for(answer)
                for part in answer.iter_bytes():
                    file.write(part)
        except httpx.TransportError as error:
            raise calls.unreachable(self.url, error) from None
        return place

    def close(self) -> None:
        """Close the connections. Idempotent.

        Examples:
            >>> client = rubberband.Client()
            >>> client.close()
        """
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
