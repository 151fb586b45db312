"""What the platform promises to find in every sandbox, added in the guest: for images that are not converted here.

``aenv.image.prepare`` does the same to those that are. Only what is missing is added.
"""

from aenv.client import process
from aenv.errors import SandboxStartError, SandboxUnreachableError
from aenv.image.manifest import ImageConfig
from aenv.image.prepare import STAND_IN

# $1 the user's number when the image gives one, else empty; $2 its group's; $3 PATH.
SCRIPT = rf"""
set -e
line() {{ # file, name, line
  if grep -qs "^$2:" "$1"; then return 0; fi
  if [ -s "$1" ] && [ -n "$(tail -c 1 "$1")" ]; then echo >> "$1"; fi
  echo "$3" >> "$1"
}}
[ -s /etc/passwd ] || echo 'root:x:0:0:root:/root:/bin/sh' > /etc/passwd
[ -s /etc/group ] || echo 'root:x:0:' > /etc/group
if [ ! -e /bin/bash ]; then
  for found in /usr/bin/bash /usr/local/bin/bash; do
    if [ -x "$found" ]; then ln -s "$found" /bin/bash; break; fi
  done
fi
if [ ! -e /bin/bash ]; then
  printf '#!/bin/sh\n# {STAND_IN}\nexec /bin/sh "$@"\n' > /bin/bash
  chmod 755 /bin/bash
fi
if ! grep -q '^user:' /etc/passwd; then
  id=1000
  while cat /etc/passwd /etc/group | grep -q "^[^:]*:[^:]*:$id:"; do id=$((id + 1)); done
  line /etc/group user "user:x:$id:"
  line /etc/passwd user "user:x:$id:$id::/home/user:/bin/bash"
  mkdir -p /home/user
  chown "$id:$id" /home/user
  if [ -s /etc/shadow ]; then line /etc/shadow user 'user:!::0:99999:7:::'; fi
  if [ -s /etc/gshadow ]; then line /etc/gshadow user 'user:!::'; fi
fi
if [ -n "$1" ]; then line /etc/passwd "uid$1" "uid$1:x:$1:$2::/:/bin/sh"; fi
[ -s /etc/hosts ] || printf '127.0.0.1 localhost\n::1 localhost ip6-localhost ip6-loopback\n' > /etc/hosts
if [ -x /usr/bin/sudo ] && [ ! -e /etc/sudoers.d/user ]; then
  mkdir -p /etc/sudoers.d
  echo 'user ALL=(ALL:ALL) NOPASSWD: ALL' > /etc/sudoers.d/user
  chmod 440 /etc/sudoers.d/user
fi
if [ -n "$3" ] && [ -e /etc/profile ] && [ ! -e /etc/profile.d/zz-template-path.sh ]; then
  mkdir -p /etc/profile.d
  printf "export PATH='%s'\n" "$(printf %s "$3" | sed "s/'/'\\\\''/g")" > /etc/profile.d/zz-template-path.sh
fi
"""


def split_user(user: str) -> tuple[str, str, str]:
    """Of a configuration's User: the name that it has after ``SCRIPT``, its number and group's if it is by number."""
    name, _, group = user.partition(":")
    if not name.isdecimal() or int(name) == 0:
        return name if not name.isdecimal() else "", "", ""
    return f"uid{int(name)}", str(int(name)), str(int(group)) if group.isdecimal() else "0"


async def complete(host: str, token: str | None, image: ImageConfig) -> None:
    """Run ``SCRIPT`` in a guest. Raises SandboxStartError where it cannot be run."""
    _, number, group = split_user(image.user)
    said, ended = bytearray(), None
    try:
        argv = ["/bin/sh", "-c", SCRIPT, "sh", number, group, image.env.get("PATH", "")]
        async for event in process.events(host, argv, user="root", cwd="/", token=token):
            if isinstance(event, process.Output):
                said += event.data[: 1 << 14]
            elif isinstance(event, process.Ended):
                ended = event
    except (process.CommandRefusedError, SandboxUnreachableError) as error:
        raise SandboxStartError(
            f"The image could not be prepared: {error}.", "It needs /bin/sh and the usual small programs."
        ) from error
    if ended is None or ended.exit_code != 0:
        tail = said.decode(errors="replace").strip()[-300:]
        raise SandboxStartError(
            f"The image could not be prepared: {tail or 'its script failed'}.",
            "It needs /bin/sh and the usual small programs.",
        )
