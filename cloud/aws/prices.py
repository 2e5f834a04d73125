"""The table of instance types with live prices: the shipped one, overlaid with AWS's answers.

AWS is asked only for missing or outdated parts of the cache. Where it cannot be asked, older prices are used and the
table has a note. boto3 is imported only for a request.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rubberband.cloud.aws.calls import AwsSession
from rubberband.cloud.catalogue import (
    ENVIRONMENT_VARIABLE,
    InstanceType,
    Live,
    LiveTable,
    Table,
    catalogue,
    table_of,
    types_of,
)
from rubberband.cloud.offers import ASK_AWS, offers
from rubberband.errors import InputError, ProviderError, RubberbandError
from rubberband.files import make_directories, write_atomically
from rubberband.spec.resources import Resources

if TYPE_CHECKING:
    from rubberband.cloud.aws.quotes import FetchedQuotes


# The cache: one file for each region, with the time of every price. No network.


Amount = Annotated[float, Field(ge=0.0, le=1e9)]
Instant = Annotated[float, Field(ge=0.0, le=1e12)]
"""Unix time."""
Part = Literal["facts", "on_demand", "spot"]
ALL_PARTS: frozenset[Part] = frozenset({"facts", "on_demand", "spot"})
"""Parts of a type's quote, each with a request of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TypeFacts:
    """An instance type as EC2 describes it."""

    instance_type: str
    gpus: Annotated[int, Field(ge=0, le=1024)]
    gpu: str = ""
    """Such as `T4`; empty without GPUs."""
    gpu_memory_gib: Amount | None = None
    """Memory of one GPU."""
    vcpus: Amount
    memory_gib: Amount
    network_gbps: Amount | None = None
    """Sustained."""
    architectures: tuple[str, ...] = ()
    clusters: bool = False
    """Whether cluster placement groups support it."""
    efa_cards: tuple[int, ...] = ()
    """Indices of its network cards that can have an Elastic Fabric Adapter; none without GPUs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quote:
    """AWS's answers about one type in one region, with the time of each part; a time of None: never."""

    facts: TypeFacts | None = None
    """None with a time: the region does not have the type."""
    facts_at: Instant | None = None
    on_demand_usd_per_hour: Amount | None = None
    """None with a time: no such price."""
    on_demand_at: Instant | None = None
    spot_usd_per_hour: Mapping[str, Amount] = field(default_factory=dict)
    """Zone -> price."""
    spot_at: Instant | None = None


class Book(BaseModel):
    """All quotes of one region."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    version: Literal[1] = 1
    region: str
    gpu_types_at: Instant | None = None
    """Time of the request for all types with GPUs; each of them then has a quote."""
    quotes: Mapping[str, Quote] = Field(default_factory=dict)


def read_book(home: Path, region: str) -> Book:
    """Return the cached quotes of a region: none without a readable file."""
    try:
        book = Book.model_validate_json(_path(home, region).read_bytes())
    except (OSError, ValidationError):
        return Book(region=region)
    return book if book.region == region else Book(region=region)


def write_book(home: Path, book: Book) -> None:
    """Write the quotes, whole or not at all. If the home is not writable, AWS is asked again next time."""
    path = _path(home, book.region)
    with suppress(OSError):
        make_directories(path.parent)
        write_atomically(path, book.model_dump_json(indent=1).encode(), durable=False, mode=0o600)


def _path(home: Path, region: str) -> Path:
    safe = "".join(letter if letter.isalnum() or letter == "-" else "_" for letter in region)
    return home / "prices" / f"{safe}.json"


ON_DEMAND_GOOD_S = 86_400.0
"""Validity of facts and on-demand prices."""
SPOT_GOOD_S = 600.0
"""Validity of spot prices."""

Clock = Callable[[], float]


def live_table(
    resources: Resources,
    home: Path,
    *,
    session: AwsSession | None = None,
    clock: Clock = time.time,
    environment: Mapping[str, str] = os.environ,
) -> LiveTable:
    """Return the table for an experiment, with today's prices of its types and of its head, which `home` caches.

    A user's table (`resources.catalogue`) stays as it is. A failure of AWS is a note of the table.

    Raises InputError for a table that cannot be read, and for a price that the table lacks because AWS could not be
    asked.
    """
    if resources.catalogue or environment.get(ENVIRONMENT_VARIABLE):
        return LiveTable(table_of(resources, environment))
    names = tuple(dict.fromkeys([*types_of(resources), resources.aws.head_instance_type]))
    table = prices_of(names, resources.region, home, session=session, clock=clock)
    try:
        offers(resources, table=table)
    except InputError as error:
        if table.notes:
            without = str(error).replace(ASK_AWS, "")
            raise InputError(f"AWS prices are not available: {table.notes[0]}; and without them: {without}") from None
    return table


def prices_of(
    types: Sequence[str] | None,
    region: str,
    home: Path,
    *,
    session: AwsSession | None = None,
    refresh: bool = False,
    clock: Clock = time.time,
) -> LiveTable:
    """Return the shipped table with AWS's answers for `types` in a region, or for all types with GPUs."""
    book, notes = read_book(home, region), tuple[str, ...]()
    wanted, parts = (types, ALL_PARTS) if refresh else _stale(book, types, clock())
    if parts:
        answer, notes = _asked(region, wanted, parts, session, clock)
        if answer is not None:
            book = _with(book, answer, everything=wanted is None)
            write_book(home, book)
        if refresh and notes:
            raise ProviderError(f"prices: {notes[0]}")
    return LiveTable(overlaid(catalogue(), book), notes)


def overlaid(table: Table, book: Book) -> dict[str, InstanceType]:
    """Return a table with the quotes of a region on top, including types that it lacks."""
    rows = dict(table)
    for name, quote in book.quotes.items():
        row = _row(table.get(name) or _new_row(table, name, quote), quote, book.region)
        if row is not None:
            rows[name] = row
    return rows


def _stale(book: Book, types: Sequence[str] | None, now: float) -> tuple[Sequence[str] | None, frozenset[Part]]:
    """Return the outdated types (None: all with GPUs) and parts; no parts if nothing is outdated."""
    if types is None:
        if not _recent(book.gpu_types_at, now, ON_DEMAND_GOOD_S):
            return None, ALL_PARTS
        types = [name for name, quote in book.quotes.items() if quote.facts is not None and quote.facts.gpus]
    stale = {name: parts for name in types if (parts := _stale_parts(book.quotes.get(name, Quote()), now))}
    return list(stale), frozenset(part for parts in stale.values() for part in parts)


def _stale_parts(quote: Quote, now: float) -> frozenset[Part]:
    is_fresh: dict[Part, bool] = {"facts": _recent(quote.facts_at, now, ON_DEMAND_GOOD_S)}
    if quote.facts is not None or not is_fresh["facts"]:
        is_fresh["on_demand"] = _recent(quote.on_demand_at, now, ON_DEMAND_GOOD_S)
        is_fresh["spot"] = _recent(quote.spot_at, now, SPOT_GOOD_S)
    return frozenset(part for part, fresh in is_fresh.items() if not fresh)


def _recent(answered_at: float | None, now: float, good_s: float) -> bool:
    # A time in the future comes from a machine whose clock was wrong.
    return answered_at is not None and 0.0 <= now - answered_at <= good_s


def _asked(
    region: str, types: Sequence[str] | None, parts: frozenset[Part], session: AwsSession | None, clock: Clock
) -> tuple[FetchedQuotes | None, tuple[str, ...]]:
    """Return AWS's answers, and why some are missing."""
    from rubberband.cloud.aws.calls import open_aws

    try:
        session = session or open_aws(region)
        from rubberband.cloud.aws.quotes import fetch

        answer = fetch(session, types, parts, clock=clock)
    except RubberbandError as error:
        return None, (str(error),)
    return answer, answer.problems


def _with(book: Book, answer: FetchedQuotes, *, everything: bool) -> Book:
    quotes = dict(book.quotes)
    for name, quote in answer.quotes.items():
        if quote != Quote():
            quotes[name] = _newer(quotes.get(name, Quote()), quote)
    answered_at = max((quote.facts_at for quote in answer.quotes.values() if quote.facts_at is not None), default=None)
    if not everything or answered_at is None:
        return book.model_copy(update={"quotes": quotes})
    absent = Quote(facts_at=answered_at)
    quotes |= {
        name: _newer(quotes.get(name, Quote()), absent)
        for name, row in catalogue().items()
        if row.gpus and name not in answer.quotes
    }
    return book.model_copy(update={"quotes": quotes, "gpu_types_at": answered_at})


def _newer(old: Quote, new: Quote) -> Quote:
    """Return the new parts, and the old ones where those are missing."""
    if new.facts_at is not None:
        old = replace(old, facts=new.facts, facts_at=new.facts_at)
    if new.on_demand_at is not None:
        old = replace(old, on_demand_usd_per_hour=new.on_demand_usd_per_hour, on_demand_at=new.on_demand_at)
    if new.spot_at is not None:
        old = replace(old, spot_usd_per_hour=new.spot_usd_per_hour, spot_at=new.spot_at)
    return old


def _new_row(table: Table, name: str, quote: Quote) -> InstanceType | None:
    """Return a row for a type that the table lacks, with the GPU name that the table has for its family."""
    facts, family = quote.facts, f"{name.partition('.')[0]}."
    if facts is None:
        return None
    sibling = next((row for row in table.values() if row.instance_type.startswith(family) and facts.gpus), None)
    return InstanceType(
        instance_type=name,
        gpus=facts.gpus,
        gpu=facts.gpu if sibling is None else sibling.gpu,
        gpu_memory_gib=facts.gpu_memory_gib if sibling is None else sibling.gpu_memory_gib,
        prices_usd_per_hour={},
    )


def _row(row: InstanceType | None, quote: Quote, region: str) -> InstanceType | None:
    """Return a row with AWS's answers for a region; None without a row.

    The model and the memory of its GPUs stay as in the table (EC2 omits reserved memory for some), so that one profile
    still holds for all types with the same GPUs.
    """
    if row is None:
        return None
    facts = quote.facts
    if facts is not None:
        row = replace(
            row,
            gpus=facts.gpus,
            vcpus=facts.vcpus,
            memory_gib=facts.memory_gib,
            network_gbps=facts.network_gbps or row.network_gbps,
            has_efa=bool(facts.efa_cards),
        )
    offered = facts is not None or quote.facts_at is None
    prices = dict(row.prices_usd_per_hour)
    priced_at = None
    if not offered:
        prices.pop(region, None)
    elif quote.on_demand_usd_per_hour is not None:
        prices[region], priced_at = quote.on_demand_usd_per_hour, quote.on_demand_at
    live = Live(
        offered=offered, on_demand_at=priced_at, spot_usd_per_hour=dict(quote.spot_usd_per_hour), spot_at=quote.spot_at
    )
    approximate = row.approximate - {region} if priced_at is not None else row.approximate
    return replace(row, prices_usd_per_hour=prices, approximate=approximate, live={**row.live, region: live})
