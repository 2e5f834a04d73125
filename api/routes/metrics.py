"""`/metrics`: what Prometheus scrapes."""

from __future__ import annotations

from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest

from rubberband.api.openapi import only_documented
from rubberband.api.security.authentication import Reader

router = APIRouter(tags=["service"], dependencies=[Depends(only_documented)])

_EXAMPLE = """\
# HELP rubberband_spend_usd The bill so far.
# TYPE rubberband_spend_usd gauge
rubberband_spend_usd{experiment="digits-sha"} 0.13
"""


@router.get(
    "/metrics",
    summary="Measures for Prometheus",
    operation_id="getMetrics",
    response_class=Response,
    response_model=None,
    responses={
        200: {
            "description": "The text format of Prometheus.",
            "content": {"text/plain": {"schema": {"type": "string"}, "example": _EXAMPLE}},
        }
    },
)
def get_metrics(request: Request, _reader: Reader) -> Response:
    """Spend, slack to the deadline, plan error, instances and trials by experiment; requests by route."""
    registry: CollectorRegistry = request.app.state.registry
    return Response(generate_latest(registry), media_type=CONTENT_TYPE_PLAIN_0_0_4)
