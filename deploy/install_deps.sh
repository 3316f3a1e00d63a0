#!/usr/bin/env bash
# The one list of Debian 12 packages that kvtide builds and runs with. Installs what is missing;
# with everything in place it does nothing and needs no privileges.
set -euo pipefail

packages=(
  build-essential cmake ninja-build pkg-config ccache mold git ca-certificates
  python3 python3-venv clang-format iproute2
  libucx-dev ucx-utils
  libgrpc++-dev libprotobuf-dev protobuf-compiler protobuf-compiler-grpc
  librocksdb-dev libspdlog-dev libfmt-dev libabsl-dev libdnnl-dev libssl-dev libpcre2-dev
  libtomlplusplus-dev libcli11-dev nlohmann-json3-dev prometheus-cpp-dev libcpp-httplib-dev
  libxxhash-dev libgtest-dev libgmock-dev libbenchmark-dev
)

missing=()
for package in "${packages[@]}"; do
  dpkg-query -W -f='${db:Status-Status}' "$package" 2>/dev/null | grep -qx installed || missing+=("$package")
done
if ((${#missing[@]} == 0)); then
  echo "install_deps: all ${#packages[@]} packages are installed"
  exit 0
fi

sudo=""
if ((EUID != 0)); then
  command -v sudo >/dev/null || { echo "install_deps: run as root to install: ${missing[*]}" >&2; exit 1; }
  sudo=sudo
fi
echo "install_deps: installing ${missing[*]}"
$sudo apt-get update -qq
DEBIAN_FRONTEND=noninteractive $sudo apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
