"""Notices: the `notify` of an experiment file, sent by the driver to Slack or to another address by POST.

Each address has a thread that follows the journal, so a slow one delays neither the run nor the others. A notice goes
out once: its id is kept in `notices/` of the experiment's folder before it is sent, and it is sent again only where the
address has surely not taken it.
"""

from __future__ import annotations

import http.client
import json
import logging
import math
import os
import threading
import time
import urllib.error
import urllib.request
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from typing import Any
from urllib.parse import urlsplit

import rubberband
from rubberband.errors import Cancelled, InputError, JournalError
from rubberband.executor.core.controller import Controller
from rubberband.executor.core.events import Event, InstanceLost, InstanceRefused
from rubberband.executor.core.history import HungInstance, Replacement
from rubberband.executor.core.ranking import best_trained
from rubberband.executor.core.trial_state import TrialStatus
from rubberband.executor.journal.folder import ExperimentFolder
from rubberband.executor.run.follower import JournalFollower, outcome_of
from rubberband.executor.training.run_spec import RunSpec
from rubberband.files import write_atomically
from rubberband.spec.experiment import Experiment
from rubberband.spec.observers import NOTICE_KINDS, NoticeKind, NotifyAddress
from rubberband.states import ExperimentState
from rubberband.units import counted, duration, format_usd
from rubberband.values.submission import Summary

SENDING_S = 10.0
"""The longest that an address may take to connect, and then to answer."""
LAST_S = 20.0
"""The longest wait for the last notices, after all instances are released."""
RETRY_S = 20.0
LAST_RETRY_S = 2.0
LOOK_S = 10.0
"""Between two looks at the forecast and the bill."""
PAUSE_S = 0.25
QUIET_S = 600.0
"""Between two notices of trouble; what happens meanwhile is in the next one."""
NEAR = 0.9
"""Share of max_cost from which the bill is near it."""
_LATE_SHARE, _LATE_S = 0.01, 5.0
_LATE_LOOKS = 2
SERVICE_VARIABLE = "RUBBERBAND_NOTIFY"
"""Names of the variables with a service's own addresses (`serve --notify`), in the environment of its experiments."""
_SLACK_HOST = "hooks.slack.com"
_MOST_TEXT = 300
_log = logging.getLogger("rubberband.notices")

Post = Callable[[str, bytes, Mapping[str, str]], None]


class NotTakenError(Exception):
    """An address has surely not taken a notice, and may take it later."""


class RefusedNoticeError(Exception):
    """An address takes no notice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """A notice to one address."""

    id: str
    """The same notice has the same id after a resume."""
    kind: NoticeKind
    text: str
    at: float
    """Unix time."""
    facts: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """An address of notices; its URL is shown nowhere."""

    variable: str
    url: str = field(repr=False)
    kinds: tuple[NoticeKind, ...] = NOTICE_KINDS

    @property
    def host(self) -> str:
        """The host, for messages."""
        return urlsplit(self.url).hostname or ""

    def body(self, notice: Notice) -> bytes:
        """Return what is sent, as JSON: for Slack a text, for others facts beside it."""
        if self.host == _SLACK_HOST:
            text = notice.text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
            return json.dumps({"text": text}).encode()
        content = {"id": notice.id, "kind": notice.kind, "text": notice.text, "at": notice.at, **notice.facts}
        return json.dumps(content, allow_nan=False).encode()


def addresses(wanted: Sequence[NotifyAddress], environment: Mapping[str, str]) -> list[Address]:
    """Return the addresses of `notify`. Raises InputError for a variable that is not set or holds no address."""
    return [
        Address(variable=entry.url_from, url=_url(entry.url_from, environment), kinds=entry.kinds) for entry in wanted
    ]


def _url(variable: str, environment: Mapping[str, str]) -> str:
    url = environment.get(variable, "").strip()
    if not url:
        raise InputError(f"notify: {variable} is not set; run `export {variable}=https://…` before this command")
    try:
        parts = urlsplit(url)
        is_web = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        is_web = False
    if not is_web or not url.isascii() or any(character <= " " for character in url):
        raise InputError(f"notify: {variable} holds no http or https URL; copy the address of the webhook again")
    return url


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        return None


def post(url: str, body: bytes, headers: Mapping[str, str]) -> None:
    """Send a notice. Raises NotTakenError or RefusedNoticeError; other errors: the address may have taken it."""
    request = urllib.request.Request(url, body, dict(headers), method="POST")
    try:
        with urllib.request.build_opener(_NoRedirect).open(request, timeout=SENDING_S):
            return
    except urllib.error.HTTPError as error:
        with error:
            if error.code in (429, 500, 502, 503):
                raise NotTakenError(f"answers {error.code}") from None
            if 300 <= error.code < 400:
                to = urlsplit(error.headers.get("Location") or "").hostname
                raise RefusedNoticeError(
                    f"redirects{f' to {to}' if to else ''}, which is not followed; use the address behind it"
                ) from None
            raise RefusedNoticeError(f"answers {error.code}") from None
    except urllib.error.URLError as error:  # before it was sent
        raise NotTakenError(f"cannot be reached: {_short(str(error.reason))}") from None


class NoticeSource:
    """The notices of one experiment, from its journal. A notice of an event up to `after` went out before."""

    def __init__(self, follower: JournalFollower, *, after: int = -1) -> None:
        self._follower, self._after = follower, after
        self._trouble: Counter[str] = Counter()
        self._trouble_at = -math.inf
        self._trouble_seq = after
        self._counts = 0, 0
        self._has_failed = self._has_ended = False
        self._late_looks = 0

    @property
    def _name(self) -> str:
        return self._follower.header.job.name

    @property
    def seq(self) -> int:
        """The latest event that was read, and whose notices were returned."""
        return self._follower.seq if not self._trouble else min(self._follower.seq, self._trouble_seq)

    def events(self) -> list[Notice]:
        """Read the new events, and return the notices of ends; trouble is collected."""
        notices = []
        for seq, event in self._follower.each(live=True):
            is_new = seq > self._after
            for text in self._troubles(event):
                if is_new:
                    if not self._trouble:
                        self._trouble_seq = seq - 1
                    self._trouble[text] += 1
            ended, _ = outcome_of(self._follower.controller)
            if ended is not None and not self._has_ended and is_new:
                notices += self.trouble(math.inf)
                notices.append(self._end(seq, ended))
            self._has_ended = ended is not None
        return notices

    def trouble(self, at_s: float) -> list[Notice]:
        """Return the notice of the trouble since the last one, unless that was a moment before `at_s`."""
        if not self._trouble or at_s - self._trouble_at < QUIET_S:
            return []
        texts = [text if count == 1 else f"{text} ({count} times)" for text, count in self._trouble.items()]
        more = f"; and {len(texts) - 5} more" if len(texts) > 5 else ""
        self._trouble_at = at_s
        self._trouble.clear()
        # Its first event names it, so that a driver that was killed while it was sent does not send it again.
        return [self._notice(f"trouble-{self._trouble_seq}", "trouble", f"{'; '.join(texts[:5])}{more}")]

    def looks(self) -> list[Notice]:
        """Return the notices of the forecast and the bill as they are now."""
        if self._has_ended or self._follower.seq < 0:
            return []
        summary, notices, amount = self._follower.summary(), list[Notice](), self._amount
        deadline_s, most_usd = summary.deadline_s, summary.max_cost_usd
        if deadline_s is not None and summary.started_at is not None:
            expected_s = summary.ends_s()
            is_late = expected_s > deadline_s + max(_LATE_S, _LATE_SHARE * deadline_s)
            self._late_looks = self._late_looks + 1 if is_late else 0
            if self._late_looks >= _LATE_LOOKS:
                text = (
                    f"is expected to end {duration(expected_s - deadline_s)} after its deadline, "
                    f"{summary.deadline}; `rubberband extend {self._name} --deadline …` gives it more time"
                )
                notices.append(self._notice(f"late-{deadline_s:g}", "late", text))
        if most_usd and summary.cost_usd >= NEAR * most_usd:  # 0 where instances are free
            text = f"has cost {amount(summary.cost_usd)} of its max_cost of {amount(most_usd)}"
            if summary.forecast_cost_usd is not None:
                text += f"; {amount(max(summary.cost_usd, summary.forecast_cost_usd))} are expected at its end"
            notices.append(self._notice(f"near_max_cost-{most_usd:g}", "near_max_cost", text))
        return notices

    def stopped(self, reason: str) -> list[Notice]:
        """Return the notice of a process that ends before its experiment."""
        if self._has_ended:
            return []
        text = f"has stopped before its end: {_short(reason)}; `rubberband resume {self._name}` continues it"
        return [self._notice(f"stopped-{self._follower.seq}", "failed", text)]

    def _amount(self, amount: float) -> str:
        return f"{format_usd(amount).removesuffix('USD')}{self._follower.controller.job.offer.unit}"

    def _notice(self, key: str, kind: NoticeKind, text: str) -> Notice:
        header, summary = self._follower.header, self._follower.summary()
        state, reason = outcome_of(self._follower.controller)
        rehearsal = "rehearsal: " if header.kind.is_simulated else ""
        name = header.job.name
        return Notice(
            id=f"{name}-{header.setup.get('run', '')}-{key}",
            kind=kind,
            text=f"{rehearsal}{name} {text}",
            at=time.time(),
            facts=_facts(name, "running" if state is None else state.value, reason, summary),
        )

    def _end(self, seq: int, state: ExperimentState) -> Notice:
        controller, summary = self._follower.controller, self._follower.summary()
        after = f"after {duration(summary.jct_s)}"
        cost = self._amount(summary.cost_usd)
        best = best_trained(controller.state)
        note = f" ({summary.best_note})" if summary.best_note else ""
        score = "" if best is None else f"best {summary.metric} {summary.best_value:.6g} by trial {best.trial}{note}"
        reason, name = _short(controller.state.reason), controller.job.name
        if state is ExperimentState.DONE:
            planned = (
                f"planned: {duration(summary.planned_jct_s or 0.0)}, {self._amount(summary.planned_cost_usd or 0.0)}"
            )
            text = f"is done {after} for {cost} ({planned})"
        elif state is ExperimentState.BUDGET:
            text = (
                f"was ended by its max_cost {after}, at {cost}; `rubberband extend {name} --max-cost …` gives it more"
            )
        elif state is ExperimentState.CANCELLED:
            text = f"was cancelled {after}, at {cost}"
        else:
            text = f"has failed {after}, at {cost}"
        failed = sum(trial.status is TrialStatus.FAILED for trial in controller.state.trials)
        parts = [text, reason, score, f"{counted(failed, 'trial')} failed" if failed else ""]
        is_done = state in (ExperimentState.DONE, ExperimentState.CANCELLED)
        return self._notice(f"end-{seq}", "done" if is_done else "failed", "; ".join(part for part in parts if part))

    def _troubles(self, event: Event) -> list[str]:
        """Return what went wrong at an event, in words."""
        state = self._follower.controller.state
        hung, replaced = state.history.of(HungInstance), state.history.of(Replacement)
        before, self._counts = self._counts, (len(hung), len(replaced))
        texts = [f"replaces {hang.instance}, where trial {hang.trial} hung" for hang in hung[before[0] :]]
        texts += [f"replaces {replacement.instance}, which is slow" for replacement in replaced[before[1] :]]
        match event:
            case InstanceLost():
                what = "had an instance taken away" if event.preempted else "lost an instance"
                texts.append(f"{what} ({_short(event.reason)})")
            case InstanceRefused():
                texts.append(f"did not get an instance ({_short(event.reason)})")
        if state.failed and not self._has_failed:
            self._has_failed = True
            failure = state.trials[state.failed[0]].failure
            texts.append(f"has a trial that failed: trial {state.failed[0]}, {_short(failure[1] if failure else '')}")
        return texts


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _MOST_TEXT else f"{line[:_MOST_TEXT]}…"


def _facts(name: str, state: str, reason: str, summary: Summary) -> dict[str, Any]:
    numbers = {  # JSON has no infinity
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in asdict(summary).items()
    }
    return {"experiment": name, "state": state, "reason": reason, "summary": numbers}


class NoticeThread:
    """Thread that sends one address its notices; an observer of the driver, which wakes it."""

    def __init__(
        self,
        folder: ExperimentFolder,
        address: Address,
        *,
        send: Post = post,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._address, self._send, self._clock = address, send, clock
        self._file = folder.path / "notices" / f"{address.variable}.json"
        self._state: dict[str, Any] = {"seq": -1, "sent": []}
        with suppress(OSError, ValueError):
            self._state |= json.loads(self._file.read_text(encoding="utf-8"))
        self._follower = JournalFollower(folder)
        self._source = NoticeSource(self._follower, after=self._state["seq"])
        self._pending: list[Notice] = []
        self._news, self._closing = threading.Event(), threading.Event()
        self._stopped_by = ""
        self._retry_at = self._look_at = -math.inf
        self._has_warned = False
        self._thread = threading.Thread(target=self._run, name=f"rubberband notices {address.variable}", daemon=True)

    def __call__(self, event: Event, controller: Controller) -> None:
        """Wake the thread."""
        self._news.set()

    def start(self) -> None:
        """Begin to send."""
        self._thread.start()

    def close(self, error: BaseException | None = None) -> None:
        """Send the last notices; `error` is what ends the experiment's process."""
        if error is not None:
            self._stopped_by = str(error) or type(error).__name__
        self._closing.set()
        self._news.set()
        self._thread.join(LAST_S)
        if self._thread.is_alive():
            _log.warning("notify: %s (%s) does not answer", self._address.variable, self._address.host)

    def _run(self) -> None:
        try:
            with closing(self._follower):
                while not self._closing.is_set():
                    self._step()
                    self._news.wait(LOOK_S)
                    self._news.clear()
                    self._closing.wait(PAUSE_S)
                self._last()
        except Exception:  # such as a journal that cannot be read, which the driver reports
            _log.warning("notify: %s gets no more notices", self._address.variable, exc_info=True)

    def _step(self) -> None:
        notices = self._source.events()
        if self._clock() - self._look_at >= LOOK_S:
            self._look_at = self._clock()
            notices += [*self._source.trouble(self._clock()), *self._source.looks()]
        self._take(notices)
        if self._clock() >= self._retry_at:
            self._deliver()
            self._take([])

    def _last(self) -> None:
        """Send what is left, while there is time."""
        until = self._clock() + LAST_S - SENDING_S / 2.0
        self._take(self._source.events())
        if self._stopped_by:
            self._take([*self._source.trouble(math.inf), *self._source.stopped(self._stopped_by)])
        self._deliver()
        while self._pending and self._clock() < until:
            time.sleep(LAST_RETRY_S)
            self._deliver()
        if self._pending:
            texts = "; ".join(notice.text for notice in self._pending)
            _log.warning("notify: %s (%s) did not get: %s", self._address.variable, self._address.host, texts)

    def _take(self, notices: Sequence[Notice]) -> None:
        known = {*self._state["sent"], *(notice.id for notice in self._pending)}
        self._pending += [notice for notice in notices if notice.kind in self._address.kinds and notice.id not in known]
        if not self._pending and self._source.seq > self._state["seq"]:  # all up to there is sent
            self._state["seq"] = self._source.seq
            self._save()

    def _save(self) -> None:
        with suppress(OSError):  # a full disk, which the journal meets too
            self._file.parent.mkdir(exist_ok=True)
            write_atomically(self._file, json.dumps(self._state).encode(), durable=False)

    def _deliver(self) -> None:
        while self._pending:
            notice = self._pending[0]
            self._state["sent"].append(notice.id)
            self._save()
            try:
                self._send(self._address.url, self._address.body(notice), _headers(notice))
                self._has_warned = False
            except NotTakenError as error:
                self._state["sent"].remove(notice.id)
                self._save()
                self._retry_at = self._clock() + RETRY_S
                self._warn(f"{error}; it is tried again")
                return
            except RefusedNoticeError as error:
                self._warn(f"{error}; its notices are dropped")
            except (OSError, http.client.HTTPException, ValueError) as error:
                self._warn(f"did not answer ({_short(str(error)) or type(error).__name__}); the notice is not repeated")
            del self._pending[0]

    def _warn(self, what: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            _log.warning("notify: %s (%s) %s; the run continues", self._address.variable, self._address.host, what)


def _headers(notice: Notice) -> dict[str, str]:
    return {
        "Content-Type": "application/json",
        "User-Agent": f"rubberband/{rubberband.__version__}",
        "Idempotency-Key": notice.id,
    }


def require_addresses(experiment: Experiment) -> None:
    """Raise InputError for a variable of `notify` that is not set or holds no address."""
    addresses(experiment.notify or (), os.environ)


def notice_threads(folder: ExperimentFolder, spec: RunSpec) -> list[NoticeThread]:
    """Return the threads of an experiment's notices, those of its service included. Raises InputError."""
    wanted = all_of(spec.experiment.notify or (), os.environ)
    return [NoticeThread(folder, address) for address in addresses(wanted, os.environ)]


def all_of(wanted: Sequence[NotifyAddress], environment: Mapping[str, str]) -> list[NotifyAddress]:
    """Return the addresses of an experiment and, after them, those that its service gives it."""
    known = {entry.url_from for entry in wanted}
    names = environment.get(SERVICE_VARIABLE, "").split(",")
    return [*wanted, *(NotifyAddress(url_from=name) for name in names if name and name not in known)]


@contextmanager
def noticed_start(folder: ExperimentFolder, wanted: Sequence[NotifyAddress], *, is_rehearsal: bool) -> Iterator[None]:
    """Send one notice of an error before there is a journal.

    None where the user cancels, and none where the journal's database does not answer: a service tries again then.
    """
    try:
        yield
    except (Cancelled, JournalError):
        raise
    except Exception as error:
        if not folder.exists:
            notice = _failed_start(folder.name, error, is_rehearsal=is_rehearsal)
            _send_at_once(notice, addresses(all_of(wanted, os.environ), os.environ))
        raise


def notice_refusal(
    name: str, state: ExperimentState, reason: str, variables: Sequence[str], *, is_rehearsal: bool
) -> None:
    """Send one notice of a start that a service refuses, to its own addresses; return at once."""
    notice = _failed_start(name, InputError(reason), is_rehearsal=is_rehearsal, state=state)
    to = addresses([NotifyAddress(url_from=variable) for variable in variables], os.environ)
    threading.Thread(target=_send_at_once, args=(notice, to), name="rubberband-notice", daemon=True).start()


def _failed_start(
    name: str, error: Exception, *, is_rehearsal: bool, state: ExperimentState = ExperimentState.REFUSED
) -> Notice:
    reason, spent_usd = _short(str(error) or type(error).__name__), getattr(error, "spent_usd", 0.0)
    spent = f"; measuring its profile cost at most {format_usd(spent_usd)}" if spent_usd else ""
    summary = Summary(cost_usd=spent_usd, profiling_cost_usd=spent_usd)
    return Notice(
        id=f"{name}-{uuid.uuid4().hex}-start",
        kind="failed",
        text=f"{'rehearsal: ' if is_rehearsal else ''}{name} did not start: {reason}{spent}",
        at=time.time(),
        facts=_facts(name, state.value, reason, summary),
    )


def _send_at_once(notice: Notice, to: Sequence[Address]) -> None:
    """Send a notice to all addresses beside each other, within LAST_S."""
    threads = [
        threading.Thread(target=_send_patiently, args=(notice, address), daemon=True)
        for address in to
        if notice.kind in address.kinds
    ]
    until = time.monotonic() + LAST_S
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))


def _send_patiently(notice: Notice, address: Address) -> None:
    until, why = time.monotonic() + LAST_S - SENDING_S / 2.0, ""
    while not why:
        try:
            post(address.url, address.body(notice), _headers(notice))
            return
        except NotTakenError as error:
            why = str(error) if time.monotonic() > until else ""
            time.sleep(LAST_RETRY_S)
        except RefusedNoticeError as error:
            why = str(error)
        except (OSError, http.client.HTTPException, ValueError) as error:
            why = f"did not answer ({_short(str(error)) or type(error).__name__})"
    _log.warning("notify: %s (%s) %s; it did not get: %s", address.variable, address.host, why, notice.text)
