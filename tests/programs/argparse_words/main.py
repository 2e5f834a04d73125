"""A language model: the best model alone is saved, lr falls when the validation does not improve."""

import argparse
import math
import time

import numpy as np

parser = argparse.ArgumentParser(description="Language model of letters")
parser.add_argument("--data", type=str, default="./letters.txt", help="location of the corpus")
parser.add_argument("--emsize", type=int, default=16, help="size of embeddings")
parser.add_argument("--lr", type=float, default=20, help="initial learning rate")
parser.add_argument("--clip", type=float, default=0.25, help="gradient clipping")
parser.add_argument("--epochs", type=int, default=40, help="upper epoch limit")
parser.add_argument("--batch_size", type=int, default=20, metavar="N", help="batch size")
parser.add_argument("--bptt", type=int, default=35, help="sequence length")
parser.add_argument("--tied", action="store_true", help="one table for input and output")
parser.add_argument("--seed", type=int, default=1111, help="random seed")
parser.add_argument("--cuda", action="store_true", help="use CUDA")
parser.add_argument("--log-interval", type=int, default=20, metavar="N", help="report interval")
parser.add_argument("--save", type=str, default="model.npz", help="path to save the final model")
args = parser.parse_args()
np.random.seed(args.seed)

text = np.frombuffer(open(args.data, "rb").read(), dtype=np.uint8)
letters, corpus = np.unique(text, return_inverse=True)
n = len(letters)
train_data, val_data, test_data = np.split(corpus, [int(0.8 * len(corpus)), int(0.9 * len(corpus))])
print(f"vocab size ({n})")
embed = np.random.uniform(-0.1, 0.1, (n, args.emsize))
head = embed if args.tied else np.random.uniform(-0.1, 0.1, (n, args.emsize))


def loss_of(source, step=0.0):
    x, y = source[:-1], source[1:]
    logits = embed[x] @ head.T
    p = np.exp(logits - logits.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    loss = -np.log(p[np.arange(len(y)), y] + 1e-12).mean()
    if step:
        p[np.arange(len(y)), y] -= 1
        grads = (p.T @ embed[x] / len(y), (p @ head) / len(y))
        norm = math.sqrt(sum((g**2).sum() for g in grads))
        step *= min(1.0, args.clip / (norm + 1e-6))
        np.subtract(head, step * grads[0], out=head)
        np.subtract.at(embed, x, step * grads[1])
    return loss


lr, best_val_loss, size = args.lr, None, args.bptt * args.batch_size
try:
    for epoch in range(1, args.epochs + 1):
        epoch_start_time = time.time()
        total = 0.0
        for batch, i in enumerate(range(0, len(train_data) - 1, size)):
            total += loss_of(train_data[i : i + size + 1], lr)
            if batch % args.log_interval == 0 and batch > 0:
                cur_loss, total = total / args.log_interval, 0.0
                print(
                    f"| epoch {epoch:3d} | {batch:5d}/{len(train_data) // size:5d} batches | lr {lr:02.2f} | "
                    f"ms/batch {1.23:5.2f} | loss {cur_loss:5.2f} | ppl {math.exp(cur_loss):8.2f}"
                )
        time.sleep(0.1)
        val_loss = loss_of(val_data)
        print("-" * 89)
        print(
            f"| end of epoch {epoch:3d} | time: {time.time() - epoch_start_time:5.2f}s | valid loss {val_loss:5.2f} | "
            f"valid ppl {math.exp(val_loss):8.2f}"
        )
        print("-" * 89)
        if best_val_loss is None or val_loss < best_val_loss:
            np.savez(args.save, embed=embed, head=head)
            best_val_loss = val_loss
        else:
            lr /= 4.0
except KeyboardInterrupt:
    print("Exiting from training early")
embed, head = (np.load(args.save)[name] for name in ("embed", "head"))
print("=" * 89)
print(f"| End of training | test loss {loss_of(test_data):5.2f} | test ppl {math.exp(loss_of(test_data)):8.2f}")
