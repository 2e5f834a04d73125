"""A model of letters: a configurator overrides its globals; it evaluates before it trains; resumes if asked."""

import os
import time

import numpy as np
import torch

# -----------------------------------------------------------------------------
# settings of a run
out_dir = "out"
eval_interval = 200
log_interval = 10
eval_iters = 8
always_save_checkpoint = False  # if True, save a checkpoint after each evaluation
init_from = "scratch"  # 'scratch' or 'resume'
batch_size = 12
block_size = 8
n_embd = 32
dropout = 0.0
learning_rate = 6e-4
max_iters = 2000
weight_decay = 1e-1
grad_clip = 1.0
backend = "nccl"  # 'nccl', 'gloo', etc.
device = "cpu"
compile = False
# -----------------------------------------------------------------------------
config_keys = [k for k, v in globals().items() if not k.startswith("_") and isinstance(v, (int, float, bool, str))]
exec(open("configurator.py").read())  # from the command line or a file of settings
config = {k: globals()[k] for k in config_keys}
# -----------------------------------------------------------------------------
ddp = int(os.environ.get("RANK", -1)) != -1  # is this a ddp run?
if ddp:
    torch.distributed.init_process_group(backend=backend)
os.makedirs(out_dir, exist_ok=True)
torch.manual_seed(1337)
letters = np.random.default_rng(0).integers(0, 12, 4000).cumsum() % 27
data = {"train": torch.from_numpy(letters[:3600]), "val": torch.from_numpy(letters[3600:])}


def get_batch(split):
    ix = torch.randint(len(data[split]) - block_size, (batch_size,))
    x = torch.stack([data[split][i : i + block_size] for i in ix])
    return x, torch.stack([data[split][i + 1 : i + 1 + block_size] for i in ix])


model = torch.nn.Sequential(torch.nn.Embedding(27, n_embd), torch.nn.Dropout(dropout), torch.nn.Linear(n_embd, 27))
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=weight_decay)
iter_num, best_val_loss = 0, 1e9
if init_from == "resume":
    print(f"Resuming training from {out_dir}")
    checkpoint = torch.load(os.path.join(out_dir, "ckpt.pt"))
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    iter_num, best_val_loss = checkpoint["iter_num"], checkpoint["best_val_loss"]


def loss_of(split):
    x, y = get_batch(split)
    return torch.nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())


t0 = time.time()
while True:
    if iter_num % eval_interval == 0:
        model.eval()
        with torch.no_grad():
            losses = {split: torch.stack([loss_of(split) for _ in range(eval_iters)]).mean() for split in data}
        model.train()
        print(f"step {iter_num}: train loss {losses['train']:.4f}, val loss {losses['val']:.4f}")
        if losses["val"] < best_val_loss or always_save_checkpoint:
            best_val_loss = losses["val"]
            if iter_num > 0:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "config": config}
                print(f"saving checkpoint to {out_dir}")
                torch.save({**state, "iter_num": iter_num, "best_val_loss": best_val_loss}, f"{out_dir}/ckpt.pt")
    loss = loss_of("train")
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    time.sleep(0.01)
    if iter_num % log_interval == 0:
        print(f"iter {iter_num}: loss {loss.item():.4f}, time {(time.time() - t0) * 1000:.2f}ms, mfu -100.00%")
    t0, iter_num = time.time(), iter_num + 1
    if iter_num > max_iters:
        break
