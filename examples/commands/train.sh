#!/bin/bash
# Any program can be a trial. This one finds the minimum of (x - 3)^2: train.sh LEARNING_RATE EPOCHS FOLDER
set -eu
lr=$1 epochs=$2 folder=$3
mkdir -p "$folder"
epoch=0 x=0
if [ -f "$folder/state" ]; then read -r epoch x < "$folder/state"; fi
while [ "$epoch" -lt "$epochs" ]; do
    sleep 0.1 # your training
    epoch=$((epoch + 1))
    x=$(awk -v x="$x" -v lr="$lr" 'BEGIN { print x - lr * 2 * (x - 3) }')
    echo "$epoch $x" > "$folder/state"
    awk -v x="$x" -v epoch="$epoch" 'BEGIN { printf "epoch=%d loss=%g\n", epoch, (x - 3) ^ 2 }'
done
