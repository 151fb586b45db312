#!/usr/bin/env bash
# Make this machine able to run AgentENV from its checkout: packages, Python environment, guest daemon.
#
#   scripts/bootstrap.sh         what `make demo` and a node need
#   scripts/bootstrap.sh --dev   and the tools of `make test`
#
# Run as root on Debian 12, Debian 13 or Ubuntu 24.04. Says what it does and why; running it again does only what is
# missing, which takes about a second when nothing is.
set -euo pipefail

readonly QEMU_MAJOR=10      # what restoring, as the node does it, was built and measured with
readonly PYTHON_MINOR=11    # Python 3.11
readonly VERSITYGW=v1.8.0   # the S3 server of the tests
readonly BACKPORTS=/etc/apt/sources.list.d/aenv-backports.sources
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
group=demo

say() { printf 'bootstrap: %s\n' "$*"; }
die() { printf 'bootstrap: error: %s\n' "$1" >&2; [ $# -lt 2 ] || printf 'bootstrap: %s\n' "${@:2}" >&2; exit 1; }

# --- What can be checked before anything is touched ------------------------------------------------------------

for argument in "$@"; do
  case $argument in
    --dev) group=dev ;;
    -h|--help) sed -n '2,8s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
    *) die "unknown argument: $argument" "usage: scripts/bootstrap.sh [--dev]" ;;
  esac
done
[ "$(id -u)" -eq 0 ] || die "this needs root: it installs packages, and sandboxes need network namespaces" \
  "run: sudo $0 $*"
[ "$(uname -m)" = x86_64 ] || die "guests are x86-64 machines and this is $(uname -m)"
[ -r /etc/os-release ] || die "/etc/os-release is missing: this is not Debian or Ubuntu"
# shellcheck disable=SC1091
os=$(. /etc/os-release && echo "$ID-$VERSION_ID") codename=$(. /etc/os-release && echo "${VERSION_CODENAME:-}")
case $os in
  debian-12|debian-13|ubuntu-24.04) ;;
  *) die "this is $os: only Debian 12, Debian 13 and Ubuntu 24.04 are set up automatically" \
       "elsewhere, install by hand what docs/internals/guest-artifacts.md lists" ;;
esac

# --- Packages --------------------------------------------------------------------------------------------------

export DEBIAN_FRONTEND=noninteractive
apt_updated=false

apt_update() {
  $apt_updated && return
  say "reading the package lists"
  apt-get -qq -o DPkg::Lock::Timeout=300 update ||
    die "apt-get update failed" "check this machine's network and /etc/apt, then run this again"
  apt_updated=true
}

# apt_install WHY [-t SUITE] PACKAGE...
apt_install() {
  local why=$1
  shift
  apt_update
  say "installing $* ($why)"
  apt-get -qq -y -o DPkg::Lock::Timeout=300 -o Dpkg::Use-Pty=0 install --no-install-recommends "$@" >/dev/null ||
    die "cannot install $*" "check this machine's network and /etc/apt, then run this again"
}

installed() { [ "$(dpkg-query -W -f '${db:Status-Status}' "$1" 2>/dev/null)" = installed ]; }

missing() {
  local package
  for package in "$@"; do installed "$package" || printf '%s ' "$package"; done
}

# The stanzas of every enabled binary source as "SUITES|URIS|SIGNED-BY", one a line. An embedded key (several lines)
# keeps its lines, joined by \r.
apt_sources() {
  local file
  for file in /etc/apt/sources.list /etc/apt/sources.list.d/*; do
    [ -f "$file" ] || continue
    case $file in
      *.sources) awk -v RS= '
        {
          split("", field); name = ""
          count = split($0, line, "\n")
          for (i = 1; i <= count; i++) {
            if (line[i] ~ /^#/) continue
            if (line[i] ~ /^[ \t]/) { field[name] = field[name] "\r" line[i]; continue }
            at = index(line[i], ":")
            name = tolower(substr(line[i], 1, at - 1))
            value = substr(line[i], at + 1); sub(/^[ \t]+/, "", value); field[name] = value
          }
          if ((" " field["types"] " ") !~ / deb / || tolower(field["enabled"]) ~ /^(no|false)$/) next
          print field["suites"] "|" field["uris"] "|" field["signed-by"]
        }' "$file" ;;
      *.list) awk '
        $1 == "deb" {
          key = ""; at = 2
          if ($2 ~ /^\[/) {
            for (at = 2; at <= NF; at++) {
              option = $at; gsub(/[][]/, "", option)
              if (option ~ /^signed-by=/) key = substr(option, 11)
              if ($at ~ /\]$/) { at++; break }
            }
          }
          print $(at + 1) "|" $at "|" key
        }' "$file" ;;
    esac
  done
}

# Debian 12 has QEMU 7.2 and Linux 6.1; both are newer in its backports, which the machine's own mirror carries.
enable_backports() {
  local suites uris key
  while IFS='|' read -r suites uris key; do
    [[ " $suites " != *" $codename-backports "* ]] || return 0
  done < <(apt_sources)
  while IFS='|' read -r suites uris key; do
    [[ " $suites " == *" $codename "* ]] || continue
    say "enabling $codename-backports (QEMU $QEMU_MAJOR and a 6.12 guest kernel) in $BACKPORTS"
    {
      printf 'Types: deb\nURIs: %s\nSuites: %s-backports\nComponents: main\n' "$uris" "$codename"
      [ -z "$key" ] || printf 'Signed-By: %s\n' "$key" | tr '\r' '\n'
    } >"$BACKPORTS.new"
    mv "$BACKPORTS.new" "$BACKPORTS"
    apt_updated=false
    apt_update
    return 0
  done < <(apt_sources)
  die "no apt source of $codename was found in /etc/apt" "add one, or enable $codename-backports yourself"
}

qemu_is_new_enough() {
  local version
  version=$(qemu-system-x86_64 --version 2>/dev/null | sed -n '1s/.*version \([0-9]*\)\..*/\1/p')
  [ "${version:-0}" -ge $QEMU_MAJOR ] && command -v qemu-img >/dev/null
}

candidate_major() { # of a package: 1:10.0.2+ds-2 gives 10
  apt-cache policy "$1" | sed -n 's/^  Candidate: \(.*:\)\{0,1\}\([0-9]*\).*/\2/p'
}

install_qemu() {
  local why="the virtual machine monitor, $QEMU_MAJOR or newer" release
  case $os in
    debian-12) apt_install "$why" -t "$codename-backports" qemu-system-x86 qemu-utils ;;
    debian-13) apt_install "$why" qemu-system-x86 qemu-utils ;;
    ubuntu-24.04)
      apt_update
      if [ "$(candidate_major qemu-system-x86)" -lt $QEMU_MAJOR ]; then
        apt_install "to add Ubuntu's Cloud Archive" software-properties-common
        for release in flamingo gazpacho; do
          say "enabling Ubuntu's Cloud Archive $release (QEMU $QEMU_MAJOR or newer)"
          add-apt-repository -y --update "cloud-archive:$release" >/dev/null || continue
          [ "$(candidate_major qemu-system-x86)" -lt $QEMU_MAJOR ] || break
        done
      fi
      apt_install "$why" qemu-system-x86 qemu-utils ;;
  esac
  qemu_is_new_enough || die "QEMU is older than $QEMU_MAJOR after the installation" \
    "qemu-system-x86_64 --version says: $(qemu-system-x86_64 --version 2>&1 | head -n 1)"
}

[ "$os" != debian-12 ] || enable_backports
qemu_is_new_enough || install_qemu
read -ra packages <<<"$(missing nftables iproute2 e2fsprogs mmdebstrap git curl ca-certificates gcc libc6-dev)"
[ ${#packages[@]} -eq 0 ] ||
  apt_install "sandbox networks, root filesystems, and linking the guest daemon" "${packages[@]}"
if [ $group = dev ]; then
  read -ra packages <<<"$(missing docker-registry apache2-utils umoci skopeo openssl zstd lz4)"
  if [ ${#packages[@]} -gt 0 ]; then
    apt_install "the tests run an image registry, benchmarks compare with umoci, zstd and lz4" "${packages[@]}"
    # The tests start their own registry; Debian's package starts one for everybody.
    [[ " ${packages[*]} " != *" docker-registry "* ]] || ! systemctl is-active -q docker-registry 2>/dev/null ||
      systemctl disable -q --now docker-registry
  fi
fi

# --- Python ----------------------------------------------------------------------------------------------------

python_works() {
  "$1" -c "import sys, venv, ensurepip; sys.exit(sys.version_info < (3, $PYTHON_MINOR))" 2>/dev/null
}

# pip's configuration of this machine, also for uv, which does not read it. Prints nothing where it has none.
pip_setting() { # NAME: of the environment first, as pip does
  local variable=PIP_${1//-/_}
  variable=${variable^^}
  if [ -n "${!variable:-}" ]; then echo "${!variable}"; return; fi
  "$venv/bin/python" -m pip config get "global.$1" 2>/dev/null ||
    "$venv/bin/python" -m pip config get "install.$1" 2>/dev/null || true
}

sync_python() {
  local base=python3 uv index certificate links requirements
  if ! "$venv/bin/python" -c 'import pip' 2>/dev/null; then
    if ! python_works "$base"; then
      apt_install "the server" python3 python3-venv
      base=/usr/bin/python3
      python_works $base || die "python3 is older than 3.$PYTHON_MINOR: $($base --version 2>&1)"
    fi
    say "making the Python environment $venv"
    "$base" -m venv --clear "$venv"
  fi
  certificate=$(pip_setting cert)
  [ -z "$certificate" ] || export SSL_CERT_FILE="${SSL_CERT_FILE:-$certificate}"
  uv=$(command -v uv || echo "$venv/bin/uv")
  if [ ! -x "$uv" ]; then
    say "installing uv (installs the locked versions of uv.lock)"
    "$venv/bin/python" -m pip install -q --disable-pip-version-check 'uv>=0.5' ||
      die "pip cannot install uv" "check this machine's network and pip configuration, then run this again"
  fi
  say "installing the Python packages of uv.lock (group $group)"
  index=${UV_DEFAULT_INDEX:-${UV_INDEX_URL:-$(pip_setting index-url)}}
  if [ -z "$index" ]; then
    # --inexact: uv itself and the packages of a former --dev stay.
    VIRTUAL_ENV=$venv "$uv" sync -q --project "$root" --active --locked --inexact --no-default-groups \
      --group "$group" || die "cannot install the packages of uv.lock" \
      "check this machine's network, or configure pip's index-url, then run this again"
    return
  fi
  # The lock names files of the public index. From another index come the same versions, held to the same digests.
  requirements=$(mktemp)
  # shellcheck disable=SC2064
  trap "rm -f '$requirements'" EXIT
  links=$(pip_setting find-links)
  [ -z "$links" ] || export UV_FIND_LINKS="${UV_FIND_LINKS:-${links// /,}}"
  "$uv" export -q --project "$root" --frozen --no-emit-project --no-default-groups --group "$group" \
    --output-file "$requirements" >/dev/null
  UV_DEFAULT_INDEX=$index "$uv" pip install -q --python "$venv/bin/python" --require-hashes -r "$requirements" &&
    UV_DEFAULT_INDEX=$index "$uv" pip install -q --python "$venv/bin/python" --no-deps --editable "$root" ||
    die "cannot install the packages of uv.lock from pip's configured index" \
      "check that the index has the versions of uv.lock, then run this again"
}

venv=$root/.venv
stamp=$venv/.aenv-installed
wanted=$(cat "$root/uv.lock" "$root/pyproject.toml" | sha256sum | cut -d ' ' -f 1)
# What --dev installs includes what the demo needs.
if ! grep -qsxE "$wanted ($group|dev)" "$stamp" || ! "$venv/bin/python" -c 'import aenv' 2>/dev/null; then
  rm -f "$stamp"
  sync_python
  echo "$wanted $group" >"$stamp"
fi

# --- The S3 server of the tests --------------------------------------------------------------------------------

# Go 1.21 or newer, which fetches the version that a module asks for by itself.
find_go() {
  local version
  for GO in go /usr/local/go/bin/go /usr/lib/go-*/bin/go; do
    version=$("$GO" version 2>/dev/null | sed -n 's/.* go1\.\([0-9]*\).*/\1/p')
    [ "${version:-0}" -lt 21 ] || return 0
  done
  return 1
}

install_go() {
  local why="builds the S3 server that the tests run"
  case $os in
    debian-12) apt_install "$why" -t "$codename-backports" golang-go ;;
    *) apt_install "$why" golang-go ;;
  esac
  find_go || die "the distribution's Go is older than 1.21" "install a newer one and put go on PATH"
}

versitygw=$root/.tools/bin/versitygw
if [ $group = dev ] && ! grep -qsx "$VERSITYGW" "$versitygw.version"; then
  find_go || install_go
  say "building the S3 server of the tests, VersityGW $VERSITYGW (three minutes)"
  mkdir -p "$root/.tools/bin"
  GOBIN=$root/.tools/bin CGO_ENABLED=0 "$GO" install -ldflags '-s -w' \
    "github.com/versity/versitygw/cmd/versitygw@$VERSITYGW" >/dev/null 2>"$root/.tools/build.log" ||
    die "VersityGW does not build" "$(tail -n 3 "$root/.tools/build.log")" \
      "if modules could not be fetched, check this machine's network and GOPROXY, then run this again"
  echo "$VERSITYGW" >"$versitygw.version"
fi

# --- The guest daemon ------------------------------------------------------------------------------------------

rust_wanted=$(sed -n 's/^rust-version *= *"\(.*\)"/\1/p' "$root/envd/Cargo.toml")

# Whether CARGO's compiler is new enough; RUSTC names the compiler where it is not the one beside it on PATH.
rust_works() {
  local version
  version=$("${RUSTC:-rustc}" --version 2>/dev/null | cut -d ' ' -f 2) || return 1
  "$CARGO" --version >/dev/null 2>&1 && [ "$(printf '%s\n' "$rust_wanted" "$version" | sort -V | head -n 1)" = "$rust_wanted" ]
}

# Sets CARGO and RUSTC to the first that works: on PATH, rustup's, the distribution's versioned ones.
find_rust() {
  local cargo
  CARGO=cargo
  rust_works && return
  for cargo in "${HOME:-/root}/.cargo/bin/cargo" $(printf '%s\n' /usr/bin/cargo-[0-9]* | sort -rV) /usr/bin/cargo; do
    [ -x "$cargo" ] || continue
    CARGO=$cargo RUSTC=${cargo/bin\/cargo/bin\/rustc}
    export RUSTC
    rust_works && return
  done
  unset RUSTC
  return 1
}

install_rust() {
  local why="builds the guest daemon; $rust_wanted or newer" newest
  apt_update
  case $os in
    debian-12) # Debian keeps a recent compiler for its web browsers.
      if [ -n "$(apt-cache search --names-only '^cargo-web$')" ]; then
        apt_install "$why" rustc-web cargo-web
      else
        apt_install "$why" rustc cargo
      fi ;;
    debian-13) apt_install "$why" rustc cargo ;;
    ubuntu-24.04)
      newest=$(apt-cache search --names-only '^cargo-1\.[0-9]+$' | cut -d ' ' -f 1 | sort -V | tail -n 1)
      if [ -n "$newest" ]; then
        apt_install "$why" "${newest/cargo/rustc}" "$newest"
      else
        apt_install "$why" rustc cargo
      fi ;;
  esac
  find_rust || die "the distribution's Rust is older than $rust_wanted" "install a newer one and put cargo on PATH"
}

find_rust || install_rust
envd=$root/envd/target/x86_64-unknown-linux-gnu/release/envd
[ -x "$envd" ] || say "building the guest daemon (about a minute)"
(cd "$root/envd" && "$CARGO" build --quiet --release --locked) ||
  die "the guest daemon does not build" "if crates could not be fetched, check this machine's network"
[ -x "$envd" ] || die "cargo did not write $envd" "unset CARGO_TARGET_DIR and CARGO_BUILD_TARGET, then run this again"

# What serves disks to Firecracker, where the kernel can have block devices in user space.
blockd=$root/blockd/target/x86_64-unknown-linux-gnu/release/aenv-blockd
if [ "$group" = dev ] || [ -e /dev/ublk-control ]; then
  [ -x "$blockd" ] || say "building aenv-blockd (half a minute)"
  (cd "$root/blockd" && "$CARGO" build --quiet --release --locked) ||
    die "aenv-blockd does not build" "if crates could not be fetched, check this machine's network"
fi
say "ready"
