"""What a node may choose about its Firecracker VMs. Pure."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class RateLimit:
    """How much a device may do on average. 0: as much as it can.

    What was not used within a second may be used up in a burst, but no more than a second's worth.
    """

    bandwidth: int = 0  # bytes per second
    operations: int = 0  # requests or packets per second


@dataclass(frozen=True, slots=True)
class FirecrackerOptions:
    """Limits hold for VMs that are booted and restored from now on, whatever held where a snapshot was made."""

    disk: RateLimit = field(default_factory=RateLimit)
    download: RateLimit = field(default_factory=RateLimit)  # what the guest receives
    upload: RateLimit = field(default_factory=RateLimit)  # what the guest sends
    page_reporting: bool = True  # guests tell which memory they have freed, and the host takes it back
