"""Typed errors of the platform.

Every error says what happened and, in ``hint``, what the reader can do next. Only ``aenv.api.errors`` knows
HTTP status codes; everything below it raises these.
"""


class AenvError(Exception):
    """Base of every error the platform raises on purpose."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} {self.hint}".rstrip()


class InvalidRequestError(AenvError):
    """The caller sent something that can never work; repeating it will not help."""


class NotFoundError(AenvError):
    """The named object does not exist, or no longer."""


class SandboxNotFoundError(NotFoundError):
    def __init__(self, sandbox_id: str) -> None:
        super().__init__(
            f"Sandbox {sandbox_id!r} not found.",
            "It may have been killed or have reached its end of life; list sandboxes with GET /v2/sandboxes.",
        )


class TemplateNotFoundError(NotFoundError):
    def __init__(self, template_id: str) -> None:
        super().__init__(
            f"Template {template_id!r} not found.",
            "List templates with GET /templates; the name is a template id, an alias, or alias:tag.",
        )


class SnapshotNotFoundError(NotFoundError):
    def __init__(self, name: str) -> None:
        super().__init__(
            f"Snapshot {name!r} not found.", "List snapshots with GET /snapshots; use an id, a name, or name:tag."
        )


class ConflictError(AenvError):
    """The object is in a state that does not allow the operation."""


class ReusedKeyError(ConflictError):
    """An idempotency key names a request, and this is another one."""


class UnresponsiveSnapshotError(ConflictError):
    """The sandbox was paused while its guest agent did not answer; with its memory it would not answer again."""


class CapacityError(AenvError):
    """The node has no room left (memory, disk, network slots, sandboxes)."""


class SandboxStartError(AenvError):
    """The microVM was started and its guest never became usable."""


class SandboxUnreachableError(AenvError):
    """The sandbox exists and nothing answers at the requested port."""


class GuestUnresponsiveError(AenvError):
    """The sandbox runs and its guest agent does not answer; nothing was changed."""


class VmmError(AenvError):
    """The virtual machine monitor refused a command, or died."""


class IncompatibleSnapshotError(AenvError):
    """The snapshot was captured by a VMM, accelerator, CPU model or kernel that this node does not run."""


class CorruptFileError(AenvError):
    """A file that the node wrote is torn, foreign or damaged; it is never served."""


class SourceError(AenvError):
    """Bytes of a layer cannot be read now: the network, the object store or a disk failed, or the object is gone."""
