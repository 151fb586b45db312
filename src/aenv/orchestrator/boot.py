"""What a cold-booted guest is told on its kernel command line (``envd/src/boot.rs`` reads it). Pure."""

from collections.abc import Sequence

from aenv.network.slot import NetworkSlot


def boot_parameters(slot: NetworkSlot, dns: Sequence[str], hostname: str) -> dict[str, str]:
    """Everything else a guest learns from ``POST /init``, after a boot as after a restore."""
    return {
        "aenv.root": "/dev/vda",
        "aenv.ip": f"{slot.guest_address}/30",
        "aenv.gw": slot.gateway_address,
        "aenv.dns": ",".join(dns),
        "aenv.hostname": hostname,
    }
