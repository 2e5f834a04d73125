"""A small GAN: required options, `opt`, camelCase names, two losses a line, both networks saved each epoch."""

import argparse
import os
import random
import time

import torch
from torch import nn, optim

parser = argparse.ArgumentParser()
parser.add_argument("--dataset", required=True, help="ring | line")
parser.add_argument("--dataroot", required=False, help="path to dataset")
parser.add_argument("--workers", type=int, help="number of data loading workers", default=2)
parser.add_argument("--batchSize", type=int, default=64, help="input batch size")
parser.add_argument("--imageSize", type=int, default=2, help="the size of a sample")
parser.add_argument("--nz", type=int, default=8, help="size of the latent z vector")
parser.add_argument("--ngf", type=int, default=16)
parser.add_argument("--ndf", type=int, default=16)
parser.add_argument("--niter", type=int, default=25, help="number of epochs to train for")
parser.add_argument("--lr", type=float, default=0.0002, help="learning rate, default=0.0002")
parser.add_argument("--beta1", type=float, default=0.5, help="beta1 for adam. default=0.5")
parser.add_argument("--cuda", action="store_true", help="enables cuda")
parser.add_argument("--ngpu", type=int, default=1, help="number of GPUs to use")
parser.add_argument("--netG", default="", help="path to netG (to continue training)")
parser.add_argument("--netD", default="", help="path to netD (to continue training)")
parser.add_argument("--outf", default=".", help="folder to output samples and model checkpoints")
parser.add_argument("--manualSeed", type=int, help="manual seed")
opt = parser.parse_args()
print(opt)
os.makedirs(opt.outf, exist_ok=True)
if opt.manualSeed is None:
    opt.manualSeed = random.randint(1, 10000)
print("Random Seed: ", opt.manualSeed)
random.seed(opt.manualSeed)
torch.manual_seed(opt.manualSeed)

angle = torch.rand(512, generator=torch.Generator().manual_seed(0)) * 6.2832
dataset = torch.stack([angle.cos(), angle.sin() if opt.dataset == "ring" else angle.cos()], dim=1)
netG = nn.Sequential(nn.Linear(opt.nz, opt.ngf), nn.ReLU(True), nn.Linear(opt.ngf, opt.imageSize))
netD = nn.Sequential(nn.Linear(opt.imageSize, opt.ndf), nn.LeakyReLU(0.2), nn.Linear(opt.ndf, 1), nn.Sigmoid())
if opt.netG != "":
    netG.load_state_dict(torch.load(opt.netG))
if opt.netD != "":
    netD.load_state_dict(torch.load(opt.netD))
print(netG, netD)
criterion = nn.BCELoss()
optimizerD = optim.Adam(netD.parameters(), lr=opt.lr, betas=(opt.beta1, 0.999))
optimizerG = optim.Adam(netG.parameters(), lr=opt.lr, betas=(opt.beta1, 0.999))

for epoch in range(opt.niter):
    batches = dataset[torch.randperm(512)].split(opt.batchSize)
    for i, real in enumerate(batches):
        ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
        netD.zero_grad()
        fake = netG(torch.randn(len(real), opt.nz))
        out_real, out_fake = netD(real), netD(fake.detach())
        errD = criterion(out_real, ones) + criterion(out_fake, zeros)
        errD.backward()
        optimizerD.step()
        netG.zero_grad()
        output = netD(fake)
        errG = criterion(output, ones)
        errG.backward()
        optimizerG.step()
        print(
            f"[{epoch}/{opt.niter}][{i}/{len(batches)}] Loss_D: {errD.item():.4f} Loss_G: {errG.item():.4f} "
            f"D(x): {out_real.mean():.4f} D(G(z)): {out_fake.mean():.4f} / {output.mean():.4f}"
        )
    time.sleep(0.15)
    torch.save(netG.state_dict(), f"{opt.outf}/netG_epoch_{epoch}.pth")
    torch.save(netD.state_dict(), f"{opt.outf}/netD_epoch_{epoch}.pth")
