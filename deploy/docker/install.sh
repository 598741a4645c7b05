#!/bin/sh
# The steps of the images, one a call. The Dockerfile runs them, and so does check.sh in a clean root.
#
#   install.sh build-system         what the environment is made with
#   install.sh environment SOURCE   /opt/paceline, a virtual environment with Paceline and its drafts from SOURCE
#   install.sh run-system [PACKAGE…]  what running needs, and the user paceline (10001)
#
# The environment takes from its variables: VARIANT, cpu or cuda; TORCH, the requirement; TORCH_INDEX, an index
# that has torch for that variant, where the default one has it for the other; EXTRAS, of Paceline; REQUIREMENTS, more
# for pip.
set -eu

ENVIRONMENT=/opt/paceline
USER_ID=10001

packages() {
    apt-get update
    DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends "$@"
    rm -rf /var/lib/apt/lists/* /var/log/apt /var/log/dpkg.log
}

build_system() {
    packages ca-certificates python3 python3-venv
}

environment() {
    source=$1
    python3 -m venv "$ENVIRONMENT"
    set -- --disable-pip-version-check --constraint "$source/constraints.txt"
    "$ENVIRONMENT/bin/pip" install "$@" ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "${TORCH:-torch==2.13.0}"
    # Requirements are words, and there may be none.
    # shellcheck disable=SC2086
    "$ENVIRONMENT/bin/pip" install "$@" "$source[${EXTRAS:-engine,grammar,http,otel}]" "$source/drafts" ${REQUIREMENTS:-}
    check_variant
}

# The default index has one build of torch for a platform, and not everywhere the same.
check_variant() {
    "$ENVIRONMENT/bin/python" - "${VARIANT:-cpu}" <<'PYTHON'
import sys

import torch

found = "cpu" if torch.version.cuda is None else "cuda"
if found != sys.argv[1]:
    sys.exit(f"VARIANT = {sys.argv[1]}: torch {torch.__version__} is built for {found}; name an index by TORCH_INDEX")
PYTHON
}

run_system() {
    packages ca-certificates python3 "$@"
    groupadd --gid "$USER_ID" paceline
    useradd --uid "$USER_ID" --gid "$USER_ID" --no-create-home --home-dir /cache --shell /usr/sbin/nologin paceline
    install -d -o paceline -g paceline /cache /cache/huggingface
}

step=${1:?build-system, environment or run-system}
shift
case $step in
    build-system) build_system ;;
    environment) environment "${1:?where Paceline is}" ;;
    run-system) run_system "$@" ;;
    *)
        echo "install.sh $step: is build-system, environment or run-system" >&2
        exit 2
        ;;
esac
