"""What a later deadline or a larger budget would change, before it is granted. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from rubberband.executor.journal import Header
from rubberband.executor.state import Job, State
from rubberband.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """New limits as a `DriverRequest` (and a `Job`) has them; None: as it was."""

    deadline_s: float | None = None
    """From Started."""
    max_cost_usd: float | None = None
    """Of the run, without what its profile cost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """What is expected of the whole experiment under given limits."""

    jct_s: float
    """From the start."""
    cost_usd: float
    deadline_s: float | None
    max_cost_usd: float | None
    plan: Plan
    """In force from the next stage on; the stages before it are as they were."""
    feasible: bool
    """Whether it keeps these limits."""
    reason: str
    """One line for the user."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Extension:
    """The rest of an experiment by the limits that it has, and by other ones."""

    before: Outlook
    after: Outlook
    stage: int
    """The first stage that the plans are about; the number of stages if none is left."""
    applied: bool = False
    """Whether it was asked of the driver (or journalled), and not only looked at."""

    @property
    def added_s(self) -> float:
        """How much later it ends."""
        return self.after.jct_s - self.before.jct_s

    @property
    def added_usd(self) -> float:
        """How much more it costs."""
        return self.after.cost_usd - self.before.cost_usd


def limits_of(
    header: Header, job: Job, state: State, *, deadline: object = None, max_cost_usd: float | None = None
) -> Limits:
    """New limits in the file's words, as the driver counts them.

    `deadline` is a duration (a number of seconds, or text such as 40m) from the experiment's start, profiling
    included, or an instant with its zone; `max_cost_usd` includes what profiling cost. None: as it was. `job` is the
    controller's, with the limits in force. Raises InputError for what is no limit, or not more than is granted already.
    """
    raise NotImplementedError


def extension(
    job: Job,
    state: State,
    now: float,
    *,
    deadline_s: float | None = None,
    max_cost_usd: float | None = None,
    driven: bool = True,
) -> Extension:
    """The rest of an experiment by the limits in force (those of `job`, the controller's) and by other ones.

    The limits are those of `Limits`, `now` is on the clock of the events. Of an experiment without a driver
    (`driven=False`) nothing is taken to be held. Raises InputError for what is no extension: nothing more than is
    granted, a deadline that has passed, an experiment that is over for good.
    """
    raise NotImplementedError
