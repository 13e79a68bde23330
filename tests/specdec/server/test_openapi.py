"""The schema of the API: true of the answers, and no request that is drawn from it makes the server fail."""

from typing import Any

import pytest
import schemathesis
from hypothesis import given, settings
from schemathesis import Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.profiles import num_cases
from tests.specdec.server.running import Served

pytestmark = pytest.mark.slow

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
# Per route. The profile "nightly" draws more.
NUM_REQUESTS = num_cases(10)
# Fields that make an answer long, and their bounds here.
BOUNDS = {"max_tokens": 2, "max_completion_tokens": 2, "max_output_tokens": 2, "n": 2}


def _bounded(body: Any) -> Any:
    """Return a body whose answer is short: these tests are about requests."""
    if not isinstance(body, dict):
        return body
    least = {name: most for name, most in BOUNDS.items() if name != "n" and name not in body}
    given = {
        name: min(value, BOUNDS[name]) if name in BOUNDS and isinstance(value, int) else value
        for name, value in body.items()
    }
    return least | given


@pytest.mark.long
@pytest.mark.parametrize("mode", GenerationMode)
def test_no_request_makes_the_server_fail(server: Served, mode: GenerationMode) -> None:
    """Neither one that follows the schema nor one that does not. Answers follow it."""
    api = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    operations = [result.ok() for result in api.get_all_operations()]
    assert len(operations) == 19
    for operation in operations:
        if mode.is_negative and not list(operation.body):
            continue

        @settings(max_examples=NUM_REQUESTS)
        @given(case=operation.as_strategy(generation_mode=mode))
        def check(case: Case) -> None:
            case.body = _bounded(case.body)
            case.call_and_validate(checks=CHECKS)

        check()


def test_nothing_is_left(server: Served) -> None:
    server.wait_until_idle()
