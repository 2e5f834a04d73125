"""`rubberband init --patch`: patched scripts print what they printed before, and resume where they were killed."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rubberband.errors import InputError
from rubberband.running.programs.patches import patch_of
from tests.builders.command_line import ROOT

TORCH = """
import argparse
import time

import numpy as np
import torch
from torch import nn


def evaluate(model, x, y):
    model.eval()
    with torch.no_grad():
        return nn.functional.mse_loss(model(x), y).item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    args = parser.parse_args()
    torch.manual_seed(1)
    np.random.seed(1)
    x = torch.randn(64, 4)
    y = x.sum(1, keepdim=True)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs)
    best = float("inf")
    for epoch in range(1, args.epochs + 1):
        model.train()
        for _ in range(10):
            rows = torch.from_numpy(np.random.permutation(64)[:16])
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x[rows]), y[rows]).backward()
            optimizer.step()
        scheduler.step()
        time.sleep(0.4)
        found = evaluate(model, x, y)
        best = min(best, found)
        print(f"epoch {epoch}: loss={found:.8f} best={best:.8f}", flush=True)


if __name__ == "__main__":
    main()
"""

MODULE_LEVEL = """
import time
import torch
import torch.nn as nn
import torch.optim as optim

torch.manual_seed(0)
device = 'cuda' if torch.cuda.is_available() else 'cpu'
best_acc = 0
start_epoch = 0
x = torch.randn(64, 4)
y = (x.sum(1) > 0).long()
net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 2)).to(device)
criterion = nn.CrossEntropyLoss()
optimizer = optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
scheduler = optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=200)


def train(epoch):
    net.train()
    for i in range(4):
        optimizer.zero_grad()
        criterion(net(x[i::4]), y[i::4]).backward()
        optimizer.step()
    time.sleep(0.4)


def test(epoch):
    global best_acc
    net.eval()
    with torch.no_grad():
        loss = criterion(net(x), y)
        acc = (net(x).argmax(1) == y).float().mean().item()
    best_acc = max(best_acc, acc)
    print('Epoch: %d loss=%.8f acc=%.3f best=%.3f' % (epoch, loss, acc, best_acc), flush=True)


for epoch in range(start_epoch, start_epoch + 5):
    train(epoch)
    test(epoch)
    scheduler.step()
"""

CLASS = """
import time
import torch
from torch.utils.data import DataLoader, TensorDataset


class Trainer:
    def __init__(self, model, data, optimizer):
        self.model = model
        self.data = data
        self.optimizer = optimizer
        self.best = 100.0

    def _run_epoch(self, epoch):
        total = 0.0
        for x, y in self.data:
            self.optimizer.zero_grad()
            loss = ((self.model(x) - y) ** 2).mean()
            loss.backward()
            self.optimizer.step()
            total += loss.item()
        time.sleep(0.4)
        return total / len(self.data)

    def fit(self, epochs):
        for epoch in range(epochs):
            loss = self._run_epoch(epoch)
            self.best = min(self.best, loss)
            print(f"Epoch {epoch} | loss={loss:.8f} best={self.best:.8f}", flush=True)


def load_train_objs():
    torch.manual_seed(3)
    x = torch.randn(64, 3)
    model = torch.nn.Linear(3, 1)
    return TensorDataset(x, x.sum(1, keepdim=True)), model, torch.optim.Adam(model.parameters(), lr=0.02)


if __name__ == "__main__":
    dataset, model, optimizer = load_train_objs()
    Trainer(model, DataLoader(dataset, batch_size=16, shuffle=True), optimizer).fit(5)
"""

GAN = """
import time, torch
torch.manual_seed(0)
real = torch.randn(64, 2) + 2
netG, netD = torch.nn.Linear(2, 2), torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
optG = torch.optim.Adam(netG.parameters(), 0.01)
optD = torch.optim.Adam(netD.parameters(), 0.01)
criterion = torch.nn.BCEWithLogitsLoss()
for epoch in range(5):
    for i in range(4):
        netD.zero_grad()
        fake = netG(torch.randn(16, 2))
        errD = criterion(netD(real[i::4]), torch.ones(16, 1)) + criterion(netD(fake.detach()), torch.zeros(16, 1))
        errD.backward()
        optD.step()
        netG.zero_grad()
        errG = criterion(netD(fake), torch.ones(16, 1))
        errG.backward()
        optG.step()
    time.sleep(0.4)
    print("[%d/5] loss=%.8f" % (epoch, errG.item()), flush=True)
"""

STEPS = """
import time
import torch

torch.manual_seed(0)
x = torch.randn(32, 3)
y = x.sum(1, keepdim=True)
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
scaler = torch.amp.GradScaler("cpu", enabled=False)
iter_num, max_iters, eval_interval = 0, 10, 2
while True:
    if iter_num % eval_interval == 0:
        loss = ((model(x) - y) ** 2).mean().item()
        print(f"step {iter_num}: loss={loss:.8f}", flush=True)
    rows = torch.randperm(32)[:8]
    loss = ((model(x[rows]) - y[rows]) ** 2).mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    time.sleep(0.2)
    iter_num += 1
    if iter_num > max_iters:
        break
"""

NUMPY = """
import time
import numpy as np

rng = np.random.default_rng(0)
x = rng.normal(size=(64, 3))
y = x @ np.array([1.0, -2.0, 0.5])
w = np.zeros(3)
velocity = np.zeros(3)
history = []
epoch = 0
while epoch < 5:
    for i in rng.permutation(64)[:20]:
        velocity = 0.9 * velocity - 0.01 * (x[i] @ w - y[i]) * x[i]
        w += velocity
    time.sleep(0.2)
    epoch += 1
    loss = float(((x @ w - y) ** 2).mean())
    history.append(loss)
    print(f"epoch {epoch} loss={loss:.8f} mean={sum(history) / len(history):.8f}", flush=True)
"""

SKLEARN = """
import time
import numpy as np
from sklearn.linear_model import SGDClassifier
from tqdm import trange

np.random.seed(0)
x = np.random.randn(200, 4)
y = (x.sum(1) > 0).astype(int)
clf = SGDClassifier(random_state=np.random.RandomState(3))
for epoch in trange(5):
    order = np.random.permutation(200)
    clf.partial_fit(x[order], y[order], classes=[0, 1])
    time.sleep(0.4)
    print("accuracy=%.4f norm=%.8f" % (clf.score(x, y), np.abs(clf.coef_).sum()), flush=True)
"""

DDP = """
import os, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
x = torch.randn(64, 3)
data = TensorDataset(x, x.sum(1, keepdim=True))
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=16 // dist.get_world_size(), sampler=sampler)
model = torch.nn.Linear(3, 1)
model = DDP(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
for epoch in range(5):
    sampler.set_epoch(epoch)
    for a, b in loader:
        optimizer.zero_grad()
        ((model(a) - b) ** 2).mean().backward()
        optimizer.step()
    time.sleep(0.4)
    with torch.no_grad():
        loss = ((model.module(x) - x.sum(1, keepdim=True)) ** 2).mean()
    if dist.get_rank() == 0:
        print(f"epoch {epoch} loss={loss:.8f}", flush=True)
dist.destroy_process_group()
"""

ACCELERATE = """
import time
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed

accelerator = Accelerator(cpu=True)
set_seed(0)
x = torch.randn(64, 3)
data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
loader = torch.utils.data.DataLoader(data, batch_size=16, shuffle=True)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
best = 1e9
for epoch in range(5):
    model.train()
    for a, b in loader:
        loss = ((model(a) - b) ** 2).mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    scheduler.step()
    time.sleep(0.4)
    best = min(best, loss.item())
    accelerator.print(f"epoch {epoch}: loss={loss.item():.8f} best={best:.8f}", flush=True)
"""

TRAINER = """
import time
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(3, 1)

    def forward(self, x, labels):
        return {"loss": ((self.inner(x) - labels) ** 2).mean(), "logits": self.inner(x)}

class Slow(TrainerCallback):
    def on_epoch_end(self, args, state, control, **kwargs):
        time.sleep(0.4)

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, at):
        x = torch.tensor([at / 32, at % 3, 1.0])
        return {"x": x, "labels": x.sum()[None]}

torch.manual_seed(0)
args = TrainingArguments(
    output_dir="out", num_train_epochs=5, per_device_train_batch_size=8, eval_strategy="epoch", save_strategy="no",
    report_to=[], use_cpu=True, disable_tqdm=True, learning_rate=0.05, logging_strategy="no",
)
trainer = Trainer(model=Model(), args=args, train_dataset=Data(), eval_dataset=Data(), callbacks=[Slow()])
trainer.train()
"""

LIGHTNING = """
import time
import torch
import lightning as L

class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(3, 1)

    def training_step(self, batch, number):
        return ((self.inner(batch[0]) - batch[1]) ** 2).mean()

    def validation_step(self, batch, number):
        self.loss = ((self.inner(batch[0]) - batch[1]) ** 2).mean()

    def on_validation_epoch_end(self):
        if not self.trainer.sanity_checking:
            time.sleep(0.4)
            print(f"epoch {self.current_epoch} loss={self.loss:.8f}", flush=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.05)

L.seed_everything(0)
x = torch.randn(64, 3)
data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
train, val = torch.utils.data.DataLoader(data, batch_size=16), torch.utils.data.DataLoader(data, batch_size=64)
trainer = L.Trainer(
    max_epochs=5, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Model(), train, val)
"""

SCRIPTS = {
    "torch": TORCH,
    "module level": MODULE_LEVEL,
    "class": CLASS,
    "gan": GAN,
    "steps": STEPS,
    "sklearn": SKLEARN,
    "ddp": DDP,
    "accelerate": ACCELERATE,
    "trainer": TRAINER,
    "lightning": LIGHTNING,
}
_METRIC = re.compile(r"(loss|accuracy|'eval_loss')(=|: )[^ ,]+.*")
_TIMES = re.compile(r", 'eval_(runtime|samples_per_second|steps_per_second)': [^,}]*")


def started(
    folder: Path, script: str, checkpoint: Path | None, rank: int = 0, size: int = 1, port: int = 0
) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if name != "RUBBERBAND_CHECKPOINT"}
    environment["OMP_NUM_THREADS"] = "1"
    if "init_process_group" in (folder / script).read_text():
        environment |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank)}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port or free_port())}
    if checkpoint is not None:
        checkpoint.mkdir(exist_ok=True)
        environment["RUBBERBAND_CHECKPOINT"] = str(checkpoint)
    pipe, words = subprocess.PIPE, [sys.executable, "-u", script]
    return subprocess.Popen(words, cwd=folder, env=environment, stdout=pipe, stderr=pipe, text=True)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def lines_of(program: subprocess.Popen[str]) -> list[str]:
    """Wait for the end of a program; return its lines with the metric."""
    output, errors = program.communicate()
    assert program.returncode == 0, errors
    return metric_lines(output)


def metric_lines(output: str) -> list[str]:
    found = (_METRIC.search(line) for line in output.splitlines())
    return [_TIMES.sub("", each.group(0)) for each in found if each]


def killed_after(program: subprocess.Popen[str], lines: int, more_s: float) -> None:
    """Kill a program a moment after a number of lines with the metric."""
    assert program.stdout is not None
    seen = 0
    for line in program.stdout:
        seen += bool(metric_lines(line))
        if seen == lines:
            break
    time.sleep(more_s)
    program.kill()
    program.communicate()


def patched(folder: Path, text: str) -> str:
    """Write a script and its patched copy; return the name of that."""
    (folder / "train.py").write_text(text)
    patch = patch_of(str(folder / "train.py"))
    assert patch.before == text
    patch.copy.write_text(patch.after)
    return patch.copy.name


def require_that_it_resumes(folder: Path, text: str) -> None:
    copy = patched(folder, text)
    alone, whole = lines_of(started(folder, "train.py", None)), lines_of(started(folder, copy, None))
    assert len(alone) >= 5
    assert whole == alone, "without RUBBERBAND_CHECKPOINT it is the script that it was"
    killed_after(started(folder, copy, folder / "saved"), 2, 0.15)
    rest = lines_of(started(folder, copy, folder / "saved"))
    assert rest in (alone[2:], alone[1:]), (alone, rest)


def test_a_loop_in_numpy_resumes_exactly(tmp_path: Path) -> None:
    require_that_it_resumes(tmp_path, NUMPY)


@pytest.mark.long
@pytest.mark.parametrize("kind", SCRIPTS)
def test_each_kind_resumes_exactly(kind: str, tmp_path: Path) -> None:
    require_that_it_resumes(tmp_path, SCRIPTS[kind])


@pytest.mark.long
def test_a_gang_of_two_resumes_from_the_files_of_its_first_worker(tmp_path: Path) -> None:
    copy, port = patched(tmp_path, DDP), free_port()
    gang = [started(tmp_path, copy, tmp_path / f"saved-{rank}", rank, 2, port) for rank in range(2)]
    killed_after(gang[0], 2, 0.0)
    gang[1].kill()
    gang[1].communicate()
    assert not any((tmp_path / "saved-1").iterdir())
    shutil.copytree(tmp_path / "saved-0", tmp_path / "saved-1", dirs_exist_ok=True)
    port = free_port()
    gang = [started(tmp_path, copy, tmp_path / f"saved-{rank}", rank, 2, port) for rank in range(2)]
    rest, _ = [lines_of(each) for each in gang]
    port = free_port()
    alone = [started(tmp_path, "train.py", None, rank, 2, port) for rank in range(2)]
    assert rest == lines_of(alone[0])[2:]
    alone[1].communicate()


def test_a_refusal_says_why_and_shows_the_lines_to_write(tmp_path: Path) -> None:
    def refused(text: str, name: str = "train.py") -> str:
        (tmp_path / name).write_text(text)
        with pytest.raises(InputError) as caught:
            patch_of(str(tmp_path / name))
        return str(caught.value)

    assert "no loop over epochs is recognised" in refused("import sys\nprint(sys.argv)\n")
    assert "it starts train.py: rubberband init --patch train.py" in refused("#!/bin/sh\npython train.py\n", "run.sh")
    assert "cannot be parsed (line 1" in refused("print 'loss'\n")
    assert "already" in refused("import os\nos.environ['RUBBERBAND_CHECKPOINT']\n")
    assert "BackupAndRestore" in refused("import keras\nmodel = keras.Sequential()\nmodel.fit(1)\n")
    (tmp_path / "latin.py").write_bytes(b"# \xe9\n")
    with pytest.raises(InputError, match="cannot be read"):
        patch_of(str(tmp_path / "latin.py"))


def test_the_command_prints_a_diff_that_applies_and_overwrites_nothing(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(NUMPY)
    (tmp_path / "none.py").write_text("print(1)\n")

    def init(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "rubberband.cli", "init", "--patch", *words]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)

    shown, written, again, none = (
        init("train.py"),
        init("train.py", "--apply"),
        init("train.py", "--apply"),
        init("none.py"),
    )
    assert (shown.returncode, written.returncode) == (0, 0)
    assert shown.stdout.startswith("--- train.py\n+++ train.py\n")
    assert "rubberband init --patch train.py --apply" in shown.stderr
    assert (tmp_path / "train.py").read_text() == NUMPY
    assert (tmp_path / "train_resumable.py").read_text() == patch_of(str(tmp_path / "train.py")).after
    assert again.returncode == 2
    assert "is not overwritten" in again.stderr
    assert none.returncode == 2
    assert 'os.environ.get("RUBBERBAND_CHECKPOINT")' in none.stdout


PROGRAMS = ROOT / "tests" / "programs"


@pytest.mark.parametrize(
    ("script", "saved"),
    [
        ("argparse_mnist/main.py", {"epoch", "model", "optimizer", "scheduler", "random"}),
        ("gan_dcgan/main.py", {"epoch", "netG", "netD", "optimizerD", "optimizerG", "random"}),
        ("argparse_words/main.py", {"epoch", "embed", "head", "best_val_loss", "lr", "random"}),
        ("configurator_gpt/train.py", {"model", "optimizer", "iter_num", "best_val_loss", "random"}),
        ("rl_reinforce/reinforce.py", {"epoch", "rng", "theta", "running_reward"}),
        ("ddp_elastic/main.py", {"epoch", "model", "optimizer", "best_acc1", "state", "random"}),
        ("click_group/main.py", {"epoch", "rng", "w", "best"}),
    ],
)
def test_the_lines_save_all_that_an_epoch_hands_on(script: str, saved: set[str]) -> None:
    patch = patch_of(str(PROGRAMS / script))
    (line,) = [line for line in patch.diff.splitlines() if ".save({" in line or ".dump({" in line]
    assert set(re.findall(r'"(\w+)": ', line)) == saved
    restored = set(re.findall(r'saved(?:\["|\.get\(")(\w+)"', patch.diff))
    assert restored == saved


def test_options_of_a_trainer_that_saves_by_itself_are_named() -> None:
    with pytest.raises(InputError, match=r"resume: --ckpt_path=\$\{checkpoint\}/last.ckpt"):
        patch_of(str(PROGRAMS / "lightning_cli" / "main.py"))
    kept = patch_of(str(PROGRAMS / "hf_glue" / "run_points.py")).diff
    assert "if folder else training_args.resume_from_checkpoint or last_checkpoint)" in kept
