# A worker: it ends itself when its lease does, whatever becomes of the rest; then it joins the head's Ray cluster.

arm_lease() {
    local begun
    # From now on by what the machine has been up, which no step of its clock changes.
    BOOTED=$(($(date +%s) - $(cut -d. -f1 /proc/uptime)))
    # The lease counts from the start of the machine, which was some time before this script's.
    begun=$BOOTED
    [[ -z "${RUBBERBAND_ROOT:-}" ]] || begun=$(date +%s)
    BOOT_UNTIL=$((begun + BOOT_S))
    mkdir -p "$DIR" && touch -d "@$((begun + LEASE_S))" "$DIR/lease" &&
        printf '%s\n' '#!/bin/bash' \
            "if [[ \$(($BOOTED + \$(cut -d. -f1 /proc/uptime))) -ge \$(stat -c %Y $(printf %q "$DIR/lease") || echo 0) ]]; then" \
            '    echo "rubberband: the lease has ended"' '    shutdown -h now' 'fi' > "$DIR/check-lease" &&
        end_if_booted_again &&
        systemd-run --unit=rubberband-lease --on-active=5 --on-unit-active=5 --timer-property=AccuracySec=1s \
            /bin/bash "$DIR/check-lease" &&
        systemd-run --unit=rubberband-stop --on-active="$LIFETIME_S" shutdown -h now
}

hold_lease() { # while this machine installs; no further than the budget covers one that the driver does not reach
    local until
    while true; do
        until=$((BOOTED + $(cut -d. -f1 /proc/uptime) + LEASE_S))
        touch -d "@$((until < BOOT_UNTIL ? until : BOOT_UNTIL))" "$DIR/lease"
        sleep 15
    done
}

end_if_booted_again() { # then the timers are gone, and nobody renews the lease; an image made of this disk may boot
    local cloud="${RUBBERBAND_ROOT:-}/var/lib/cloud" this
    this="$(cat "$cloud/data/instance-id" 2> /dev/null)"
    mkdir -p "$cloud/scripts/per-boot" &&
        printf '%s\n' '#!/bin/bash' \
            "if [[ \"\$(cat $(printf %q "$cloud/data/instance-id"))\" == $(printf %q "$this") ]]; then" \
            '    shutdown -h now' 'fi' > "$cloud/scripts/per-boot/rubberband-end" &&
        chmod 755 "$cloud/scripts/per-boot/rubberband-end"
}

upgrade_nothing() { # an upgrade at work holds a shutdown up for as long as 30 minutes, and takes time from the trials
    local folder="${RUBBERBAND_ROOT:-}/etc/apt/apt.conf.d"
    [[ ! -d "$folder" ]] || echo 'APT::Periodic::Unattended-Upgrade "0";' > "$folder/99rubberband"
}

from_metadata() { # what the metadata service says of this instance
    local url="${AWS_EC2_METADATA_SERVICE_ENDPOINT:-http://169.254.169.254}/latest" token=X-aws-ec2-metadata-token
    local ask=(curl --silent --show-error --fail --retry 10 --retry-connrefused --max-time 5 --header)
    token+=": $("${ask[@]}" "$token-ttl-seconds: 300" --request PUT "$url/api/token")"
    "${ask[@]}" "$token" "$url/meta-data/$1"
}

find_name() { # all instances of a request have the same script: each takes the name at its own place in the request
    local index=0
    ((${#INSTANCES[@]} == 1)) || index="$(from_metadata ami-launch-index)"
    INSTANCE="${INSTANCES[${index:?}]}"
}

await_driver() { # what is installed without it is torch's build for the CPU
    local look
    for look in {1..24}; do
        ! nvidia-smi -L > /dev/null 2>&1 || return 0
        ((look > 1)) || say "waiting for the NVIDIA driver"
        sleep 5
    done
}

use_fabric() { # with EFA, NCCL joins instances by a plug-in that Amazon's images have
    local root="${RUBBERBAND_ROOT:-}" folder found=
    compgen -G "$root/sys/class/infiniband/*" > /dev/null || return 0
    for folder in "$root"/opt/amazon/{ofi-nccl/lib,ofi-nccl/lib/*-linux-gnu,efa/lib}; do
        [[ ! -d "$folder" ]] || found+="$folder:"
    done
    # Without huge pages, as processes that load data are forked, and then there are not enough of them.
    export LD_LIBRARY_PATH="$found${LD_LIBRARY_PATH:-}" FI_EFA_USE_HUGE_PAGE=0
    ulimit -l unlimited 2> /dev/null || true
}

fetch_models() { # in the background: workers wait for it. It has no token; what needs one is fetched after joining.
    say "fetching models and data"
    python3 -c 'import huggingface_hub' 2> /dev/null || uv pip install --quiet huggingface_hub || return 0
    RUBBERBAND_LEASE="$DIR/lease" python3 -m rubberband.cloud.fetch "$FETCH" < /dev/null > "$DIR/fetch.log" 2>&1 &
}

join() {
    say "joining $HEAD_ADDRESS as $INSTANCE"
    export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH="$DIR/ray-token" RUBBERBAND_LEASE="$DIR/lease"
    # The driver's Python and this one are of one minor version, and may differ in the patch.
    export RAY_DEFAULT_PYTHON_VERSION_MATCH_LEVEL=minor "${RAY_SETTINGS[@]}"
    ulimit -n 65536 2> /dev/null || true
    use_fabric
    # shellcheck disable=SC2086
    python3 -m ray.scripts.scripts start --block --include-log-monitor=false --address="$HEAD_ADDRESS" \
        --labels "rubberband/instance=$INSTANCE" --num-cpus="$GPUS" --num-gpus="$GPUS" ${RUBBERBAND_RAY_OPTIONS:-}
}

work() {
    trap 'say "ending"; kill "$HOLDER" 2> /dev/null || true; shutdown -h now' EXIT
    HOLDER=
    set -euo pipefail
    export HOME="${HOME:-/root}" AWS_DEFAULT_REGION="$REGION"
    export AWS_METADATA_SERVICE_NUM_ATTEMPTS=10 AWS_METADATA_SERVICE_TIMEOUT=5
    find_name
    say "$INSTANCE boots"
    hold_lease > /dev/null 2>&1 &
    HOLDER=$!
    [[ ${#REQUIREMENTS[@]} == 0 || "$DEVICE" != cuda ]] || await_driver
    ((${#REQUIREMENTS[@]} == 0)) || make_venv
    run_setup
    [[ -z "$FETCH" ]] || fetch_models
    if [[ "$DEVICE" == cuda ]]; then
        say "checking $GPUS GPUs"
        python3 -m rubberband.cloud.aws.joining gpus "$GPUS"
    fi
    [[ -z "$IMAGE_MARKER" ]] || become_image
    say "reading the Ray token from $TOKEN"
    python3 -m rubberband.cloud.aws.joining token "$TOKEN" "$REGION" "$DIR/ray-token"
    kill "$HOLDER" || true # from now on the driver renews it
    join
}

trap 'shutdown -h now' EXIT
DIR="${RUBBERBAND_ROOT:-}/var/lib/rubberband"
arm_lease || exit 1
set -euo pipefail
upgrade_nothing
{
    declare -p DIR LEASE_S BOOTED BOOT_UNTIL INSTANCES HEAD_ADDRESS GPUS DEVICE REGION TOKEN PYTHON_VERSION REQUIREMENTS \
        WHEELS INDEX_URL UV_VERSION UV_SHA256 CONSTRAINTS SETUP IMAGE_MARKER FETCH RAY_SETTINGS
    declare -f
    echo work
} > "$DIR/worker"
# A unit of its own: were this script to wait for Ray, cloud-init would never be done, and a shutdown would wait for it.
# A trial that the kernel kills for its memory is one trial less; by default it would be the end of the unit.
systemd-run --unit=rubberband-worker --property=TimeoutStopSec=10s --property=OOMPolicy=continue \
    --property=StandardOutput=journal+console \
    /bin/bash "$DIR/worker"
trap - EXIT
