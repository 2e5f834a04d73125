"""Batches chosen by goodput: a feature of the training loop (`adaptation.make_batching`).

`adaptation` (the batches of one worker), `agent` (which batch comes next), `noise_scale` and `gradient_noise` (phi,
observed in the gradients), `lr_scaling` (the learning rate for a batch).
"""
