"""Runs one build: from its origin or a cached layer through its steps to a snapshot that sandboxes start from.

The base is prepared by ``aenv.template.origin``; here the steps are applied, each result is kept in the layer cache,
and the start command is brought up. What exists of a build while it runs is described in ``aenv.template.machine``.
"""

import asyncio
import tarfile
from collections.abc import Awaitable
from contextlib import AsyncExitStack
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

from aenv.errors import AenvError, InvalidRequestError
from aenv.orchestrator.builds import BuiltImage, CachedLayer, Failure
from aenv.template import globs, growth, keys, scripts, service_command
from aenv.template.archives import Archives
from aenv.template.cache import LayerCache
from aenv.template.context import Context, after_dockerfile, of_dockerfile
from aenv.template.guest import BuildGuest, CommandFailedError
from aenv.template.journal import Journal
from aenv.template.machine import BuildMachine, Pins, Workshop
from aenv.template.origin import Origin, Origins
from aenv.template.plan import Plan, is_captured, resume_at, reusable, step_keys
from aenv.template.service_command import Service
from aenv.template.steps import Copy, Env, Run, Step, User, Workdir

BASE, FINALIZE = "base", "finalize"  # the SDK's names of what comes before and after the steps
READY_TIMEOUT = 600.0  # seconds from the start command to its first successful ready check
OPTIONAL_TIMEOUT = 120.0  # for a command that nobody but the image asked for
READY_INTERVAL = 0.5  # seconds between two ready checks
READY_DEFAULT = "sleep 20"  # E2B's, for a start command without one
MAX_MEMBERS = 1_000_000  # of an archive whose names have to be read

Result = TypeVar("Result")


class BuildFailedError(Exception):
    """A build cannot be finished; ``failure`` tells the user why."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class Engine:
    def __init__(self, workshop: Workshop, origins: Origins, cache: LayerCache, archives: Archives) -> None:
        self._workshop = workshop
        self._origins = origins
        self._cache = cache
        self._archives = archives

    async def run(self, plan: Plan, journal: Journal, pins: Pins) -> BuiltImage:
        """The finished build. Its snapshot is kept by ``pins`` until the caller has recorded it.

        Raises BuildFailedError, or CancelledError; nothing but cached layers is left then.
        """
        async with AsyncExitStack() as stack:
            return await _Run(self, plan, journal, pins, stack).run()


class _Run:
    """One build under way."""

    def __init__(self, engine: Engine, plan: Plan, journal: Journal, pins: Pins, stack: AsyncExitStack) -> None:
        self._workshop = engine._workshop
        self._origins = engine._origins
        self._cache = engine._cache
        self._archives = engine._archives
        self._plan = plan
        self._journal = journal
        self._pins = pins
        self._stack = stack
        self._step = BASE

    async def run(self) -> BuiltImage:
        try:
            return await self._build()
        except CommandFailedError as error:
            raise BuildFailedError(Failure(str(error), self._step)) from error
        except AenvError as error:
            raise BuildFailedError(Failure(str(error), self._step)) from error

    async def _build(self) -> BuiltImage:
        plan, total = self._plan, len(self._plan.steps)
        origin = await self._origins.find(plan, self._journal)
        begin = keys.of_dockerfile(origin.key) if plan.dockerfile else origin.key
        chain = step_keys(begin, plan.steps)
        service = _service(plan, origin)
        final = keys.of_final(
            chain[-1] if chain else begin,
            plan.shape,
            self._workshop.vmm.fingerprint,
            self._workshop.initramfs_sha256,
            service.start,
            service.ready,
            plan.min_free_mib,
        )
        if reusable(plan.steps, force=plan.force) == total and not plan.force:
            done = self._cache.get(final)
            if done is not None:
                return self._unchanged(done, service)
        count = resume_at(plan.steps, chain, self._cached(chain), force=plan.force)
        for step in plan.steps[:count]:
            self._journal.write(f"CACHED [{step.number}/{total}] {step.label}", step=str(step.number))
        context, machine = await self._begin(origin, chain, count)
        guest = BuildGuest(machine, self._journal)
        for step, key in list(zip(plan.steps, chain, strict=True))[count:]:
            self._step = str(step.number)
            self._journal.write(f"[{step.number}/{total}] {step.label}", step=self._step)
            context = await self._apply(step, guest, context)
            if is_captured(step):
                await self._keep(machine, guest, key, context)
        self._step = FINALIZE
        # What an image or a Dockerfile starts is started as Docker would.
        runs_as = context
        if plan.dockerfile:
            context = after_dockerfile(context, origin.context, plan.steps)
        elif origin.disk is not None and plan.image_command is not None and not plan.start_cmd:
            config = origin.disk.config
            runs_as = replace(context, user=of_dockerfile({}, origin.image_user, "").user, workdir=config.working_dir)
        return await self._finalize(machine, guest, context, final, service, runs_as)

    def _cached(self, chain: list[str]) -> set[str]:
        rows = self._workshop.store.build_cache.rows
        return {key for key in chain if key in rows and self._cache.get(key) is not None}

    def _unchanged(self, done: CachedLayer, service: Service) -> BuiltImage:
        total = len(self._plan.steps)
        for step in self._plan.steps:
            self._journal.write(f"CACHED [{step.number}/{total}] {step.label}", step=str(step.number))
        self._journal.write("CACHED finalize: nothing has changed since the last build", step=FINALIZE)
        self._pins.add(done.snapshot_id)
        return self._image(done.snapshot_id, Context(done.env_vars, done.user, done.workdir), service)

    async def _begin(self, origin: Origin, chain: list[str], count: int) -> tuple[Context, BuildMachine]:
        """The context and the machine as they are after ``count`` steps."""
        if count:
            layer = self._cache.get(chain[count - 1])
            assert layer is not None
            snapshot = self._workshop.store.snapshots[layer.snapshot_id]
            context = Context(layer.env_vars, layer.user, layer.workdir)
            origin = Origin(chain[count - 1], context, snapshot, layer.initramfs_sha256)
        machine = await self._origins.start(origin, self._plan, self._journal, self._pins)
        self._stack.push_async_callback(machine.close)
        return origin.context, machine

    async def _apply(self, step: Step, guest: BuildGuest, context: Context) -> Context:
        """Do one step; the context of the next."""
        action = step.action
        match action:
            case Run(command, user):
                run = guest.run(command, context, step=self._step, user=user)
                await self._named(f"failed to run command {_quoted(command)}", run)
            case Copy():
                await self._named(
                    f"failed to copy {action.source!r} to {action.destination!r}", self._copy(action, guest, context)
                )
            case Env(variables):
                context = context.with_env(variables)
                if any(name == "PATH" for name, _ in variables):
                    await guest.set_path(context.env["PATH"])
            case Workdir(path):
                made = await self._named(
                    f"failed to change to {path!r}",
                    guest.script(scripts.WORKDIR, context.expand(path), context.user, context.workdir or ""),
                )
                context = Context(context.env, context.user, made.rstrip("\n"))
            case User(name):
                found = await self._named(
                    f"failed to change to user {name!r}", guest.script(scripts.FIND_USER, context.expand(name))
                )
                context = Context(context.env, found, context.workdir)
        return context

    async def _named(self, what: str, work: Awaitable[Result]) -> Result:
        """Put what was tried before the reason that it failed."""
        try:
            return await work
        except CommandFailedError as error:
            raise CommandFailedError(f"{what}: {error}") from error

    async def _copy(self, copy: Copy, guest: BuildGuest, context: Context) -> None:
        archive = self._archives.path(copy.files)
        if not self._archives.present(copy.files):
            raise CommandFailedError("its files have not been uploaded; build again to upload them")
        many = globs.has_magic(copy.source)
        members = [globs.normalise(copy.source)]
        if many:
            names = await asyncio.to_thread(member_names, archive, self._plan_bytes)
            members = globs.matches(copy.source, names)
            if not members:
                raise CommandFailedError("the uploaded archive has nothing that matches")
        owner = copy.owner or context.user
        path = await guest.upload(archive)
        argv = scripts.copy_command(
            path,
            context.expand(copy.destination),
            user=context.user,
            workdir=context.workdir,
            owner=owner if ":" in owner else f"{owner}:",
            mode=copy.mode,
            many=len(members) > 1,
            members=members,
        )
        await guest.script_argv(argv)

    @property
    def _plan_bytes(self) -> int:
        return self._workshop.settings.default_disk << 20

    async def _keep(self, machine: BuildMachine, guest: BuildGuest, key: str, context: Context) -> None:
        """Keep the machine as it is after a step in the cache."""
        await guest.sync()
        snapshot = await machine.capture()
        self._cache.put(self._layer(key, snapshot.id, context))

    def _layer(self, key: str, snapshot_id: str, context: Context) -> CachedLayer:
        return CachedLayer(
            id=key,
            snapshot_id=snapshot_id,
            initramfs_sha256=self._workshop.initramfs_sha256,
            used_at=datetime.now(UTC),
            env_vars=context.env,
            user=context.user,
            workdir=context.workdir,
        )

    async def _finalize(
        self,
        machine: BuildMachine,
        guest: BuildGuest,
        context: Context,
        final: str,
        service: Service,
        runs_as: Context,
    ) -> BuiltImage:
        if self._plan.min_free_mib:
            await growth.ensure_free(machine, guest, self._journal, self._plan.min_free_mib, FINALIZE)
        if service.start or service.ready:
            await self._bring_up(guest, runs_as, service)
        self._journal.write("saving the template", step=FINALIZE)
        await guest.sync()
        snapshot = await machine.finish()
        self._cache.put(self._layer(final, snapshot.id, context))
        return self._image(snapshot.id, context, service)

    async def _bring_up(self, guest: BuildGuest, context: Context, service: Service) -> None:
        """Run the start command and wait until the ready command succeeds."""
        if not service.optional:
            await self._until_up(guest, context, service, READY_TIMEOUT)
            return
        try:
            await self._until_up(guest, context, service, OPTIONAL_TIMEOUT)
        except CommandFailedError as error:
            self._journal.write(f"going on without the image's command: {error}", level="warn", step=FINALIZE)

    async def _until_up(self, guest: BuildGuest, context: Context, service: Service, timeout: float) -> None:
        running: asyncio.Task[None] | None = None
        if service.start:
            self._journal.write(f"starting: {service.start}", step=FINALIZE)
            running = asyncio.create_task(guest.start(service.start, context, step=FINALIZE))
        ready = service.ready or READY_DEFAULT
        self._journal.write(f"waiting until ready: {ready}", step=FINALIZE)
        waiting = asyncio.create_task(self._until_ready(guest, context, ready, timeout))
        pending = {waiting} if running is None else {waiting, running}
        try:
            await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            ended_well = running is not None and running.done() and running.exception() is None
            if ended_well and service.optional and not service.ready:
                self._journal.write("it has ended, so there is nothing to wait for", step=FINALIZE)
                return
            if not waiting.done() and ended_well:
                await asyncio.wait({waiting})  # it ended well, as one that starts a daemon does
            if waiting.done():
                await waiting
            elif running is not None:
                await self._named(f"the start command {service.start!r} ended before it was ready", running)
        finally:
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)
        self._journal.write("ready", step=FINALIZE)

    async def _until_ready(self, guest: BuildGuest, context: Context, ready: str, timeout: float) -> None:
        try:
            async with asyncio.timeout(timeout):
                while not await guest.check(ready, context):  # noqa: ASYNC110 - the guest has no event for it
                    await asyncio.sleep(READY_INTERVAL)
        except TimeoutError:
            raise CommandFailedError(
                f"the ready command {ready!r} did not succeed within {timeout:.0f} seconds"
            ) from None

    def _image(self, snapshot_id: str, context: Context, service: Service) -> BuiltImage:
        snapshot = self._workshop.store.snapshots[snapshot_id]
        return BuiltImage(
            snapshot_id=snapshot_id,
            vcpus=snapshot.shape.vcpus,
            memory_mib=snapshot.shape.memory_mib,
            disk_mib=snapshot.disk_mib,
            envd_version=self._workshop.envd_version,
            initramfs_sha256=self._workshop.initramfs_sha256,
            env_vars=dict(context.env),
            default_user=context.user,
            default_workdir=context.workdir,
            start_cmd=service.start,
            ready_cmd=service.ready,
        )


def _service(plan: Plan, origin: Origin) -> Service:
    if plan.start_cmd:
        return Service(plan.start_cmd, plan.ready_cmd)
    if plan.image_command is not None and origin.disk is not None:
        return service_command.of_image(origin.disk.config, plan.image_command, plan.ready_cmd)
    if plan.image_command:
        return Service(plan.image_command, plan.ready_cmd)
    return Service(origin.start_cmd, plan.ready_cmd or origin.ready_cmd)


def _quoted(command: str) -> str:
    return f"'{command}'" if len(command) <= 500 else f"'{command[:500]}…'"


def member_names(archive: Path, limit: int) -> list[str]:
    """Names in a tar archive, compressed or not. Raises InvalidRequestError when it is none, or too much.

    ``limit`` is bytes of unpacked files; a compressed archive can be a bomb, and reading its names unpacks it.
    """
    names, total = [], 0
    try:
        with tarfile.open(archive, "r|*") as tar:
            for member in tar:
                names.append(member.name)
                total += member.size
                if total > limit or len(names) > MAX_MEMBERS:
                    raise InvalidRequestError("The uploaded archive does not fit the template's disk.")
    except (tarfile.TarError, EOFError, OSError) as error:
        raise InvalidRequestError(f"The uploaded archive cannot be read: {error}.") from error
    return names
