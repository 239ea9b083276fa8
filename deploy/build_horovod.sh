#!/bin/sh
# Builds Horovod for the torch of the Python that is named, and installs it there: deploy/build_horovod.sh .venv/bin/python
#
# Two lines of its source (0.28.1) are changed: the C++ standard, which is older than torch's headers take, and the
# interface, which HOROVOD_GLOO_IFACE names and a part of it forgets. The version then ends in "+iface".
# It needs a C++ compiler. HOROVOD_GPU_OPERATIONS=NCCL and other settings of Horovod's own build pass through, as does
# MAKEFLAGS (-j2 unless it is set).
set -eu
python=${1:?the Python to build it for, like .venv/bin/python}
python=$(cd "$(dirname "$python")" && pwd)/$(basename "$python")
version=0.28.1
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

"$python" -m pip install cmake ninja packaging setuptools wheel cffi psutil cloudpickle pyyaml
"$python" -m pip download --no-deps --no-binary horovod --no-build-isolation --dest "$folder" "horovod==$version"
tar -xzf "$folder/horovod-$version.tar.gz" -C "$folder"
cd "$folder/horovod-$version"

standard=$("$python" -c '
import pathlib, re, torch
header = pathlib.Path(torch.__file__).parent / "include/torch/csrc/api/include/torch/all.h"
found = re.search(r"C\+\+(\d\d) or later", header.read_text())
print(found[1] if found else 14)')
sed -i "s/set(CMAKE_CXX_STANDARD 14)/set(CMAKE_CXX_STANDARD $standard)/" CMakeLists.txt horovod/torch/CMakeLists.txt
sed -i '/InitializeForProcessSet(/,/iface = /s/iface = gloo_iface_/iface = global_context.gloo_iface_/' \
  horovod/common/gloo/gloo_context.cc
grep -q 'iface = global_context.gloo_iface_' horovod/common/gloo/gloo_context.cc

PATH=$(dirname "$python"):$PATH
export PATH
export HOROVOD_WITH_PYTORCH=1 HOROVOD_WITH_GLOO=1 HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1
export HOROVOD_WITHOUT_MPI="${HOROVOD_WITHOUT_MPI:-1}" HOROVOD_LOCAL_VERSION=iface
export CMAKE_POLICY_VERSION_MINIMUM=3.5 MAKEFLAGS="${MAKEFLAGS:--j2}"
"$python" -m pip install --no-build-isolation --no-deps .
"$python" -c 'import horovod.torch as hvd; print("Gloo:", bool(hvd.gloo_built()), " NCCL:", bool(hvd.nccl_built()))'
