"""What a finished build changes in the records: tags move to it, and builds that nothing names lose their snapshot.

All functions but the pure ones write inside the caller's transaction.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import datetime

from aenv.orchestrator import catalog
from aenv.orchestrator.builds import Build, BuildStatus, BuiltImage, Failure
from aenv.orchestrator.model import TagTarget, Template
from aenv.orchestrator.store import Store

KEEP_BUILDS = 20  # finished builds of one template whose record and log are kept, besides tagged ones


def failed(build: Build, failure: Failure, now: datetime) -> Build:
    return replace(build, status=BuildStatus.ERROR, failure=failure, updated_at=now, finished_at=now)


def forgettable(builds: Iterable[Build], template_id: str) -> list[Build]:
    """Finished builds of the template that nothing names, beyond the latest ones."""
    old = [b for b in builds if b.template_id == template_id and b.status.final and b.image is None]
    return sorted(old, key=lambda b: b.created_at, reverse=True)[KEEP_BUILDS:]


def publish(store: Store, build: Build, image: BuiltImage, now: datetime) -> None:
    """Record a build as ready, under its template's name and its tags."""
    ready = replace(build, status=BuildStatus.READY, image=image, updated_at=now, finished_at=now)
    store.builds.put(ready)
    if build.template_id not in store.templates.rows:
        template = Template(
            id=build.template_id,
            build_id=build.id,
            aliases=(build.name,),
            snapshot_id=image.snapshot_id,
            vcpus=image.vcpus,
            memory_mib=image.memory_mib,
            disk_mib=image.disk_mib,
            envd_version=image.envd_version,
            initramfs_sha256=image.initramfs_sha256,
            created_at=build.created_at,
            updated_at=now,
        )
        store.templates.put(template)
    point(store, ready, build.tags, now)


def point(store: Store, build: Build, tags: Sequence[str], now: datetime) -> None:
    """Make ``tags`` name ``build``, whichever build they named before."""
    template = store.templates[build.template_id]
    targets = {**template.tags, **{tag: TagTarget(build.id, now) for tag in tags}}
    _settle(store, replace(template, tags=targets, updated_at=now))


def untag(store: Store, template: Template, tags: Sequence[str], now: datetime) -> None:
    targets = {tag: target for tag, target in template.tags.items() if tag not in tags}
    _settle(store, replace(template, tags=targets, updated_at=now))


def _settle(store: Store, template: Template) -> None:
    """Show the default build (or the one tagged last) as the template's own, and let go of builds without a tag."""
    shown = template.tags.get(catalog.DEFAULT_TAG) or max(template.tags.values(), key=lambda t: t.created_at)
    build = store.builds.get(shown.build_id)
    if build is not None and build.image is not None:
        template = catalog.with_build(template, build)
    store.templates.put(template)
    named = {target.build_id for target in template.tags.values()}
    for other in list(store.builds.rows.values()):
        if other.template_id == template.id and other.image is not None and other.id not in named:
            store.builds.put(replace(other, image=None))
