"""Base of the bodies of all requests."""

from pydantic import BaseModel, ConfigDict

from specdec.server.errors import ApiError


class RequestModel(BaseModel):
    """A request's body. Values have the type that is asked for, and null stands for a field that is left out."""

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())

    def unknown_fields(self) -> list[str]:
        """Return the names of fields that the API does not have."""
        return list(self.model_extra or {})

    def refuse(self, name: str, remedy: str) -> ApiError:
        """Return the error of a field that has a value this server cannot serve."""
        return ApiError(400, f"{name} is not supported; {remedy}", param=name)
