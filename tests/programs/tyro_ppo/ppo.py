"""Reinforcement learning in one file with tyro: steps instead of epochs, returns of episodes, a folder a run."""

import os
import random
import time
from dataclasses import dataclass

import numpy as np
import tyro


@dataclass
class Args:
    exp_name: str = os.path.basename(__file__)[: -len(".py")]
    """the name of this experiment"""
    seed: int = 1
    """seed of the experiment"""
    torch_deterministic: bool = True
    """if toggled, cudnn is deterministic"""
    cuda: bool = True
    """if toggled, cuda will be enabled by default"""
    track: bool = False
    """if toggled, this experiment will be tracked with Weights and Biases"""
    env_id: str = "Corridor-v1"
    """the id of the environment"""
    total_timesteps: int = 6000
    """total timesteps of the experiments"""
    learning_rate: float = 0.2
    """the learning rate of the optimizer"""
    num_steps: int = 128
    """the number of steps to run in each policy rollout"""
    anneal_lr: bool = True
    """toggle learning rate annealing"""
    gamma: float = 0.99
    """the discount factor gamma"""
    ent_coef: float = 0.01
    """coefficient of the entropy"""
    target_kl: float | None = None
    """the target KL divergence threshold"""
    num_iterations: int = 0
    """the number of iterations (computed in runtime)"""


if __name__ == "__main__":
    args = tyro.cli(Args)
    args.num_iterations = args.total_timesteps // args.num_steps
    run_name = f"{args.env_id}__{args.exp_name}__{args.seed}__{int(time.time())}"
    os.makedirs(f"runs/{run_name}", exist_ok=True)
    random.seed(args.seed)
    np.random.seed(args.seed)
    theta, place, steps, global_step, start_time = np.zeros((9, 2)), 4, 0, 0, time.time()
    for iteration in range(1, args.num_iterations + 1):
        lr = args.learning_rate * (1.0 - (iteration - 1.0) / args.num_iterations if args.anneal_lr else 1.0)
        trace = []
        for _ in range(args.num_steps):
            global_step += 1
            p = np.exp(theta[place]) / np.exp(theta[place]).sum()
            action = int(np.random.random() < p[1])
            trace.append((place, action, p))
            place, steps = place + (1 if action else -1), steps + 1
            if place in (0, 8):
                episodic_return = (10.0 if place == 8 else 0.0) - 0.1 * steps
                discount = args.gamma**steps * episodic_return
                print(f"global_step={global_step}, episodic_return={episodic_return:.2f}")
                for state, chosen, q in trace:
                    theta[state] += lr * 0.1 * (discount * (np.eye(2)[chosen] - q) - args.ent_coef * theta[state])
                place, steps, trace = 4, 0, []
        time.sleep(0.05)
        print("SPS:", int(global_step / (time.time() - start_time)))
    np.save(f"runs/{run_name}/{args.exp_name}.npy", theta)
