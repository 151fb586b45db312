"""The API document against the API: no request makes a server error, no answer is undocumented."""

from typing import Any

import httpx
import pytest
import schemathesis
from e2b import Sandbox
from hypothesis import HealthCheck, Phase, settings
from schemathesis.checks import load_all_checks
from schemathesis.specs.openapi.checks import content_type_conformance, response_schema_conformance

from tests.api.fakes import FakeOrchestrator, application
from tests.node.process import NodeProcess

load_all_checks()

EXAMPLES = 6  # requests for each operation; all of them together take less than a minute
# Refusals that a correct server may give to a correct request, where the document says so.
REFUSALS = {500: "image_registry_unreachable", 501: "not_supported", 503: "sandbox_capacity_unavailable"}


# Made here, so that each operation is a test of its own; that the node serves the same is a test below.
DOCUMENT: dict[str, Any] = application(FakeOrchestrator()).api.openapi()
schema = schemathesis.openapi.from_dict(DOCUMENT)


@pytest.fixture(scope="session")
def subject(node: NodeProcess) -> str:
    """The id of a real sandbox, for the operations on one."""
    options: Any = {"api_key": node.api_key, "api_url": node.url, "sandbox_url": node.url}
    return Sandbox.create("base", timeout=600, **options).sandbox_id


@schema.parametrize()
@settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
def test_every_operation_answers_as_documented(case: Any, node: NodeProcess, subject: str) -> None:
    # Every second request goes to a sandbox that exists.
    if "sandboxID" in (case.path_parameters or {}) and len(repr(case.query)) % 2:
        case.path_parameters["sandboxID"] = subject
    response = case.call(base_url=node.url, headers={"X-API-Key": node.api_key})
    documented = set(case.operation.definition.raw["responses"])
    assert str(response.status_code) in documented, f"{response.status_code} is not documented: {response.text}"
    if response.status_code >= 500:
        assert REFUSALS.get(response.status_code) == response.json().get("error_code"), response.text
    case.validate_response(response, checks=[content_type_conformance, response_schema_conformance])


def test_the_document_is_complete(node: NodeProcess) -> None:
    """Every operation asks for a key, but for the ones that are open, and knows 401."""
    found = httpx.get(f"{node.url}/openapi.json").json()
    assert found == DOCUMENT
    assert found["openapi"].startswith("3.1")
    for path, operations in found["paths"].items():
        for method, operation in operations.items():
            if path == "/health":
                continue
            assert "401" in operation["responses"], f"{method} {path}"
            assert operation["security"], f"{method} {path}"
