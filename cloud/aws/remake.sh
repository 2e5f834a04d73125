# Sent to a head by Run Command, maybe twice: makes it of other packages, if nothing runs there. If that fails, it keeps
# what it has.

DIR="${RUBBERBAND_ROOT:-}/opt/rubberband"
LOG="${RUBBERBAND_ROOT:-}/var/log/rubberband.log"
PLACE="$DIR/.remake-$KEY"
BUSY='(rubberband[.]cli|bin/rubberband) (.* )?(run|resume|profile|image|pool|serve)( |$)|rubberband[.]((app|running)[.])?(hosted|pool)|gcs_serve[r]'

mkdir "$PLACE" 2> /dev/null || exit 0
if pgrep -f "$BUSY" > /dev/null; then
    rmdir "$PLACE"
    exit 73
fi
base64 --decode <<< "$BOOT" | gzip --decompress > "$PLACE/boot"
{
    declare -p DIR LOG PLACE
    cat << 'END'
rm -rf "$DIR/venv.before"
[[ ! -d "$DIR/venv" ]] || mv "$DIR/venv" "$DIR/venv.before"
/bin/bash "$PLACE/boot"
if grep -q 'rubberband: .* the head is ready' "$LOG"; then
    rm -rf "$DIR/venv.before" "$LOG.before" "$LOG.failed"
else
    mv "$LOG" "$LOG.failed"
    rm -rf "$DIR/venv"
    [[ ! -d "$DIR/venv.before" ]] || mv "$DIR/venv.before" "$DIR/venv"
    mv "$LOG.before" "$LOG"
fi
END
} > "$PLACE/script"
mv "$LOG" "$LOG.before" # until it is ready again, it answers nothing else
systemd-run --unit="rubberband-remake-$KEY" --collect /bin/bash "$PLACE/script" || {
    mv "$LOG.before" "$LOG"
    exit 1
}
