"""Files that a build takes from elsewhere: from another stage or an image (``COPY --from``), or from a URL (``ADD``).

A stage is built as a template of its own; a sandbox of it packs the files. Both are gone afterwards, also after
Ctrl-C: only the steps stay, in the server's cache.
"""

import hashlib
import posixpath
import secrets
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from urllib.parse import urlsplit

from aenv.cli import session
from aenv.cli.context import FOLDER, Archive, Packer, repack
from aenv.client.api import Api
from aenv.client.sandbox import SandboxClient
from aenv.errors import AenvError, InvalidRequestError

LIFETIME = 900  # seconds of the sandbox that packs, if this program dies
URL_TIMEOUT = 60.0  # seconds without a byte

# $1 is a folder to make and work in, $2… are patterns relative to the root. Packs the contents of folders, and files
# under their names, below "files" into files.tar. Prints the file's name if it is a single file. The shell expands
# the patterns: with an empty IFS it does not split them.
PACK = r"""
set -uf
IFS=
work=$1
shift
mkdir -m 700 "$work" "$work/files" || exit 1
only=
[ $# -eq 1 ] && [ -f "/$1" ] && only=$(basename "/$1")
for pattern in "$@"; do
  found=
  set +f
  for path in /$pattern; do
    [ -e "$path" ] || [ -L "$path" ] || continue
    found=1
    if [ -d "$path" ]; then cp -a "$path/." "$work/files/" || exit 1
    else cp -pL "$path" "$work/files/" || exit 1; fi
  done
  set -f
  [ -n "$found" ] || { echo "there is no /$pattern" >&2; exit 1; }
done
tar -C "$work" -cf "$work/files.tar" files || exit 1
rm -rf "$work/files"
printf '%s\n' "$only"
"""


@contextmanager
def sandbox_of(api: Api, template: str) -> Iterator[SandboxClient]:
    """A sandbox that exists for a moment."""
    body = {"templateID": template, "timeout": LIFETIME, "autoPause": False, "secure": True}
    with session.undoable(lambda: api.create(body), lambda made: api.kill(made["sandboxID"])) as made:
        try:
            yield SandboxClient(api.transport, made["sandboxID"], made.get("envdAccessToken"))
        finally:
            with suppress(AenvError):
                api.kill(made["sandboxID"])


def pack(client: SandboxClient, sources: Sequence[str]) -> Archive:
    """Files of a stage; ``sources`` are relative to its root. Raises InvalidRequestError when there are none."""
    work = f"/tmp/.aenv-pack-{secrets.token_hex(8)}"
    code, output, errors = client.run(PACK, work, *sources, user="root")
    if code != 0:
        raise InvalidRequestError(errors.decode(errors="replace").strip() or f"packing files ended with {code}")
    with tempfile.TemporaryFile() as file:
        client.read(f"{work}/files.tar", file, user="root")
        file.seek(0)
        return repack(file, output.decode().rstrip("\n") or None)


def download(urls: Sequence[str], checksum: str) -> Archive:
    """Remote files, readable by their owner only, as Docker has them. Raises InvalidRequestError, AenvError."""
    import urllib.request

    packer = Packer()
    if len(urls) > 1:
        packer.folder()
    name = ""
    for url in urls:
        name = posixpath.basename(urlsplit(url).path)
        if not name:
            raise InvalidRequestError(f"{url} does not end with the name of a file.")
        try:
            with urllib.request.urlopen(url, timeout=URL_TIMEOUT) as answer:
                content = answer.read()
        except OSError as error:
            raise AenvError(f"{url} cannot be downloaded: {error}.") from error
        algorithm, _, wanted = checksum.partition(":")
        if checksum and (algorithm != "sha256" or hashlib.sha256(content).hexdigest() != wanted):
            raise InvalidRequestError(f"{url} does not have the checksum {checksum}.")
        packer.content(name if len(urls) == 1 else f"{FOLDER}/{name}", content, 0o600)
    return packer.finish(name if len(urls) == 1 else FOLDER)
