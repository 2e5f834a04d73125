"""`/v1/prices`: hardware and prices of instance types, current or last known."""

from __future__ import annotations

import re
from typing import Annotated

from fastapi import APIRouter, Depends, Query
from fastapi.responses import Response

from rubberband.api.security.authentication import Reader
from rubberband.api.service import Serving
from rubberband.api.settings import Settings
from rubberband.api.web.answers import json_answer
from rubberband.api.web.models import PRICES, PriceList, example
from rubberband.api.web.openapi import only_documented, refusals
from rubberband.api.web.problems import INVALID, HttpProblem
from rubberband.cloud.catalogue import catalogue
from rubberband.cloud.prices import LiveTable, overlaid, prices_of, read_book
from rubberband.units import shown
from rubberband.views.estimate.prices import chosen, price_notes, prices_json

router = APIRouter(tags=["prices"], prefix="/v1", dependencies=[Depends(only_documented)])

REGION_PATTERN = "^[a-z]{2,4}(-[a-z]{2,12}){1,3}-[0-9]{1,2}$"
_TYPE = re.compile(r"[a-z0-9-]{1,24}\.[a-z0-9-]{1,24}")
_MAX_TYPES = 50


@router.get(
    "/prices",
    summary="List prices of instance types",
    operation_id="listPrices",
    response_model=PriceList,
    responses={200: example("As `rubberband cloud prices -o json` prints them.", PRICES), **refusals(INVALID)},
)
def list_prices(
    service: Serving,
    _reader: Reader,
    type: Annotated[
        list[str] | None,
        Query(
            description="Only these types, with or without GPUs; default: all with GPUs. Repeats.",
            max_length=_MAX_TYPES,
            examples=[["g4dn.xlarge"]],
        ),
    ] = None,
    region: Annotated[
        str, Query(pattern=REGION_PATTERN, max_length=40, description="The region of AWS.", examples=["us-east-1"])
    ] = "us-east-1",
) -> Response:
    """AWS is asked where the service may rent there; otherwise, and where it cannot be, `notes` say what is shown."""
    types = type or []
    for name in types:
        if _TYPE.fullmatch(name) is None:
            raise HttpProblem(INVALID, f"type: {shown(name)} is not an instance type; write one such as g4dn.xlarge")
    table = _table(service.settings, types, region)
    rows = chosen(table, types, region, option="region")
    return json_answer(prices_json(rows, region, price_notes(table)))


def _table(settings: Settings, types: list[str], region: str) -> LiveTable:
    if settings.rents:
        return prices_of(types or None, region, settings.home)
    return LiveTable(overlaid(catalogue(), read_book(settings.home, region)), ("the service does not rent from AWS",))
