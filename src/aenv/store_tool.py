"""``aenv-store``: looks after the repository of committed snapshots. It needs no running node.

Tables on a terminal, JSON elsewhere. Exit status: 0; 1 the thing does not exist, or is in the way; 2 wrong usage;
3 the repository cannot be used now; 4 something in it, or in an archive, is damaged.
"""

import os
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import IO, Annotated, Any, Literal

import typer

from aenv.cli import output
from aenv.cli.table import Column
from aenv.config import RepositorySettings
from aenv.errors import AenvError, CapacityError, CorruptFileError, NotFoundError, SnapshotNotFoundError, SourceError
from aenv.snapshot.archive import export_snapshot, import_snapshot
from aenv.snapshot.manifest import LayerRef, Manifest, Volume
from aenv.snapshot.opening import open_repository
from aenv.snapshot.repository import Progress
from aenv.snapshot.shared import SharedRepository

DEFAULT_TAG = "default"
UNREACHABLE, DAMAGED = 3, 4
GRACE = timedelta(hours=1)

app = typer.Typer(
    help="Look after the repository of committed snapshots: the one of this host's configuration, or --path.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
OutputOption = Annotated[
    Literal["table", "json"] | None,
    typer.Option("-o", "--output", help="table or json; a table on a terminal, else JSON.", show_default=False),
]
SnapshotArgument = Annotated[str, typer.Argument(metavar="SNAPSHOT", help="Id, name or name:tag")]


@app.callback()
def root(
    context: typer.Context,
    path: Annotated[Path | None, typer.Option("--path", help="A repository in this folder instead.")] = None,
) -> None:
    if path is not None:
        if not path.is_dir():
            raise NotFoundError(f"{path} is no folder.", "Name the folder of a repository.")
        context.obj = open_repository(RepositorySettings(path=path), path)
    else:
        from aenv.server import load_settings  # it imports a whole node, which takes longer than most of this work

        settings = load_settings()
        context.obj = open_repository(settings.repository, settings.home)


@app.command("ls")
def list_snapshots(context: typer.Context, form: OutputOption = None) -> None:
    """List snapshots, newest first."""
    repository = _repository(context)
    names = _names(repository)
    manifests = list(repository.list())
    if output.wants_json(form):
        output.print_json([_summary(manifest, names[manifest.id]) for manifest in manifests])
        return
    output.table(
        [
            Column("ID"),
            Column("NAMES", cut=True),
            Column("AGE"),
            Column("STORED", right=True),
            Column("VIRTUAL", right=True),
            Column("MEMORY"),
        ],
        (
            [
                manifest.id,
                ", ".join(names[manifest.id]),
                output.age(manifest.created_at.isoformat()),
                output.bytes_text(_stored(manifest)),
                output.bytes_text(manifest.virtual_bytes),
                "yes" if manifest.memory else "no",
            ]
            for manifest in manifests
        ),
        empty="No snapshots.",
    )


@app.command()
def show(context: typer.Context, snapshot: SnapshotArgument, form: OutputOption = None) -> None:
    """Show a snapshot and its layers, bottom first."""
    repository = _repository(context)
    manifest = _find(repository, snapshot)
    names = _names(repository)[manifest.id]
    if output.wants_json(form):
        output.print_json(
            {**_summary(manifest, names), "layers": [asdict(row[1]) | {"of": row[0]} for row in _layers(manifest)]}
        )
        return
    output.details(
        [
            ("Id", manifest.id),
            ("Names", ", ".join(names) or "-"),
            ("Created", output.local_time(manifest.created_at.isoformat())),
            ("Parent", manifest.parent or "-"),
            (
                "Machine",
                f"{manifest.shape.vcpus} vCPU, {manifest.shape.memory_mib} MiB, disk {manifest.disk_mib} MiB",
            ),
            (
                "Captured by",
                f"{manifest.fingerprint.vmm} {manifest.fingerprint.vmm_version}, {manifest.fingerprint.accelerator}",
            ),
            ("Stored", output.bytes_text(_stored(manifest))),
        ]
    )
    print()
    output.table(
        [Column("OF"), Column("SIZE", right=True), Column("DIGEST")],
        ([of, output.bytes_text(layer.size), layer.digest] for of, layer in _layers(manifest)),
    )


@app.command()
def rm(
    context: typer.Context,
    snapshots: Annotated[list[str], typer.Argument(metavar="SNAPSHOT...", help="Ids, names or name:tag")],
) -> None:
    """Delete snapshots and their names. `gc` then frees their layers."""
    repository = _repository(context)
    for text in snapshots:
        snapshot_id = _find_id(repository, text)
        repository.delete(snapshot_id)
        output.say(f"Deleted {snapshot_id}.")


@app.command()
def gc(
    context: typer.Context,
    grace: Annotated[
        float,
        typer.Option(min=0, help="Minutes that a layer which nothing names or claims is kept after it was stored"),
    ] = GRACE.total_seconds() / 60,
    form: OutputOption = None,
) -> None:
    """Delete layers that no snapshot names and no node claims. Safe at any time."""
    report = _repository(context).gc(timedelta(minutes=grace))
    if output.wants_json(form):
        output.print_json(asdict(report))
        return
    print(
        f"Deleted {report.layers_deleted} layers, {output.bytes_text(report.bytes_freed)}; kept {report.layers_kept}."
    )
    if report.young:
        print(f"{report.young} of those kept are named by nothing and younger than {grace:g} minutes.")


@app.command()
def verify(
    context: typer.Context,
    quick: Annotated[bool, typer.Option("--quick", help="Check references and sizes; do not read layers.")] = False,
    form: OutputOption = None,
) -> None:
    """Check every document, reference and digest. Status 4 when something is damaged."""
    repository = _repository(context)
    with _progress("Reading layers") as progress:
        report = repository.verify(progress, deep=not quick)
    if output.wants_json(form):
        output.print_json({**asdict(report), "clean": report.clean})
    else:
        for problem in report.problems:
            users = f" Snapshots: {', '.join(problem.snapshots)}." if problem.snapshots else ""
            print(f"{problem.key}: {problem.what}{users}")
        size = output.bytes_text(report.bytes)
        read = f"read {report.layers} layers, {size}" if report.deep else f"looked up {report.layers} layers"
        print(f"{len(report.problems)} problems in {report.snapshots} snapshots and {report.names} names; {read}.")
    if not report.clean:
        raise typer.Exit(DAMAGED)


@app.command()
def usage(context: typer.Context, form: OutputOption = None) -> None:
    """Show what the repository takes, and what sharing saves."""
    found = _repository(context).usage()
    if output.wants_json(form):
        output.print_json(asdict(found))
        return
    size = output.bytes_text
    output.details(
        [
            ("Snapshots", str(found.snapshots)),
            ("Layers", f"{found.layers}, {size(found.layer_bytes)}"),
            ("Named by no snapshot", f"{found.unreferenced_layers}, {size(found.unreferenced_bytes)}"),
            ("  of that claimed", size(found.claimed_bytes)),
            ("Without sharing layers", size(found.stacked_bytes)),
            ("Disks and memories in full", size(found.virtual_bytes)),
        ]
    )


@app.command("export")
def export_(
    context: typer.Context,
    snapshot: SnapshotArgument,
    file: Annotated[str, typer.Argument(help="Where to; - is standard output")],
) -> None:
    """Write a snapshot with all its layers to one file."""
    repository = _repository(context)
    manifest, claim = repository.acquire(_find_id(repository, snapshot), _owner())
    with claim, _progress("Exporting") as progress:
        if file == "-":
            if sys.stdout.isatty():
                raise NotFoundError("An archive is not for a terminal.", "Name a file, or pipe it somewhere.")
            export_snapshot(repository, manifest, sys.stdout.buffer, progress)
            return
        part = Path(f"{file}.part")
        try:
            with part.open("wb") as out:
                export_snapshot(repository, manifest, out, progress)
                out.flush()
                os.fsync(out.fileno())
            part.rename(file)
        finally:
            part.unlink(missing_ok=True)


@app.command("import")
def import_(
    context: typer.Context,
    file: Annotated[str, typer.Argument(help="An archive; - is standard input")],
    name: Annotated[str | None, typer.Option(help="NAME or NAME:TAG to give it")] = None,
    spool: Annotated[Path | None, typer.Option(help="Folder for one layer at a time, on its way")] = None,
    repair: Annotated[bool, typer.Option("--repair", help="Write its layers anew, over damaged ones.")] = False,
) -> None:
    """Store a snapshot from a file that `export` wrote; print its id."""
    repository = _repository(context)
    with _opened(file) as source, _progress("Importing") as progress:
        manifest = import_snapshot(repository, source, _owner(), progress, spool=spool, repair=repair)
    if name is not None:
        word, _, tag = name.partition(":")
        repository.set_name(word, tag or DEFAULT_TAG, manifest.id)
    print(manifest.id)


def main() -> None:
    try:
        app()
    except AenvError as error:
        print(f"aenv-store: {error}", file=sys.stderr)
        if isinstance(error, CorruptFileError):
            sys.exit(DAMAGED)
        sys.exit(UNREACHABLE if isinstance(error, (SourceError, CapacityError)) else 1)
    except OSError as error:
        print(f"aenv-store: {error.filename or 'a file'}: {error.strerror}", file=sys.stderr)
        sys.exit(1)


def _repository(context: typer.Context) -> SharedRepository:
    repository = context.obj
    assert isinstance(repository, SharedRepository)
    return repository


def _owner() -> str:
    return f"aenv-store-{os.uname().nodename[:64].replace('_', '-')}-{os.getpid()}"


def _find_id(repository: SharedRepository, text: str) -> str:
    """The id of what a person named. Also of a snapshot whose manifest is damaged, when it is named by its id."""
    name, _, tag = text.partition(":")
    tags = {entry.tag: entry.snapshot for entry in repository.names() if entry.name == name}
    if tag or DEFAULT_TAG in tags:
        found = tags.get(tag or DEFAULT_TAG)
        if found is None:
            raise SnapshotNotFoundError(text)
        return found
    if len(tags) == 1:
        return next(iter(tags.values()))
    if tags:
        raise NotFoundError(f"{name} has no tag {DEFAULT_TAG}.", f"Name one of its tags: {', '.join(sorted(tags))}.")
    return text


def _find(repository: SharedRepository, text: str) -> Manifest:
    return repository.get(_find_id(repository, text))


def _names(repository: SharedRepository) -> dict[str, list[str]]:
    found: dict[str, list[str]] = defaultdict(list)
    for entry in repository.names():
        found[entry.snapshot].append(entry.name if entry.tag == DEFAULT_TAG else f"{entry.name}:{entry.tag}")
    return found


def _layers(manifest: Manifest) -> Iterator[tuple[str, LayerRef]]:
    def volume(name: str, value: Volume | None) -> Iterator[tuple[str, LayerRef]]:
        yield from ((name, layer) for layer in (value.layers if value else ()))

    yield from volume("disk", manifest.disk)
    yield from volume("memory", manifest.memory)
    if manifest.state:
        yield "state", manifest.state


def _stored(manifest: Manifest) -> int:
    return sum({layer.digest: layer.size for layer in manifest.layers()}.values())


def _summary(manifest: Manifest, names: list[str]) -> dict[str, Any]:
    return {
        "id": manifest.id,
        "names": names,
        "created_at": manifest.created_at.isoformat(),
        "parent": manifest.parent,
        "stored_bytes": _stored(manifest),
        "virtual_bytes": manifest.virtual_bytes,
        "memory": manifest.memory is not None,
        "vcpus": manifest.shape.vcpus,
        "memory_mib": manifest.shape.memory_mib,
        "disk_mib": manifest.disk_mib,
        "fingerprint": asdict(manifest.fingerprint),
    }


@contextmanager
def _opened(file: str) -> Iterator[IO[bytes]]:
    if file == "-":
        yield sys.stdin.buffer
    else:
        with Path(file).open("rb") as source:
            yield source


@contextmanager
def _progress(what: str) -> Iterator[Progress | None]:
    """A bar on standard error; None where that is no terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bars

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Bars(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task(what, total=None)
        yield lambda done, total: bars.update(task, completed=done, total=total)


if __name__ == "__main__":
    main()
