"""An agent that is trained until it has solved its task: no epochs, an average over episodes each log interval."""

import argparse
import time
from itertools import count

import numpy as np

parser = argparse.ArgumentParser(description="REINFORCE example")
parser.add_argument("--gamma", type=float, default=0.99, metavar="G", help="discount factor (default: 0.99)")
parser.add_argument("--seed", type=int, default=543, metavar="N", help="random seed (default: 543)")
parser.add_argument("--render", action="store_true", help="render the environment")
parser.add_argument("--log-interval", type=int, default=10, metavar="N", help="episodes between two lines")
args = parser.parse_args()
rng = np.random.default_rng(args.seed)
theta = np.zeros((11, 2))


def main():
    running_reward = -3.0
    for i_episode in count(1):
        place, ep_reward, trace = 5, 0.0, []
        for t in range(1, 200):
            p = 1 / (1 + np.exp(theta[place, 0] - theta[place, 1]))
            action = int(rng.random() < p)
            trace.append((place, action, p))
            place += 1 if action else -1
            reward = 5.0 if place == 10 else -0.1
            ep_reward += reward
            if place in (0, 10):
                break
        running_reward = 0.05 * ep_reward + 0.95 * running_reward
        for back, (state, chosen, p) in enumerate(reversed(trace)):
            theta[state] += 0.05 * args.gamma**back * ep_reward * np.array([p - 1 + (1 - chosen), chosen - p])
        time.sleep(0.02)
        if i_episode % args.log_interval == 0:
            print(f"Episode {i_episode}\tLast reward: {ep_reward:.2f}\tAverage reward: {running_reward:.2f}")
        if running_reward > 4.4:
            print(f"Solved! Running reward is now {running_reward} and the last episode runs to {t} time steps!")
            break


if __name__ == "__main__":
    main()
