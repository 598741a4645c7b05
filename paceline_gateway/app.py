"""The application: all routes, and the shapes of their errors."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from importlib import metadata
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from paceline.protocol.errors import PacelineError
from paceline.rpc.statuses import unexpected_error
from paceline_gateway.dialects.routes import dialect_routes, error_in_dialect
from paceline_gateway.http.errors import ERROR_RESPONSES, HttpError, as_http, http_error, invalid_body
from paceline_gateway.http.guard import Guard, RunningRequests
from paceline_gateway.http.ignored_fields import IgnoredFields
from paceline_gateway.http.operating_routes import operating_routes
from paceline_gateway.openai.routes import openai_routes
from paceline_gateway.openai.token_routes import token_routes
from paceline_gateway.page.routes import add_page
from paceline_gateway.upstream.services import Services

logger = logging.getLogger(__name__)


def create_app(services: Services, running_requests: RunningRequests) -> Guard:
    """Build the whole application over services, which end with it.

    The guard is outermost, so a defect, too, is answered with the request's id, logged and counted.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncGenerator[None, None]:
        yield
        await services.close()

    app = FastAPI(
        title="Paceline",
        version=metadata.version("paceline"),
        description="OpenAI's API in front of speculative decoding as separate services.",
        lifespan=lifespan,
        responses=ERROR_RESPONSES,
        # Both pages would load scripts from elsewhere.
        docs_url=None,
        redoc_url=None,
    )
    app.state.prompts = services.prompts
    app.include_router(openai_routes(services))
    app.include_router(dialect_routes(services))
    app.include_router(token_routes(services))
    app.include_router(operating_routes(services, running_requests))
    add_page(app)
    app.add_middleware(IgnoredFields)
    app.add_exception_handler(HttpError, _typed_error)
    app.add_exception_handler(PacelineError, _typed_error)
    app.add_exception_handler(RequestValidationError, _invalid_request)
    app.add_exception_handler(HTTPException, _http_exception)
    app.add_exception_handler(Exception, _defect)
    return Guard(app, services.config, running_requests, services.coordinators.tenant, error_in_dialect)


async def _typed_error(request: Request, error: Any) -> Response:
    return _error_response(request, as_http(error))


async def _invalid_request(request: Request, error: Any) -> Response:
    return _error_response(request, invalid_body(error.errors()))


async def _http_exception(request: Request, error: Any) -> Response:
    return _error_response(request, HttpError(error.status_code, str(error.detail)))


async def _defect(request: Request, error: Exception) -> Response:
    logger.error("request failed: path=%s", request.url.path, exc_info=error)
    return _error_response(request, http_error(unexpected_error(error)))


def _error_response(request: Request, error: HttpError) -> Response:
    return error_in_dialect(request.url.path, error).response
