"""The exceptions of Outrider and their gRPC and HTTP statuses.

OutriderError
├── ConfigurationError      a setting, flag, model folder or port is unusable
│   └── AddressInUseError   another program listens there, perhaps not for long
├── InvalidRequestError     400  INVALID_ARGUMENT    the caller's request is unusable; `param` names the field
│   └── ContextLengthError  400  OUT_OF_RANGE        longer than model or cache allow
├── NotFoundError           404  NOT_FOUND           no such model or route
├── OverloadedError         503  RESOURCE_EXHAUSTED  there is no room now; nothing was started
├── UnavailableError        503  UNAVAILABLE         no worker can answer now
└── InternalError           500  INTERNAL            we broke something

Foreign errors are translated once, where they enter: gRPC's in `from_status`, pydantic's in `cluster.config` and
in the router's request parsing.
"""

from __future__ import annotations

import errno

import grpc


class OutriderError(Exception):
    """Base of every error this project raises on purpose."""

    http_status = 500
    grpc_code = grpc.StatusCode.INTERNAL
    error_type = "internal_error"
    retry_after: int | None = None
    "Seconds after which a retry is worthwhile, if it ever is."

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class ConfigurationError(OutriderError):
    """A setting that cannot work; the message names it and the remedy."""

    grpc_code = grpc.StatusCode.FAILED_PRECONDITION


class AddressInUseError(ConfigurationError):
    """Another program listens at the address."""


def cannot_listen(where: str, error: Exception, remedy: str) -> ConfigurationError:
    """Returns the error for a failed listen at `where`; the message ends with `remedy`."""
    kind = AddressInUseError if getattr(error, "errno", None) == errno.EADDRINUSE else ConfigurationError
    return kind(f"cannot listen at {where}: {getattr(error, 'strerror', None) or error}; {remedy}")


class InvalidRequestError(OutriderError):
    http_status = 400
    grpc_code = grpc.StatusCode.INVALID_ARGUMENT
    error_type = "invalid_request_error"


class ContextLengthError(InvalidRequestError):
    """The prompt, or the prompt plus the requested answer, exceeds the model's context."""

    grpc_code = grpc.StatusCode.OUT_OF_RANGE
    code = "context_length_exceeded"

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        num_prompt_tokens: int = 0,
        max_tokens: int | None = None,
        max_model_len: int = 0,
    ) -> None:
        """`max_tokens`: requested tokens of the answer; None if the prompt leaves no room for one.

        The numbers are not on the wire: they are 0 in the error of a target that refuses.
        """
        super().__init__(message, param=param)
        self.num_prompt_tokens = num_prompt_tokens
        self.max_tokens = max_tokens
        self.max_model_len = max_model_len


class NotFoundError(OutriderError):
    http_status = 404
    grpc_code = grpc.StatusCode.NOT_FOUND
    error_type = "not_found_error"


class OverloadedError(OutriderError):
    http_status = 503
    grpc_code = grpc.StatusCode.RESOURCE_EXHAUSTED
    error_type = "overloaded_error"
    retry_after = 1  # any request that ends frees a place


class UnavailableError(OutriderError):
    http_status = 503
    grpc_code = grpc.StatusCode.UNAVAILABLE
    error_type = "unavailable_error"
    retry_after = 5  # time to notice a dead worker, restart it after a pause, load its model and find it again


class InternalError(OutriderError):
    pass


def first_line(error: BaseException) -> str:
    """Returns the first line of the message of `error`; its type's name if it has none."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


_BY_STATUS_CODE: dict[int, type[OutriderError]] = {
    error.grpc_code.value[0]: error
    for error in (InvalidRequestError, ContextLengthError, NotFoundError, OverloadedError, UnavailableError)
}


def from_status(code: int, message: str, param: str | None = None) -> OutriderError:
    """Returns the exception for a gRPC status; `code` is the status code's number."""
    return _BY_STATUS_CODE.get(code, InternalError)(message, param=param)
