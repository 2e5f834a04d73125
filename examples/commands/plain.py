"""A plain training script, which does not know RubberBand: it has options, prints a line per epoch, and resumes.

python plain.py --lr 0.01 --out /tmp/plain
rubberband init plain.py           # writes an experiment for it
rubberband run examples/commands/plain.yaml
"""

import argparse
import pickle
from pathlib import Path

from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from sklearn.neural_network import MLPClassifier

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.001)
parser.add_argument("--alpha", type=float, default=1e-4)
parser.add_argument("--hidden", type=int, default=64)
parser.add_argument("--epochs", type=int, default=16)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--out", default="out")
args = parser.parse_args()

digits = load_digits()
x_train, x_test, y_train, y_test = train_test_split(digits.data / 16, digits.target, random_state=0)

file = Path(args.out, "model.pickle")
file.parent.mkdir(parents=True, exist_ok=True)
if file.exists():
    epoch, model = pickle.loads(file.read_bytes())
else:
    model = MLPClassifier((args.hidden,), learning_rate_init=args.lr, alpha=args.alpha, batch_size=16)
    epoch, model.random_state = 0, args.seed
while epoch < args.epochs:
    for _ in range(20):  # one pass over these few images takes 20 ms
        model.partial_fit(x_train, y_train, classes=range(10))
    accuracy, epoch = model.score(x_test, y_test), epoch + 1
    file.write_bytes(pickle.dumps((epoch, model)))
    print(f"epoch {epoch}: loss={model.loss_:.5f} accuracy={accuracy:.4f}", flush=True)
