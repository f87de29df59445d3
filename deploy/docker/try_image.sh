#!/usr/bin/env bash
# Builds an image without Docker and runs it as Kubernetes would: as user 1000, with a read-only root and a /tmp.
#   deploy/docker/try_image.sh WORKDIR cpu|ray|vllm-cuda [buildah's arguments ...]
# Needs root, debootstrap and buildah. WORKDIR keeps the bases, the images and the log: 3 GB, 25 GB with vllm-cuda.
# Further arguments go to `buildah bud`: mirrors (--build-arg PIP_INDEX_URL=...), certificates (-v /etc/ssl/certs:/etc/ssl/certs:ro).
# vllm-cuda is built on Debian with vLLM from PyPI, because this script does not pull vLLM's own image from a registry.
set -euo pipefail
work=$(realpath "$1") image=$2; shift 2
cd "$(dirname "$0")/../.."
buildah=(buildah --storage-driver overlay --root "$work/store" --runroot "$work/run")
build=("${buildah[@]}" bud --isolation chroot --format docker "$@")

mkdir -p "$work"
if [ ! -d "$work/base" ]; then
  debootstrap --variant=minbase --include=python3,ca-certificates bookworm "$work/base" > "$work/debootstrap.log"
fi
base=localhost/outrider-base:bookworm
if ! "${buildah[@]}" inspect --type image "$base" > /dev/null 2>&1; then
  container=$("${buildah[@]}" from scratch)
  "${buildah[@]}" copy -q "$container" "$work/base" / > /dev/null
  "${buildah[@]}" commit -q --rm "$container" outrider-base:bookworm > /dev/null
fi
case $image in
  cpu) arguments=(-f deploy/docker/Dockerfile --build-arg BUILD_PACKAGES="gcc libc6-dev python3-dev python3-venv") ;;
  ray) arguments=(-f deploy/docker/Dockerfile --build-arg BUILD_PACKAGES="gcc libc6-dev python3-dev python3-venv"
         --build-arg EXTRAS=ray --build-arg RUNTIME_PACKAGES=wget) ;;
  vllm-cuda)
    "${build[@]}" -t outrider-base:vllm -f - . <<EOF
FROM $base
ENV PIP_BREAK_SYSTEM_PACKAGES=1
RUN apt-get update && apt-get install -y --no-install-recommends python3-pip && rm -rf /var/lib/apt/lists/*
RUN python3 -m pip install --no-cache-dir vllm==0.32.0
EOF
    base=localhost/outrider-base:vllm
    arguments=(-f deploy/docker/vllm-cuda.Dockerfile) ;;
  *) echo "no image '$image': cpu, ray or vllm-cuda" >&2; exit 2 ;;
esac
"${build[@]}" -t "outrider:try-$image" --build-arg BASE=$base "${arguments[@]}" .

container=$("${buildah[@]}" from "localhost/outrider:try-$image")
root=$("${buildah[@]}" mount "$container")
trap '"${buildah[@]}" rm "$container" > /dev/null' EXIT
# What a container runtime does for `readOnlyRootFilesystem` and `runAsUser`.
unshare --mount --pid --fork bash -euo pipefail -c '
  root=$1 image=$2
  mount --bind "$root" "$root" && mount -o remount,bind,ro "$root"
  mount -t tmpfs tmpfs "$root/tmp" && mount -t proc proc "$root/proc"
  mount --rbind /dev "$root/dev"
  inside=(chroot --userspec=1000:1000 "$root" env -i HOME=/tmp PATH=/usr/local/bin:/usr/bin:/bin HF_HOME=/models
    PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1)
  cd /
  "${inside[@]}" id
  ! "${inside[@]}" touch /usr/x || { echo "the root is writable" >&2; exit 1; }
  ! "${inside[@]}" which gcc || { echo "there is a compiler" >&2; exit 1; }
  if [ "$image" = vllm-cuda ]; then
    # Without a GPU it must exit with status 2.
    status=0; timeout 120 "${inside[@]}" outrider target --set target.listen=127.0.0.1:18001 --set target.engine=vllm \
      --set target.device=cuda || status=$?
    [ $status = 2 ] || { echo "outrider target exited with status $status without a GPU" >&2; exit 1; }
    exit
  fi
  launcher=(); [ "$image" = ray ] && launcher=(--launcher ray)
  "${inside[@]}" outrider serve --port 18000 "${launcher[@]}" & server=$!
  for _ in $(seq 120); do "${inside[@]}" outrider health http://127.0.0.1:18000 2> /dev/null && break; sleep 1; done
  "${inside[@]}" python3 - <<EOF
import json, time, urllib.error, urllib.request
body = json.dumps({"prompt": "def add(a, b):", "max_tokens": 24, "temperature": 0}).encode()
for _ in range(60):
    try:
        request = urllib.request.Request("http://127.0.0.1:18000/v1/completions", body, {"content-type": "application/json"})
        print(json.load(urllib.request.urlopen(request))["choices"][0]["text"])
        break
    except urllib.error.HTTPError:
        time.sleep(1)
else:
    raise SystemExit("no answer")
EOF
  kill -TERM $server; wait $server
' try "$root" "$image"
"${buildah[@]}" images "outrider:try-$image"
echo "the image $image runs as user 1000 with a read-only root"
