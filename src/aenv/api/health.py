"""Liveness, open to everyone."""

from fastapi import APIRouter

router = APIRouter(tags=["health"])


@router.get("/health", status_code=204)
async def health() -> None:
    """The server answers."""
