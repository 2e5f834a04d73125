"""`/v1/tokens`: make, list and revoke tokens. For admins."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Path, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict, Field, JsonValue

from rubberband.api.security.authentication import Admin, doorkeeper_of
from rubberband.api.store.schema import Scope, TokenRecord
from rubberband.api.web.openapi import refusals
from rubberband.api.web.problems import NOT_FOUND, HttpProblem
from rubberband.units import parse_duration, shown

router = APIRouter(prefix="/v1/tokens", tags=["tokens"])

_EXAMPLE: dict[str, JsonValue] = {
    "id": "0123456789ab",
    "name": "ci",
    "scope": "submit",
    "created_at": 1795291200.0,
    "expires_at": 1803067200.0,
    "revoked_at": 1803000000.0,
    "last_used_at": 1795291260.0,
}


class NewToken(BaseModel):
    """A token to be made."""

    model_config = ConfigDict(
        extra="forbid", json_schema_extra={"examples": [{"name": "ci", "scope": "submit", "expires": "90d"}]}
    )

    name: Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[\w.@+-]([\w .@+-]*[\w.@+-])?$")]
    """The token's owner or purpose."""
    scope: Scope
    expires: Annotated[str | None, Field(max_length=64, description="After this duration, such as 90d.")] = None


class TokenView(BaseModel):
    """A token, without its secret. Times are Unix seconds."""

    model_config = ConfigDict(json_schema_extra={"examples": [_EXAMPLE]})

    id: str
    name: str
    scope: Scope
    created_at: float
    expires_at: float | None
    revoked_at: float | None
    last_used_at: float | None


class MadeToken(TokenView):
    """A new token."""

    model_config = ConfigDict(json_schema_extra={"examples": [_EXAMPLE | {"token": "rb_0123456789ab_" + "0" * 64}]})

    token: str
    """The token itself. It is not shown again."""


class TokenList(BaseModel):
    """All tokens, oldest first."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"items": [_EXAMPLE]}]})

    items: list[TokenView]


@router.get("", operation_id="listTokens", summary="List the tokens", response_model=TokenList)
def list_tokens(request: Request, _admin: Admin) -> Response:
    """All tokens, those that are revoked or expired included; never their secrets."""
    return JSONResponse({"items": [_view(record) for record in doorkeeper_of(request).tokens.records()]})


@router.post("", operation_id="createToken", summary="Make a token", status_code=201, response_model=MadeToken)
def create_token(request: Request, body: NewToken, _admin: Admin) -> Response:
    """Make a token. Its secret is in this answer, and nowhere else."""
    lasts_s = None if body.expires is None else parse_duration(body.expires)
    record, token = doorkeeper_of(request).tokens.create(body.name, body.scope, lasts_s=lasts_s)
    return JSONResponse(_view(record) | {"token": token}, 201, {"Location": f"/v1/tokens/{record.id}"})


@router.delete(
    "/{id}", operation_id="revokeToken", summary="Revoke a token", status_code=204, responses=refusals(NOT_FOUND)
)
def revoke_token(
    request: Request,
    _admin: Admin,
    id: Annotated[str, Path(description="The token's id.", max_length=64, examples=["0123456789ab"])],
) -> Response:
    """End a token, and the sessions of the browsers that signed in with it, at once."""
    if not doorkeeper_of(request).tokens.revoke(id):
        raise HttpProblem(NOT_FOUND, f"there is no token {shown(id)}")
    return Response(status_code=204)


def _view(record: TokenRecord) -> dict[str, Any]:
    return {field: getattr(record, field) for field in TokenView.model_fields}
