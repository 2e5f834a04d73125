"""An autoencoder of points: it parses its options at the top, a constant learning rate, and pictures."""

import argparse
import time
from pathlib import Path

import torch
from torch import nn, optim

parser = argparse.ArgumentParser(description="VAE of points")
parser.add_argument("--batch-size", type=int, default=128, metavar="N", help="input batch size (default: 128)")
parser.add_argument("--epochs", type=int, default=10, metavar="N", help="number of epochs to train (default: 10)")
parser.add_argument("--no-cuda", action="store_true", default=False, help="disables CUDA training")
parser.add_argument("--seed", type=int, default=1, metavar="S", help="random seed (default: 1)")
parser.add_argument("--log-interval", type=int, default=10, metavar="N", help="batches between two lines")
args = parser.parse_args()
args.cuda = not args.no_cuda and torch.cuda.is_available()
torch.manual_seed(args.seed)


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(12, 2 * 3), nn.Linear(3, 12)

    def forward(self, x):
        mu, logvar = self.encoder(x).chunk(2, dim=1)
        return self.decoder(mu + torch.randn_like(mu) * (0.5 * logvar).exp()), mu, logvar


def loss_function(recon, x, mu, logvar):
    return ((recon - x) ** 2).sum() - 0.5 * (1 + logvar - mu**2 - logvar.exp()).sum()


def train(epoch):
    model.train()
    train_loss = 0.0
    for batch_idx, batch in enumerate(train_x[torch.randperm(len(train_x))].split(args.batch_size)):
        optimizer.zero_grad()
        loss = loss_function(*[(out := model(batch))[0], batch, *out[1:]])
        loss.backward()
        train_loss += loss.item()
        optimizer.step()
        if batch_idx % args.log_interval == 0:
            at = batch_idx * len(batch)
            share = 100.0 * at / len(train_x)
            print(f"Train Epoch: {epoch} [{at}/{len(train_x)} ({share:.0f}%)]\tLoss: {loss.item() / len(batch):.6f}")
    print(f"====> Epoch: {epoch} Average loss: {train_loss / len(train_x):.4f}")


def test(epoch):
    model.eval()
    with torch.no_grad():
        recon, mu, logvar = model(test_x)
        test_loss = loss_function(recon, test_x, mu, logvar).item() / len(test_x)
    Path("results").mkdir(exist_ok=True)
    torch.save(recon[:8], f"results/reconstruction_{epoch}.pt")
    print(f"====> Test set loss: {test_loss:.4f}")


mix = torch.randn(3, 12, generator=torch.Generator().manual_seed(0))
train_x = torch.randn(2560, 3, generator=torch.Generator().manual_seed(1)) @ mix
test_x = torch.randn(400, 3, generator=torch.Generator().manual_seed(2)) @ mix
model = VAE()
optimizer = optim.Adam(model.parameters(), lr=1e-3)

if __name__ == "__main__":
    for epoch in range(1, args.epochs + 1):
        time.sleep(0.15)
        train(epoch)
        test(epoch)
