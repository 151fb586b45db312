"""What a cold-booted guest is told on its kernel command line (``envd/src/boot.rs`` reads it). Pure."""

import re
from collections.abc import Sequence

from aenv.network.slot import NetworkSlot
from aenv.orchestrator.model import Drive

_ARGUMENT = re.compile(r"[0-9A-Za-z_./+=-]+")
_OWN = "aenv."


def allowed_arguments(text: str, prefixes: Sequence[str]) -> tuple[str, ...]:
    """The words of ``extraBootArgs`` that may be given: those that begin with one of ``prefixes``.

    Others, and those with characters that AgentENV's specification does not list, are left out without a word, as it
    says.
    """
    words = (word for word in text.split() if _ARGUMENT.fullmatch(word) and not word.startswith(("=", _OWN)))
    return tuple(word for word in words if word.startswith(tuple(prefixes)))


def read_only_folders(drives: Sequence[Drive]) -> tuple[str, ...]:
    """The parameter by which a guest makes the folders of drives read-only."""
    folders = ",".join(drive.mount_path for drive in drives if drive.read_only)
    return (f"{_OWN}readonly={folders}",) if folders else ()


# Pages that are freed become zero, and zero pages are not stored: a snapshot has what its guest uses, and not what it
# once used. All memory is cleared at the boot, so this is for machines that are captured and restored from then on.
ZERO_FREED = ("init_on_free=1", "init_on_alloc=0")


def boot_parameters(
    slot: NetworkSlot, dns: Sequence[str], hostname: str, arguments: Sequence[str] = ()
) -> dict[str, str]:
    """Everything else a guest learns from ``POST /init``, after a boot as after a restore.

    ``arguments`` are ``ZERO_FREED``, or those of ``allowed_arguments``.
    """
    extra = dict(argument.partition("=")[::2] for argument in arguments)
    return extra | {
        "aenv.root": "/dev/vda",
        "aenv.ip": f"{slot.guest_address}/30",
        "aenv.gw": slot.gateway_address,
        "aenv.dns": ",".join(dns),
        "aenv.hostname": hostname,
    }
