#!/usr/bin/env bash
# Run the tests on another version of Python, in a chroot of the Debian release that has it:
#     chroot.sh VERSION [PYTEST ARGUMENTS]
# With TARGET=test-platform and PLATFORM=colab or kaggle, with the packages that this platform pins.
# RECORD=NAME writes the result to docs/compatibility.md, as in make test.
# The chroots and their virtual environments stay in CHROOTS, so that the next run starts at once. Mounts exist only in
# a mount namespace of this script, so the kernel removes them when it ends, however it ends.
set -euo pipefail
chroots=${CHROOTS:-/var/tmp/ddip-chroots}
checkout=$(cd "$(dirname "$0")/../.." && pwd)
case ${1:-} in
  3.13) release=trixie ;;
  3.14) release=sid ;;
  *) echo "usage: make test-python VERSION=3.13 (Debian trixie) or VERSION=3.14 (Debian sid)" >&2; exit 2 ;;
esac
if [ "$(uname)" != Linux ] || [ "$(id -u)" != 0 ]; then
  echo "make test-python builds a Debian chroot, so it must run as root on Linux" >&2
  exit 1
fi
if [ "${DDIP_CHROOT_NAMESPACE:-}" != "$PPID" ]; then
  export DDIP_CHROOT_NAMESPACE=$$
  unshare --mount "$0" "$@"
  exit
fi
unset DDIP_CHROOT_NAMESPACE
root=$chroots/$release

# Debian's mirror, as apt uses it here.
mirror() { apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' | grep -m1 '/debian/*$'; }

# Files and folders outside the checkout that pip and TLS use here: registries on disk, constraints, certificates.
borrowed() {
  printf '%s\n' /etc/resolv.conf /etc/hosts /etc/pip.conf /etc/xdg/pip
  { python3 -m pip config list; env | grep -E '^(PIP_|SSL_CERT_|REQUESTS_CA_)'; } | grep -oE "(/[^/' :=]+)+" || true
}

# Mount this machine's file or folder $1 read-only at the same place in the chroot.
lend() {
  [ -e "$1" ] || return 0
  mkdir -p "$root$(dirname "$1")"
  if [ -d "$1" ]; then mkdir -p "$root$1"; else [ -e "$root$1" ] || : > "$root$1"; fi
  mount --bind "$1" "$root$1" && mount -o remount,bind,ro "$root$1"
}

mkdir -p "$chroots"
exec 9> "$root.lock"
flock --nonblock 9 || { echo "waiting for another run in $root" >&2; flock 9; }

if [ ! -e "$root/.complete" ]; then
  command -v debootstrap > /dev/null || { apt-get -qq update && apt-get -qq install --yes debootstrap; } > /dev/null
  echo "building a chroot of Debian $release in $root" >&2
  rm -rf "$root"
  debootstrap --variant=minbase --include=python3-venv,python3-dev,g++,make,git,procps,ca-certificates \
    "$release" "$root" "$(mirror)" > "$root.log" || { tail -n 20 "$root.log" >&2; exit 1; }
  touch "$root/.complete"
fi

mount -t proc proc "$root/proc"
mount --rbind /sys "$root/sys"
mount --rbind /dev "$root/dev"
mount -t tmpfs -o mode=1777 shm "$root/dev/shm"  # the leak checks must not see the files of other processes
mkdir -p "$root/ddip"
mount --bind "$checkout" "$root/ddip"
for path in $(borrowed | sort -u); do lend "$path"; done

found=$(chroot "$root" python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])')
if [ "$found" != "$1" ]; then
  echo "Debian $release has Python $found, not $1: see tests/platforms/chroot.sh" >&2
  exit 1
fi
shift
env -u TMPDIR -u PYTHONPATH -u VIRTUAL_ENV -u XDG_RUNTIME_DIR HOME=/root PATH=/usr/sbin:/usr/bin:/sbin:/bin \
  chroot "$root" make -C /ddip --no-print-directory "${TARGET:-test}" VENV=/venv PYTHON=python3 \
  "TORCH=${TORCH:-torch}" "PLATFORM=${PLATFORM:-colab}" "RECORD=${RECORD:-}" "ARGS=${*@Q}"
