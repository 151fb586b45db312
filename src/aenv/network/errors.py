"""Errors of the network layer. Each message says what happened and what the operator or user can do."""
# ruff: noqa: N818 - named for what happened

from __future__ import annotations

from aenv.errors import AenvError, CapacityError, InvalidRequestError


class NetworkError(AenvError):
    """Base of every error the network layer raises on purpose."""


class NetworkUnavailable(NetworkError):
    """The host cannot provide slots: a missing privilege, kernel feature or library, or unusable settings."""


class NetworkConflict(NetworkError):
    """The address pool, the name prefix or the lock is taken by something else on this host."""


class NetworkExhausted(NetworkError, CapacityError):
    """Every address of the pool is in use."""


class SlotLost(NetworkError):
    """A slot that should outlive the server no longer exists, so its virtual machine has no network."""


class InvalidPolicy(NetworkError, InvalidRequestError, ValueError):
    """An egress policy names something that is not an IPv4 address or network."""


class RulesetRejected(NetworkError):
    """The kernel or libnftables refused a ruleset."""
