"""How a template or a saved snapshot is named: ``name``, ``name:tag`` or its id, with or without a tag. Pure.

A name without a tag means the tag ``default``, as in E2B. Names are case-insensitive and kept in lower case.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from aenv.errors import InvalidRequestError, NotFoundError, TemplateNotFoundError
from aenv.orchestrator.builds import Build
from aenv.orchestrator.model import Template

DEFAULT_TAG = "default"
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]*(/[a-z0-9][a-z0-9._-]*)*")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
MAX_NAME = MAX_TAG = 128  # characters; E2B's limit for names


@dataclass(frozen=True, slots=True)
class Reference:
    """A name or id, and the tag of one of its builds, None when the text had none."""

    name: str
    tag: str | None


def parse(text: str) -> Reference:
    """Raises InvalidRequestError for text that cannot name a template."""
    name, colon, tag = text.strip().partition(":")
    name = name.lower()
    if len(name) > MAX_NAME or not _NAME.fullmatch(name):
        raise InvalidRequestError(
            f"{text[:200]!r} is not a template name.",
            "Use up to 128 letters, digits, '-', '_' and '.', and optionally a tag: name:tag.",
        )
    return Reference(name, check_tag(tag) if colon else None)


def written(name: str, tag: str) -> str:
    """As a user would write it: the default tag goes without saying."""
    return name if tag == DEFAULT_TAG else f"{name}:{tag}"


def check_tag(tag: str) -> str:
    """Raises InvalidRequestError for text that cannot be a tag."""
    if len(tag) > MAX_TAG or not _TAG.fullmatch(tag):
        raise InvalidRequestError(
            f"{tag[:200]!r} is not a tag.", "Use up to 128 letters, digits, '-', '_' and '.', as in v1.0."
        )
    return tag


def find(templates: Iterable[Template], name: str) -> Template | None:
    """The template with that id or alias."""
    folded = name.lower()
    return next((t for t in templates if name == t.id or folded in t.aliases or name in t.aliases), None)


def resolve(templates: Iterable[Template], builds: Mapping[str, Build], text: str) -> Template:
    """The committed build that ``text`` names, as a template. Raises NotFoundError."""
    try:
        reference = parse(text)
    except InvalidRequestError:
        raise TemplateNotFoundError(text[:200]) from None
    template = find(templates, reference.name)
    if template is None:
        if any(build.name == reference.name for build in builds.values()):
            raise NotFoundError(
                f"Template {text!r} has no finished build.",
                "See what became of it: GET /templates/{id}, Template.build.",
            )
        raise TemplateNotFoundError(text)
    tag = reference.tag or DEFAULT_TAG
    if not template.tags:  # the node's own templates have one build and no record of it
        if tag == DEFAULT_TAG:
            return template
        raise NotFoundError(f"Template {reference.name!r} has no tag {tag!r}.", "It has no builds of its own.")
    target = template.tags.get(tag)
    if target is None:
        raise NotFoundError(
            f"Template {reference.name!r} has no tag {tag!r}.", f"It has {', '.join(sorted(template.tags))}."
        )
    if target.build_id == template.build_id:
        return template
    build = builds.get(target.build_id)
    if build is None or build.image is None:
        raise TemplateNotFoundError(text)
    return with_build(template, build)


def with_build(template: Template, build: Build) -> Template:
    """``template`` as that ready build made it."""
    image = build.image
    if image is None:
        raise ValueError(f"build {build.id} has no image")
    return replace(
        template,
        build_id=build.id,
        snapshot_id=image.snapshot_id,
        vcpus=image.vcpus,
        memory_mib=image.memory_mib,
        disk_mib=image.disk_mib,
        envd_version=image.envd_version,
        initramfs_sha256=image.initramfs_sha256,
        env_vars=image.env_vars,
        default_user=image.default_user,
        default_workdir=image.default_workdir,
        start_cmd=image.start_cmd,
        ready_cmd=image.ready_cmd,
    )
