"""Metrics and logs of sandboxes, and the node itself."""

import asyncio
import json
import socket
import uuid
from datetime import UTC, datetime
from typing import Annotated, Literal

from fastapi import APIRouter, Path, Query

from aenv import __version__
from aenv.api import bodies
from aenv.api.context import Context, Ctx, SandboxId, errors
from aenv.api.errors import MissingFeatureError
from aenv.errors import InvalidRequestError, NotFoundError
from aenv.observability.events import Level
from aenv.observability.logs import Entry
from aenv.observability.samples import Sample
from aenv.orchestrator.model import SandboxFilter
from aenv.proxy.routing import sandbox_id as parse_sandbox_id

router = APIRouter(tags=["sandboxes"])

MAX_IDS = 100  # sandboxes of one request for metrics, from E2B's specification
MAX_LOGS = 1000
NO_CLUSTER = str(uuid.UUID(int=0))

_INSTANCE = str(uuid.uuid4())
_STARTED = datetime.now(UTC)

ClusterId = Annotated[uuid.UUID | None, Query(alias="clusterID")]
Unix = Annotated[int | None, Query(ge=0, le=2**63 - 1)]


@router.get("/sandboxes/metrics", responses=errors(400))
async def metrics_of_many(
    context: Ctx,
    sandbox_ids: Annotated[list[str], Query(description="Comma-separated or repeated; at most 100")],
) -> bodies.SandboxesWithMetrics:
    """The last sample of each. Sandboxes that do not exist, or have none, are left out."""
    names = dict.fromkeys(name.strip() for value in sandbox_ids for name in value.split(",") if name.strip())
    if len(names) > MAX_IDS:
        raise InvalidRequestError(f"sandbox_ids: at most {MAX_IDS}, not {len(names)}.")
    samples = await asyncio.gather(*(_latest(context, name) for name in names))
    return bodies.SandboxesWithMetrics(
        sandboxes={name: _metric(sample) for name, sample in zip(names, samples, strict=True) if sample is not None}
    )


async def _latest(context: Context, name: str) -> Sample | None:
    parsed = parse_sandbox_id(name.encode("utf-8", "replace"))
    return None if parsed is None else await context.services.sampler.latest(parsed)


@router.get("/sandboxes/{sandboxID}/metrics", responses=errors(400, 404))
async def metrics(
    sandbox_id: SandboxId, context: Ctx, start: Unix = None, end: Unix = None
) -> list[bodies.SandboxMetric]:
    """Samples between two Unix times in seconds, oldest first; at most the last hour's are kept."""
    await context.orchestrator.get(sandbox_id)
    if start is not None and end is not None and start > end:
        raise InvalidRequestError("start: must not be after end.")
    samples = await context.services.sampler.history(sandbox_id, start, end)
    return [_metric(sample) for sample in samples]


def _metric(sample: Sample) -> bodies.SandboxMetric:
    return bodies.SandboxMetric(
        timestamp=datetime.fromtimestamp(sample.time, UTC),
        timestamp_unix=int(sample.time),
        cpu_count=int(sample.cpu_count),
        cpu_used_pct=sample.cpu_used_pct,
        mem_used=int(sample.mem_used),
        mem_total=int(sample.mem_total),
        mem_cache=int(sample.mem_cache),
        disk_used=int(sample.disk_used),
        disk_total=int(sample.disk_total),
    )


@router.get("/sandboxes/{sandboxID}/logs", deprecated=True, responses=errors(400, 404))
async def logs(
    sandbox_id: SandboxId,
    context: Ctx,
    start: Annotated[int | None, Query(ge=0, le=2**63 - 1, description="Unix milliseconds")] = None,
    limit: Annotated[int, Query(ge=0, le=2**31 - 1)] = MAX_LOGS,
) -> bodies.SandboxLogs:
    """Lifecycle events and console lines, oldest first."""
    await _require_logs(sandbox_id, context)
    found = context.services.logs.read(sandbox_id, cursor=start, limit=limit)
    return bodies.SandboxLogs(logs=[_line(entry) for entry in found], log_entries=[_entry(e) for e in found])


@router.get("/v2/sandboxes/{sandboxID}/logs", responses=errors(400, 404))
async def logs_v2(
    sandbox_id: SandboxId,
    context: Ctx,
    cursor: Annotated[int | None, Query(ge=0, le=2**63 - 1, description="Unix milliseconds, inclusive")] = None,
    limit: Annotated[int, Query(ge=0, le=MAX_LOGS)] = MAX_LOGS,
    direction: Annotated[Literal["forward", "backward"], Query()] = "forward",
    level: Annotated[bodies.LevelName | None, Query(description="The least level to return")] = None,
    search: Annotated[str | None, Query(max_length=256, description="Text that messages contain")] = None,
) -> bodies.SandboxLogsV2:
    """From ``cursor`` on, oldest first; ``backward``: up to it, newest first."""
    await _require_logs(sandbox_id, context)
    found = context.services.logs.read(
        sandbox_id,
        cursor=cursor,
        limit=limit,
        backward=direction == "backward",
        level=Level[(level or "debug").upper()],
        search=search or "",
    )
    return bodies.SandboxLogsV2(logs=[_entry(entry) for entry in found])


async def _require_logs(sandbox_id: str, context: Context) -> None:
    """With the console up to now. A sandbox that ended a while ago still has its log."""
    context.services.recorder.collect(sandbox_id)
    if not context.services.logs.known(sandbox_id):
        await context.orchestrator.get(sandbox_id)


def _line(entry: Entry) -> bodies.LogLine:
    line = {"level": entry.level.label, "logger": entry.logger, "message": entry.message}
    return bodies.LogLine(timestamp=entry.time, line=json.dumps(line, ensure_ascii=False))


def _entry(entry: Entry) -> bodies.LogEntry:
    level: bodies.LevelName = entry.level.label  # type: ignore[assignment]
    return bodies.LogEntry(timestamp=entry.time, level=level, message=entry.message, fields={"logger": entry.logger})


@router.get("/nodes", tags=["admin"], responses=errors(400))
async def nodes(context: Ctx, cluster: ClusterId = None) -> list[bodies.Node]:
    """This node."""
    return [] if cluster is not None and str(cluster) != NO_CLUSTER else [await _node(context)]


@router.get("/nodes/{nodeID}", tags=["admin"], responses=errors(400, 404))
async def node(
    context: Ctx,
    node_id: Annotated[str, Path(alias="nodeID")],
    cluster: ClusterId = None,
) -> bodies.NodeDetail:
    found = await nodes(context, cluster)
    if not found or found[0].id != node_id:
        raise NotFoundError(f"Node {node_id[:64]!r} not found.")
    builds = {tagged.build_id for t in await context.orchestrator.templates() for tagged in t.tags.values()}
    builds |= {t.build_id for t in await context.orchestrator.templates()}
    return bodies.NodeDetail(**dict(found[0]), cached_builds=sorted(builds))


@router.post("/nodes/{nodeID}", tags=["admin"], status_code=204, responses=errors(400, 404, 501))
async def change_node(node_id: Annotated[str, Path(alias="nodeID")], context: Ctx) -> None:
    """Draining is not supported: stop the server, which leaves or pauses its sandboxes."""
    await node(context, node_id)
    raise MissingFeatureError("Changing a node's status is not supported.", "Stop aenv-server instead.")


@router.get("/nodes/{nodeID}/hypervisors", tags=["admin"], responses=errors(400, 404))
async def hypervisors(
    context: Ctx,
    node_id: Annotated[str, Path(alias="nodeID")],
    cluster: ClusterId = None,
) -> list[bodies.Hypervisor]:
    """Which hypervisors run the guest kernel here, and why not; best first.

    The first call after the host has booted boots the kernel in each, which takes seconds.
    """
    await node(context, node_id, cluster)
    known = context.services.hypervisors
    tried = await known.verdicts()
    return [
        bodies.Hypervisor(
            vmm=verdict.vmm,  # type: ignore[arg-type]
            accelerator=verdict.accelerator.value,
            works=verdict.works,
            used=verdict.candidate == known.used,
            reason=verdict.reason,
            advice=verdict.advice,
            unconfined=known.gaps if verdict.candidate == known.used else [],
        )
        for verdict in tried
    ]


async def _node(context: Context) -> bodies.Node:
    orchestrator, services = context.orchestrator, context.services
    count, vcpus, memory = 0, 0, 0
    paused, paused_vcpus, paused_memory = 0, 0, 0
    token = None
    while True:
        page = await orchestrator.list(SandboxFilter(), 100, token)
        for sandbox in page.items:
            if sandbox.state.public == "paused":
                paused, paused_vcpus = paused + 1, paused_vcpus + sandbox.vcpus
                paused_memory += sandbox.memory_mib
                continue
            count, vcpus, memory = count + 1, vcpus + sandbox.vcpus, memory + sandbox.memory_mib
        token = page.next_token
        if token is None:
            break
    host, cpu = services.host.metrics(), services.host.cpu()
    return bodies.Node(
        id=socket.gethostname(),
        service_instance_id=_INSTANCE,
        cluster_id=NO_CLUSTER,
        status="ready",
        status_changed_at=_STARTED,
        sandbox_count=count,
        sandbox_starting_count=services.recorder.starting,
        sandbox_paused_count=paused,
        create_successes=services.recorder.started,
        create_fails=services.recorder.failed,
        version=__version__,
        commit="",
        metrics=bodies.NodeMetrics(
            allocated_cpu=vcpus,
            allocated_memory_bytes=memory << 20,
            paused_allocated_cpu=paused_vcpus,
            paused_allocated_memory_bytes=paused_memory << 20,
            cpu_percent=host.cpu_percent,
            cpu_count=host.cpu_count,
            memory_used_bytes=host.memory_used,
            memory_total_bytes=host.memory_total,
            disks=[
                bodies.DiskMetrics(
                    mount_point=host.disk_mount,
                    device=host.disk_device,
                    filesystem_type=host.disk_type,
                    used_bytes=host.disk_used,
                    total_bytes=host.disk_total,
                )
            ],
        ),
        machine_info=bodies.MachineInfo(
            cpu_family=cpu.family,
            cpu_model=cpu.model,
            cpu_model_name=cpu.name,
            cpu_architecture=cpu.architecture,
        ),
    )
