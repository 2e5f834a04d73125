#!/bin/bash
# Usage: LR=0.1 ./run.sh, or with options of train.py at its end
set -e
LR=${LR:-0.05}
DEPTH=${DEPTH:-2}
EPOCHS=${EPOCHS:-9}
OUT=${OUT:-runs/default}

mkdir -p "$OUT"
python train.py \
  --lr "$LR" --depth "$DEPTH" \
  --epochs "$EPOCHS" --save-dir "$OUT" "$@"
