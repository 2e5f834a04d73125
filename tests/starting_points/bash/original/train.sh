#!/bin/bash
# train.sh LEARNING_RATE EPOCHS FOLDER: goes on from the folder's state, if there is one.
set -eu
lr=$1 epochs=$2 folder=$3
mkdir -p "$folder"
epoch=0 x=0
if [ -f "$folder/state" ]; then read -r epoch x < "$folder/state"; fi
while [ "$epoch" -lt "$epochs" ]; do
    epoch=$((epoch + 1))
    x=$(awk -v x="$x" -v lr="$lr" 'BEGIN { printf "%.17g", x - lr * 2 * (x - 3) }')
    sleep 0.1
    echo "$epoch $x" > "$folder/state"
    awk -v x="$x" -v epoch="$epoch" 'BEGIN { printf "epoch=%d loss=%.9f\n", epoch, (x - 3) ^ 2 }'
done
