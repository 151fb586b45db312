"""``aenv image ls``, ``rm`` and ``gc``."""

import click

from aenv.cli import help, options, output, session
from aenv.cli.help import command
from aenv.cli.table import Column
from aenv.client.api import Api

SHORT = 12  # digits of a digest that are shown

group = help.group(
    "image",
    "List and remove container images that the node has in its cache.",
    """
aenv image ls
aenv image rm ubuntu:24.04
aenv image gc
""",
)

COLUMNS = (
    Column("IMAGE", cut=True),
    Column("DIGEST"),
    Column("SIZE", right=True),
    Column("SHARED", right=True, spare=1),
    Column("IN USE", right=True),
    Column("USED", right=True, spare=2),
)


@command("ls", "\naenv image ls\naenv image ls -o json | jq '.[].names'\n", of=group)
@options.quiet_option
@options.output_option
def ls(quiet: bool, form: str | None) -> None:
    """List cached images, the last used first.

    SHARED is the part that other images have as well, IN USE the number of disks that are on the image.
    """
    found = session.connect().images()
    if quiet:
        for item in found:
            print(item["digest"])
        return
    if output.wants_json(form):
        output.print_json(found)
        return
    output.table(
        COLUMNS,
        (
            [
                ", ".join(item["names"]) or "-",
                item["digest"].partition(":")[2][:SHORT],
                output.bytes_text(item["sizeBytes"]),
                output.bytes_text(item["sharedBytes"]),
                str(item["inUse"]),
                f"{output.age(item['lastUsedAt'])} ago",
            ]
            for item in found
        ),
        empty="No images. `aenv pull IMAGE` and `aenv start --cold IMAGE` bring one.",
    )


@command("rm", "\naenv image rm ubuntu:24.04\naenv image rm 1b2c3d4e5f60\n", of=group)
@click.argument("images", nargs=-1, required=True, metavar="IMAGE...", help="Names, digests or their beginnings.")
def rm(images: tuple[str, ...]) -> None:
    """Remove images from the cache. One that a sandbox, template or snapshot is on stays."""
    api = session.connect()
    session.each(images, lambda name: _remove(api, name))


def _remove(api: Api, name: str) -> str:
    with session.naming("image", name):
        api.remove_image(name)
    return f"{name} removed"


@command("gc", "\naenv image gc\naenv image gc --keep 5000       # MiB\n", of=group)
@click.option("--keep", type=click.IntRange(min=0), metavar="MIB", help="What may stay; the node's image_cache.")
@options.output_option
def gc(keep: int | None, form: str | None) -> None:
    """Remove what was not used for longest until the rest fits. What is in use or was just used stays."""
    done = session.connect().collect_images(keep)
    if output.wants_json(form):
        output.print_json(done)
    else:
        freed, kept = output.bytes_text(done["freedBytes"]), output.bytes_text(done["keptBytes"])
        print(f"{freed} freed, {kept} kept")
