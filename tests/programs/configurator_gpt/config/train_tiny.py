# a tiny model, which is evaluated often
eval_interval = 20
log_interval = 10
batch_size = 16
n_embd = 8
learning_rate = 1e-2
max_iters = 100
