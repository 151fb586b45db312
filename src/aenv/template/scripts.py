"""Shell scripts that a build runs in its guest, as root. POSIX sh, because images may have nothing else. Pure.

Values never become part of a script's text: they are its positional parameters.
"""

from collections.abc import Sequence

# The SDK runs every command with /bin/bash. An image without it gets it from its distribution where that is quick,
# else another name for its own shell, which understands -l and -c.
PROVISION = r"""
if [ -e /bin/bash ] && ! grep -qs 'stands in for bash' /bin/bash; then
  exit 0
elif [ ! -e /bin/bash ] && command -v bash >/dev/null 2>&1; then
  ln -s "$(command -v bash)" /bin/bash
else
  if command -v apk >/dev/null 2>&1; then timeout 60 apk add --no-progress bash >/dev/null 2>&1; fi
  [ -e /bin/bash ] || ln -s sh /bin/bash
fi
exit 0
"""

# A login shell reads /etc/profile, which on Debian replaces PATH. $1 is the PATH of the template.
SET_PATH = r"""
mkdir -p /etc/profile.d && printf 'export PATH=%s\n' "$1" > /etc/profile.d/zz-template-path.sh
"""

# Prints the name of the user whose name or number is $1; fails when there is none.
FIND_USER = r"""
line=$(awk -F: -v u="$1" '$1 == u || $3 == u { print $1; exit }' /etc/passwd)
[ -n "$line" ] || { echo "unknown user $1" >&2; exit 1; }
printf %s "$line"
"""

# MiB that are free on the root file system.
FREE_SPACE = r"""
sync
df -Pk / | awk 'NR == 2 { print int($4 / 1024) }'
"""

# $1 an archive with resize2fs, its libraries and loader: grows the root file system to the size of its disk.
GROW = r"""
work=$(dirname "$1")/resize
rm -rf "$work" && mkdir -p "$work" && tar -xf "$1" -C "$work" || exit 1
trap 'rm -rf "$work" "$1"' EXIT
device=$(awk '$2 == "/" { device = $1 } END { print device }' /proc/mounts)
"$work/loader" --library-path "$work" "$work/resize2fs" "$device"
"""

# Functions that the next two share. Folders that have to be made belong to whoever asks for them.
_FUNCTIONS = r"""
home_of() { awk -F: -v u="$1" '$1 == u { print $6; exit }' /etc/passwd; }
absolute() { # path, user, working directory (empty: the home)
  home=$(home_of "$2"); home=${home:-/}
  case $1 in
    /*) printf %s "$1" ;;
    '~') printf %s "$home" ;;
    '~/'*) printf %s "$home/${1#'~/'}" ;;
    *) printf %s "${3:-$home}/$1" ;;
  esac
}
make_dirs() { # path, owner (user: for the user and its own group)
  [ -d "$1" ] && return 0
  make_dirs "$(dirname "$1")" "$2" || return 1
  mkdir "$1" && chown "$2" "$1"
}
"""

# $1 path, $2 user, $3 working directory: makes the folder and prints its absolute path.
WORKDIR = (
    _FUNCTIONS
    + r"""
target=$(absolute "$1" "$2" "$3")
make_dirs "$target" "$2:" || exit 1
cd "$target" && pwd
"""
)

# $1 archive, $2 destination, $3 user, $4 working directory, $5 owner, $6 mode or empty, $7 "many" when the source
# is a pattern, $8… the members to copy, relative to the build context. As in a Dockerfile, a folder's contents are
# copied into the destination, and a file goes to the destination itself unless that is a folder or ends with a slash.
COPY = (
    _FUNCTIONS
    + r"""
put() { # entry, folder: merges folders, replaces everything else
  there=$2/$(basename "$1")
  if [ -d "$1" ] && [ ! -L "$1" ] && [ -d "$there" ]; then cp -a "$1" "$2/"; else mv -f "$1" "$2/"; fi
}
set -u
archive=$1 destination=$2 owner=$5 mode=$6 many=$7
target=$(absolute "$2" "$3" "$4")
shift 7
work=$(dirname "$archive")/unpacked
rm -rf "$work" && mkdir -p "$work" || exit 1
trap 'rm -rf "$work" "$archive"' EXIT
case $(head -c 2 "$archive" | od -An -tx1 | tr -d ' ') in
  1f8b) gzip -dc "$archive" | tar -xpf - -o -C "$work" || exit 1 ;;
  *) tar -xpf "$archive" -o -C "$work" || exit 1 ;;
esac
rm -f "$archive"
chown -hR "$owner" "$work" || exit 1
into=$many
case $destination in */ | . | */.) into=many ;; esac
[ -d "$target" ] && into=many
for member in "$@"; do
  source=$work/$member
  if [ -d "$source" ] && [ ! -L "$source" ]; then
    if [ -n "$mode" ]; then chmod -R "$mode" "$source" || exit 1; fi
    make_dirs "$target" "$owner" || exit 1
    for entry in "$source"/* "$source"/.[!.]* "$source"/..?*; do
      [ -e "$entry" ] || [ -L "$entry" ] || continue
      put "$entry" "$target" || exit 1
    done
  elif [ -e "$source" ] || [ -L "$source" ]; then
    if [ -n "$mode" ] && [ ! -L "$source" ]; then chmod "$mode" "$source" || exit 1; fi
    if [ -n "$into" ]; then
      make_dirs "$target" "$owner" || exit 1
      mv -f "$source" "$target/" || exit 1
    else
      make_dirs "$(dirname "$target")" "$owner" || exit 1
      mv -f "$source" "$target" || exit 1
    fi
  else
    echo "the uploaded archive has no $member" >&2
    exit 1
  fi
done
"""
)


def command(script: str, *parameters: str) -> list[str]:
    """The program and arguments that run ``script``."""
    return ["/bin/sh", "-c", script, "sh", *parameters]


def copy_command(
    archive: str,
    destination: str,
    *,
    user: str,
    workdir: str | None,
    owner: str,
    mode: str,
    many: bool,
    members: Sequence[str],
) -> list[str]:
    parameters = [archive, destination, user, workdir or "", owner, mode, "many" if many else "", *members]
    return command(COPY, *parameters)
