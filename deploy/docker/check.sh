#!/usr/bin/env bash
# Runs the images' steps without Docker: install.sh in a clean Debian 12, then each service as the user of the images
# on a read-only root. Needs root, debootstrap, git and a network; takes some minutes and 4 GB.
#
#   deploy/docker/check.sh [FOLDER]
#
# A folder within FOLDER (/tmp) gets the roots and is removed at the end. Variables of install.sh and of pip (PIP_…)
# reach the steps; BIND names folders and files, separated by colons, that are visible inside, such as an index of
# wheels; MIRROR is debootstrap's.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
source=$(cd "$here/../.." && pwd)

# Everything is mounted in a namespace of its own, which is gone before the folder is removed: nothing that was
# mounted can be removed with it.
if [[ -z ${PACELINE_CHECK_FOLDER:-} ]]; then
    PACELINE_CHECK_FOLDER=$(mktemp -d "${1:-/tmp}/paceline-image.XXXXXX")
    export PACELINE_CHECK_FOLDER
    trap 'rm -rf --one-file-system "$PACELINE_CHECK_FOLDER"' EXIT
    unshare --mount --propagation private --pid --fork --kill-child --mount-proc "$0"
    exit
fi

folder=$PACELINE_CHECK_FOLDER
build=$folder/build root=$folder/runtime

say() { printf '\n== %s\n' "$*"; }

# A root of its own mount, with what a container engine would give it.
mounted() {
    mount --bind "$1" "$1"
    mount -t proc proc "$1/proc"
    for device in null zero random urandom; do
        touch "$1/dev/$device"
        mount --bind "/dev/$device" "$1/dev/$device"
    done
    mkdir -p "$1/dev/shm"
    mount -t tmpfs tmpfs "$1/dev/shm"
    cp /etc/resolv.conf "$1/etc/resolv.conf"
    local each
    for each in ${BIND:+${BIND//:/ }}; do
        mkdir -p "$1/$(dirname "$each")"
        if [[ -d $each ]]; then mkdir -p "$1/$each"; else touch "$1/$each"; fi
        mount --bind --read-only "$each" "$1/$each"
    done
}

# install.sh with a clean environment, but for its own variables and pip's.
step() {
    local in=$1 name
    shift
    local variables=(PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8)
    for name in $(compgen -v | grep -E '^(PIP_|VARIANT$|TORCH$|TORCH_INDEX$|EXTRAS$|REQUIREMENTS$)'); do
        variables+=("$name=${!name}")
    done
    env -i "${variables[@]}" chroot "$in" /install.sh "$@"
}

# The Dockerfile's ENV and USER.
as_service=(
    "$(command -v env)" -i PATH=/opt/paceline/bin:/usr/bin:/bin HOME=/cache PACELINE_HOME=/cache/paceline
    HF_HOME=/cache/huggingface NUMBA_CACHE_DIR=/cache/numba GOMP_SPINCOUNT=20000 PYTHONUNBUFFERED=1
    "$(command -v chroot)" --userspec=10001:10001 "$root"
)

# A service starts, is healthy, ends within its drain when told to, and leaves with 0.
serves() {
    local name=$1 port=$2 service=$3 pid waited=0
    shift 3
    "${as_service[@]}" paceline "$name" --host=127.0.0.1 --drain-seconds=2 "$@" 2>"$folder/$name.log" &
    pid=$!
    until "${as_service[@]}" python /opt/paceline/healthy.py "$port" "$service" 2>/dev/null; do
        kill -0 "$pid" 2>/dev/null || { cat "$folder/$name.log"; echo "$name ended" >&2; return 1; }
        ((++waited < 120)) || { cat "$folder/$name.log"; echo "$name is not healthy after two minutes" >&2; return 1; }
        sleep 1
    done
    echo "$name: healthy on $port as $(ps -o uid= -p "$pid" | tr -d ' ')"
    pids+=("$pid")
}

main() {
    say "a clean Debian 12"
    debootstrap --variant=minbase bookworm "$build" ${MIRROR:-} >"$folder/debootstrap.log" ||
        { tail -20 "$folder/debootstrap.log"; exit 1; }
    cp -a "$build" "$root"
    cp "$here/install.sh" "$build/install.sh"
    cp "$here/install.sh" "$root/install.sh"
    mounted "$build"
    mounted "$root"

    say "build-system"
    step "$build" build-system

    say "environment"
    # What .dockerignore lets through.
    mkdir "$build/source"
    (cd "$source" && sed -n 's/^!//p' .dockerignore | xargs git ls-files -- | tar -cf - -T -) | tar -xf - -C "$build/source"
    step "$build" environment /source

    say "run-system"
    step "$root" run-system
    mv "$build/opt/paceline" "$root/opt/paceline"
    cp "$here/healthy.py" "$root/opt/paceline/healthy.py"

    say "services as 10001 on a read-only root"
    # cache and tmp are volumes; all else can't be written any more.
    mount -t tmpfs -o uid=10001,gid=10001 tmpfs "$root/cache"
    mount -t tmpfs tmpfs "$root/tmp"
    mount -o remount,bind,ro "$root"
    "${as_service[@]}" python -c '
try:
    open("/opt/paceline/written", "w")
except OSError as error:
    print(error)
else:
    raise SystemExit("the root is writable")'
    "${as_service[@]}" paceline --version
    "${as_service[@]}" python -c 'import paceline_drafts'
    pids=()
    model='table:distribution=text,max_length=512,seed=1'
    serves target-service 50163 paceline.v1.TargetService --health-port=50163 --port=50153 --model="$model"
    serves draft-service 50162 paceline.v1.DraftService --health-port=50162 --port=50152 --drafter="model:$model" --target-model="$model"
    serves coordinator 50161 paceline.v1.GenerationService --health-port=50161 --port=50151 --model="$model" \
        --target=dns:///127.0.0.1:50153 --draft=dns:///127.0.0.1:50152
    "${as_service[@]}" paceline generate --coordinator 127.0.0.1:50151 --prompt "The keeper" --max-new-tokens 16 --temperature 0
    serves gateway 8100 /health --port=8100 --model="$model" --coordinator=dns:///127.0.0.1:50151
    "${as_service[@]}" python -c '
import json, urllib.request
body = json.dumps({"prompt": "The keeper", "max_tokens": 16, "temperature": 0}).encode()
request = urllib.request.Request("http://127.0.0.1:8100/v1/completions", body, {"Content-Type": "application/json"})
print(json.load(urllib.request.urlopen(request, timeout=60))["choices"][0])'
    for pid in "${pids[@]}"; do
        kill -TERM "$pid"
        wait "$pid"
    done
    echo "all four ended with 0"

    say "size"
    du -sh "$root/opt/paceline" | sed "s|$root||"
}

main
exit
