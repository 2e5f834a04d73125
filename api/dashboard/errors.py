"""What went wrong as a page: for a browser that asked for one, the answer to a problem."""

from __future__ import annotations

from fastapi import Request
from fastapi.responses import Response

from rubberband.api.dashboard.frame import render
from rubberband.api.problems import Problem


def wants_page(request: Request) -> bool:
    """Whether it is a person's browser that asks, for something that is no part of REST."""
    return not request.url.path.startswith("/v1/") and "text/html" in request.headers.get("accept", "")


def problem_page(request: Request, problem: Problem) -> Response:
    """The page that tells of a problem, with its status and headers."""
    kind = problem.kind
    page = render(request, "problem.html", status=kind.status, title=kind.title, detail=problem.detail)
    page.headers.update(problem.headers)
    return page
