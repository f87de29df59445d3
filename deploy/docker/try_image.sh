#!/usr/bin/env bash
# Builds the CPU image without Docker and runs it as Kubernetes would: as user 1000, with a read-only root and a /tmp.
#   deploy/docker/try_image.sh WORKDIR [buildah's arguments ...]
# Needs root, debootstrap and buildah. WORKDIR keeps the base, the image's store and the log, 3 GB.
# Further arguments go to `buildah bud`: mirrors (--build-arg PIP_INDEX_URL=...), certificates (-v /etc/ssl/certs:/etc/ssl/certs:ro).
set -euo pipefail
work=$(realpath "$1"); shift
cd "$(dirname "$0")/../.."
buildah=(buildah --storage-driver vfs --root "$work/store" --runroot "$work/run")

if [ ! -d "$work/base" ]; then
  mkdir -p "$work"
  debootstrap --variant=minbase --include=python3,ca-certificates bookworm "$work/base" > "$work/debootstrap.log"
  container=$("${buildah[@]}" from scratch)
  "${buildah[@]}" copy -q "$container" "$work/base" / > /dev/null
  "${buildah[@]}" commit -q --rm "$container" outrider-base:bookworm > /dev/null
fi
"${buildah[@]}" bud --layers --isolation chroot --format docker -t outrider:try -f deploy/docker/Dockerfile \
  --build-arg BASE=localhost/outrider-base:bookworm \
  --build-arg BUILD_PACKAGES="gcc libc6-dev python3-dev python3-venv" "$@" .

container=$("${buildah[@]}" from localhost/outrider:try)
root=$("${buildah[@]}" mount "$container")
trap '"${buildah[@]}" rm "$container" > /dev/null' EXIT
# What a container runtime does for `readOnlyRootFilesystem` and `runAsUser`.
unshare --mount --pid --fork bash -euo pipefail -c '
  root=$1
  mount --bind "$root" "$root" && mount -o remount,bind,ro "$root"
  mount -t tmpfs tmpfs "$root/tmp" && mount -t proc proc "$root/proc"
  mount --rbind /dev "$root/dev"
  inside=(chroot --userspec=1000:1000 "$root" env -i HOME=/tmp PATH=/usr/local/bin:/usr/bin:/bin HF_HOME=/models
    PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1)
  cd /
  "${inside[@]}" id
  ! "${inside[@]}" touch /opt/outrider/x || { echo "the root can be written to" >&2; exit 1; }
  ! "${inside[@]}" which gcc || { echo "there is a compiler" >&2; exit 1; }
  "${inside[@]}" outrider serve --port 18000 & server=$!
  for _ in $(seq 60); do "${inside[@]}" outrider health http://127.0.0.1:18000 2> /dev/null && break; sleep 1; done
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
' try "$root"
"${buildah[@]}" images outrider:try
echo "the image answers as user 1000 with a read-only root"
