"""The table of instance types with live prices: the shipped one, overlaid with what AWS tells or told before.

AWS is asked only for what the cache does not have, or has from too long ago; where it cannot be asked, older prices
stand in for it and the table says so. boto3 is imported only when there is something to ask.
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

from rubberband.atomic import write_atomically
from rubberband.cloud.catalogue import ENVIRONMENT_VARIABLE, InstanceType, Live, Table, catalogue, table_of, types_of
from rubberband.errors import ProviderError, RubberbandError
from rubberband.spec.resources import Resources

if TYPE_CHECKING:
    from rubberband.cloud.aws.calls import AwsSession
    from rubberband.cloud.aws.pricing import PricesTold

# What AWS told of instance types, kept in a file for each region, with the time of every price. No network.


Amount = Annotated[float, Field(ge=0.0, le=1e9)]
Instant = Annotated[float, Field(ge=0.0, le=1e12)]
"""Unix time."""
Part = Literal["facts", "on_demand", "spot"]
ALL_PARTS: frozenset[Part] = frozenset({"facts", "on_demand", "spot"})
"""What AWS can be asked for of a type, each on its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What an instance type has."""

    gpus: Annotated[int, Field(ge=0, le=1024)]
    gpu: str = ""
    gpu_memory_gib: Amount | None = None
    """Of one GPU."""
    vcpus: Amount
    memory_gib: Amount
    network_gbps: Amount | None = None
    """Sustained."""
    architectures: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Quote:
    """What AWS told of one type in one region, and when each part was told; an instant of None: never."""

    facts: Facts | None = None
    """None with an instant: the type cannot be had in the region."""
    facts_at: Instant | None = None
    on_demand_usd_per_hour: Amount | None = None
    """None with an instant: no such price."""
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
    """When AWS was asked for all types with GPUs; each of them then has a quote."""
    quotes: Mapping[str, Quote] = Field(default_factory=dict)


def read_book(home: Path, region: str) -> Book:
    """The quotes that are kept of a region: none where there is no file, or one that cannot be read."""
    try:
        book = Book.model_validate_json(_path(home, region).read_bytes())
    except (OSError, ValidationError):
        return Book(region=region)
    return book if book.region == region else Book(region=region)


def write_book(home: Path, book: Book) -> None:
    """Keep the quotes, whole or not at all. Where the home cannot be written to they are asked for again next time."""
    path = _path(home, book.region)
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, book.model_dump_json(indent=1).encode(), durable=False, mode=0o600)


def _path(home: Path, region: str) -> Path:
    safe = "".join(letter if letter.isalnum() or letter == "-" else "_" for letter in region)
    return home / "prices" / f"{safe}.json"


ON_DEMAND_GOOD_S = 86_400.0
"""How long a price on demand, and what a type has, are taken as they were told."""
SPOT_GOOD_S = 600.0
"""How long a price on spot is."""

Clock = Callable[[], float]


class LiveTable(dict[str, InstanceType]):
    """A table with remarks on where its prices come from."""

    def __init__(self, rows: Mapping[str, InstanceType], notes: Sequence[str] = ()) -> None:
        super().__init__(rows)
        self.notes = tuple(notes)
        """Why AWS could not be asked, or not for all; a line each, with the remedy."""


def live_table(
    resources: Resources,
    home: Path,
    *,
    session: AwsSession | None = None,
    refresh: bool = False,
    clock: Clock = time.time,
    environment: Mapping[str, str] = os.environ,
) -> LiveTable:
    """The table that an experiment plans with, with today's prices of the types that it names and of its head.

    A table of the user's own (`resources.catalogue`) is taken as it is, and so is the shipped one for other providers
    than EC2. `refresh` asks AWS whatever the cache in `home` has. Never raises because AWS could not be asked, unless
    it is to `refresh`: see `LiveTable.notes`.

    Raises InputError for a table that cannot be read; ProviderError where prices cannot be refreshed.
    """
    own = resources.catalogue or environment.get(ENVIRONMENT_VARIABLE)
    if own or not resources.kind.is_rented:
        return LiveTable(table_of(resources, environment))
    names = tuple(dict.fromkeys([*types_of(resources), resources.aws.head_instance_type]))
    return prices_of(names, resources.region, home, session=session, refresh=refresh, clock=clock)


def prices_of(
    types: Sequence[str] | None,
    region: str,
    home: Path,
    *,
    session: AwsSession | None = None,
    refresh: bool = False,
    clock: Clock = time.time,
) -> LiveTable:
    """The shipped table with what AWS tells of `types` in a region, or of all types with GPUs; as `live_table`."""
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
    """A table with the quotes of a region laid over it; types that it lacks are added."""
    rows = dict(table)
    for name, quote in book.quotes.items():
        row = _row(table.get(name) or _new_row(table, name, quote), quote, book.region)
        if row is not None:
            rows[name] = row
    return rows


def _stale(book: Book, types: Sequence[str] | None, now: float) -> tuple[Sequence[str] | None, frozenset[Part]]:
    """The types (None: all with GPUs) and the parts that AWS is to be asked for; no parts where all is fresh."""
    if types is None:
        if not _recent(book.gpu_types_at, now, ON_DEMAND_GOOD_S):
            return None, ALL_PARTS
        types = [name for name, quote in book.quotes.items() if quote.facts is not None and quote.facts.gpus]
    stale = {name: parts for name in types if (parts := _stale_parts(book.quotes.get(name, Quote()), now))}
    return list(stale), frozenset(part for parts in stale.values() for part in parts)


def _stale_parts(quote: Quote, now: float) -> frozenset[Part]:
    told: dict[Part, bool] = {"facts": _recent(quote.facts_at, now, ON_DEMAND_GOOD_S)}
    if quote.facts is not None or not told["facts"]:
        told["on_demand"] = _recent(quote.on_demand_at, now, ON_DEMAND_GOOD_S)
        told["spot"] = _recent(quote.spot_at, now, SPOT_GOOD_S)
    return frozenset(part for part, fresh in told.items() if not fresh)


def _recent(told_at: float | None, now: float, good_s: float) -> bool:
    # What is from the future was kept by a machine whose clock was wrong.
    return told_at is not None and 0.0 <= now - told_at <= good_s


def _asked(
    region: str, types: Sequence[str] | None, parts: frozenset[Part], session: AwsSession | None, clock: Clock
) -> tuple[PricesTold | None, tuple[str, ...]]:
    """What AWS tells, and why it does not tell all."""
    from rubberband.cloud.aws.calls import open_aws

    try:
        session = session or open_aws(region)
        from rubberband.cloud.aws.pricing import fetch

        answer = fetch(session, types, parts, clock=clock)
    except RubberbandError as error:
        return None, (str(error),)
    return answer, answer.problems


def _with(book: Book, answer: PricesTold, *, everything: bool) -> Book:
    quotes = dict(book.quotes)
    for name, quote in answer.quotes.items():
        if quote != Quote():
            quotes[name] = _newer(quotes.get(name, Quote()), quote)
    told_at = max((quote.facts_at for quote in answer.quotes.values() if quote.facts_at is not None), default=None)
    if not everything or told_at is None:
        return book.model_copy(update={"quotes": quotes})
    absent = Quote(facts_at=told_at)
    quotes |= {name: _newer(quotes.get(name, Quote()), absent) for name in catalogue() if name not in answer.quotes}
    return book.model_copy(update={"quotes": quotes, "gpu_types_at": told_at})


def _newer(old: Quote, new: Quote) -> Quote:
    """The parts that are new, and the old ones of those that are missing."""
    found = old
    if new.facts_at is not None:
        found = replace(found, facts=new.facts, facts_at=new.facts_at)
    if new.on_demand_at is not None:
        found = replace(found, on_demand_usd_per_hour=new.on_demand_usd_per_hour, on_demand_at=new.on_demand_at)
    if new.spot_at is not None:
        found = replace(found, spot_usd_per_hour=new.spot_usd_per_hour, spot_at=new.spot_at)
    return found


def _new_row(table: Table, name: str, quote: Quote) -> InstanceType | None:
    """A type that the table lacks; its GPUs are called as the table calls those of its family."""
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
    """A type with what was told of it in a region; None where there is nothing to tell.

    The model and the memory of its GPUs stay as the table has them (EC2 counts the memory of some without what is
    reserved), so that one profile goes on to hold for all types with the same GPUs.
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
        )
    offered = facts is not None or quote.facts_at is None
    prices = dict(row.prices_usd_per_hour)
    told_at = None
    if not offered:
        prices.pop(region, None)
    elif quote.on_demand_usd_per_hour is not None:
        prices[region], told_at = quote.on_demand_usd_per_hour, quote.on_demand_at
    live = Live(
        offered=offered, on_demand_at=told_at, spot_usd_per_hour=dict(quote.spot_usd_per_hour), spot_at=quote.spot_at
    )
    approximate = row.approximate - {region} if told_at is not None else row.approximate
    return replace(row, prices_usd_per_hour=prices, approximate=approximate, live={**row.live, region: live})
