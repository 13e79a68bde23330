"""The application: routes, middleware and the form of errors."""

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from starlette.exceptions import HTTPException

from specdec import __version__
from specdec.server import chat, completions, operations, page_route, responses, scoring
from specdec.server.connection import ClientGoneError
from specdec.server.errors import on_http_error, on_invalid_request, on_unexpected_error
from specdec.server.gate import Gate
from specdec.server.openapi import describe
from specdec.server.service import Service

# nginx's status for a request whose client has gone, seen in logs alone.
_CLIENT_GONE = 499


def build_app(service: Service) -> FastAPI:
    """Return the application of a service whose engine runs."""
    # The pages that FastAPI offers for its schema load code from other hosts.
    app = FastAPI(title="specdec", version=__version__, docs_url=None, redoc_url=None)
    app.state.service = service
    for routes in (completions, chat, responses, scoring, operations, page_route):
        app.include_router(routes.router)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(RequestValidationError, on_invalid_request)
    app.add_exception_handler(ClientGoneError, _on_client_gone)
    app.add_exception_handler(Exception, on_unexpected_error)
    describe(app, has_keys=bool(service.settings.api_key))
    app.add_middleware(Gate, settings=service.settings)
    if origins := service.settings.allowed_origins:
        headers = ["X-Request-Id"]
        app.add_middleware(
            CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"], expose_headers=headers
        )
    return app


async def _on_client_gone(_: Request, __: Exception) -> Response:
    return Response(status_code=_CLIENT_GONE)
