# The head: a machine in the VPC with rubberband and the experiment's folder. It stops itself when nothing has run on it
# for IDLE_S seconds, and lives until `rubberband cloud down`.

make_programs() {
    printf '%s\n' '#!/bin/bash' "export PATH=$(printf %q "$DIR/venv/bin:$DIR/uv/bin"):\"\$PATH\"" \
        'exec python3 -m rubberband.cli "$@"' > "$PROGRAMS/rubberband"
    {
        echo '#!/bin/bash'
        echo '# rubberband-fetch s3://…/NAME.zip#sha256=…: the folder of an experiment, as "rubberband cloud up" has put it there'
        echo 'set -euo pipefail'
        echo "export PATH=$(printf %q "$DIR/venv/bin"):\"\$PATH\""
        declare -p DIR
        declare -f fetch unpack
        # shellcheck disable=SC2016
        echo 'unpack "$1"'
    } > "$PROGRAMS/rubberband-fetch"
    chmod 755 "$PROGRAMS/rubberband" "$PROGRAMS/rubberband-fetch"
}

unpack() {
    local name folder
    name="$(basename "${1%%#*}" .zip)"
    folder="$(mktemp -d "$DIR/.unpack-XXXXXX")"
    fetch "$1" "$folder"
    python3 -c 'import os, sys, zipfile
with zipfile.ZipFile(sys.argv[1]) as archive:
    for entry in archive.infolist():
        path = archive.extract(entry, sys.argv[2])
        if entry.external_attr >> 16 & 0o111 and os.path.isfile(path):
            os.chmod(path, 0o755)' "$folder/$name.zip" "$folder/unpacked"
    mkdir -p "$DIR/$name"
    (cd "$folder/unpacked/0" && find . -type f | LC_ALL=C sort) > "$folder/sent"
    # What was sent before and is not sent now was deleted or renamed: Python would still import it.
    [[ ! -f "$DIR/.sent-$name" ]] || LC_ALL=C comm -23 "$DIR/.sent-$name" "$folder/sent" |
        while IFS= read -r path; do rm -f -- "$DIR/$name/$path"; done
    mv "$folder/sent" "$DIR/.sent-$name"
    cp -R "$folder/unpacked/0/." "$DIR/$name/"
    chmod -R a+rwX "$DIR/$name"
    rm -rf "$folder"
    echo "rubberband: the experiment's folder is $DIR/$name"
}

remember() { # the bucket and the region, for experiment files without them
    [[ -n "$BUCKET" ]] || return 0
    (umask 077 && mkdir -p "$HOME/.rubberband")
    printf 'bucket: %s\nregion: %s\n' "$BUCKET" "$REGION" > "$HOME/.rubberband/aws.yaml"
}

keep_copy() { # the command that copies the head's experiments to the bucket, as far as that is possible
    [[ -n "$BUCKET" ]] || { echo :; return; }
    printf 'cd %q; ' "$DIR"
    # shellcheck disable=SC2016
    printf 'PATH=%q:"$PATH" HOME=%q AWS_DEFAULT_REGION=%q ' "$DIR/venv/bin" "$HOME" "$REGION"
    printf 'timeout 600 python3 -m rubberband.cloud.aws.on_head keep %q || true\n' "{\"store\": \"s3://$BUCKET/heads\"}"
}

stop_when_idle() { # at every boot: a timer of systemd-run does not outlive one
    local busy='rubberband\.cli (.* )?(run|resume|profile|image) |rubberband\.((app|running)\.)?(hosted|pool)|gcs_server'
    busy+='|ssm-session-worker|sshd: .*@'
    local each_boot="${RUBBERBAND_ROOT:-}/var/lib/cloud/scripts/per-boot"
    # A driver (also one that waits for instances), a pool, a Ray head (also that of a Python program) and sessions of
    # people count. A service that runs nothing does not, nor a terminal that a program such as tmux holds open.
    printf '%s\n' '#!/bin/bash' "stamp=$(printf %q "$DIR/busy")" \
        "if pgrep -f $(printf %q "$busy") > /dev/null; then touch \"\$stamp\"; fi" \
        "if ((\$(date +%s) - \$(stat -c %Y \"\$stamp\") >= $IDLE_S)); then" \
        "    echo 'rubberband: nothing has run for $IDLE_S s, the head stops'" "    $(keep_copy)" '    shutdown -h now' 'fi' \
        > "$DIR/check-idle"
    mkdir -p "$each_boot"
    printf '%s\n' '#!/bin/bash' "touch $(printf %q "$DIR/busy")" \
        "systemd-run --unit=rubberband-idle --on-active=60 --on-unit-active=60 /bin/bash $(printf %q "$DIR/check-idle")" \
        > "$each_boot/rubberband-idle"
    chmod 755 "$each_boot/rubberband-idle"
    /bin/bash "$each_boot/rubberband-idle"
}

boot() {
    set -euo pipefail
    export AWS_DEFAULT_REGION="$REGION"
    export AWS_METADATA_SERVICE_NUM_ATTEMPTS=10 AWS_METADATA_SERVICE_TIMEOUT=5
    say "the head boots"
    ((${#REQUIREMENTS[@]} == 0)) || make_venv
    make_programs
    remember
    local address
    for address in "${FOLDERS[@]}"; do
        say "fetching $address"
        unpack "$address"
    done
    run_setup
    echo "$MADE_OF" > "$DIR/made-of"
    say "the head is ready"
}

DIR="${RUBBERBAND_ROOT:-}/opt/rubberband"
PROGRAMS="${RUBBERBAND_ROOT:-}/usr/local/bin"
export HOME="${HOME:-${RUBBERBAND_ROOT:-}/root}" # cloud-init sets none
mkdir -p "$DIR" "$PROGRAMS" "${RUBBERBAND_ROOT:-}/var/log"
rm -f "$DIR/check-idle" # of a head that is made anew, and may idle now
((IDLE_S == 0)) || stop_when_idle
LOG="${RUBBERBAND_ROOT:-}/var/log/rubberband.log"
(boot) 2>&1 | tee -a "$LOG"
((PIPESTATUS[0] == 0)) || say "the head could not be set up" | tee -a "$LOG"
