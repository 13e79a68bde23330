"""The application: routes, middleware and the form of errors."""

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from starlette.exceptions import HTTPException

from specdec import __version__
from specdec.openai.errors import ClientGoneError
from specdec.server import chat, completions, operations, page_route, scoring
from specdec.server.error_handlers import on_client_gone, on_http_error, on_invalid_request
from specdec.server.gate import Gate
from specdec.server.openapi import describe
from specdec.server.service import Service


def build_app(service: Service) -> FastAPI:
    """Return the application of a service whose engine runs."""
    # The pages that FastAPI offers for its schema load code from other hosts.
    app = FastAPI(title="specdec", version=__version__, docs_url=None, redoc_url=None)
    app.state.service = service
    for routes in (completions, chat, scoring, operations, page_route):
        app.include_router(routes.router)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(RequestValidationError, on_invalid_request)
    app.add_exception_handler(ClientGoneError, on_client_gone)
    describe(app, has_keys=bool(service.settings.api_key))
    app.add_middleware(Gate, settings=service.settings, metrics=service.metrics)
    if origins := service.settings.allowed_origins:
        headers = ["X-Request-Id"]
        app.add_middleware(
            CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"], expose_headers=headers
        )
    return app
