"""Calls of an HTTP endpoint with JSON bodies, without packages beyond Python's own."""

import asyncio
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

# Characters of an answer that an error shows.
_MOST_SHOWN = 300


class EndpointError(RuntimeError):
    """An endpoint refused a call or could not be reached. The message is one line.

    Attributes:
        status: status of the answer, None without one.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class JsonClient:
    """Calls from a pool of threads.

    Args:
        url: beginning of all addresses.
        api_key: sent as a bearer token; None for none.
        timeout: seconds without a byte after which a call fails.
        max_connections: most calls at once.

    Attributes:
        num_calls: calls so far.
    """

    def __init__(self, url: str, api_key: str | None, timeout: float, max_connections: int) -> None:
        self.url, self._timeout = url.rstrip("/"), timeout
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._threads = ThreadPoolExecutor(max_connections, "specdec-endpoint")
        self.num_calls = 0

    async def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """Return the answer to a call.

        Raises:
            EndpointError: the endpoint refused the call, cannot be reached, or answered with something else than JSON.
        """
        self.num_calls += 1
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._post, path, dict(body))

    def _post(self, path: str, body: Mapping[str, Any]) -> Any:
        address = f"{self.url}{path}"
        try:
            request = Request(address, json.dumps(body).encode(), self._headers)
            with urlopen(request, timeout=self._timeout) as reply:
                return json.load(reply)
        except HTTPError as error:
            raise EndpointError(f"{address}: status {error.code}: {_reason(error)}", error.code) from None
        except (OSError, HTTPException) as error:
            raise EndpointError(f"{address}: {getattr(error, 'reason', error)}") from None
        except ValueError as error:
            raise EndpointError(f"{address}: the answer is not JSON: {error}") from None

    def close(self) -> None:
        """Take no further calls; those that run end by themselves."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def _reason(error: HTTPError) -> str:
    """Return an error's message in OpenAI's shape, or the beginning of its text, or else the status in words."""
    text = error.reason
    try:
        text = error.read().decode(errors="replace")
        return str(json.loads(text)["error"]["message"])
    except (ValueError, LookupError, TypeError, OSError, HTTPException):
        return " ".join(text[:_MOST_SHOWN].split())
