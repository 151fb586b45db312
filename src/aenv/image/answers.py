"""Errors on their way between processes: as part of an answer."""

from __future__ import annotations

from typing import Any

from aenv.errors import AenvError, CapacityError
from aenv.image import errors


def describe(error: AenvError) -> dict[str, str]:
    """For an answer: what ``raise_error`` raises again in another process."""
    return {"error": type(error).__name__, "message": error.message, "hint": error.hint}


def raise_error(answer: dict[str, Any]) -> None:
    if "error" in answer:
        kind = CapacityError if answer["error"] == "CapacityError" else getattr(errors, answer["error"], None)
        raise (kind or errors.ImageError)(answer["message"], answer["hint"])
