"""Stand-ins for Axolotl and LLaMA-Factory, written from their sources: how they read, print, save and resume."""

from __future__ import annotations

from pathlib import Path

import yaml

STAND_IN = '''
"""Trains nothing, and reads, saves, resumes and prints as {name} does: the Trainer saves after its line."""
import ast, json, pathlib, sys, time
import yaml
args = yaml.safe_load(pathlib.Path(sys.argv[1]).read_text())
for word in sys.argv[2:]:
    key, _, value = word.partition("=")
    assert key.startswith("--") == {dashed}, word
    args[key.removeprefix("--")] = yaml.safe_load(value)
assert args["save_steps"] == args["eval_steps"] == 0.03125, args
step, x, out = 0, 4.0, pathlib.Path(args["output_dir"])
if "resume_from_checkpoint" in args:
    step, x = json.loads(pathlib.Path(args["resume_from_checkpoint"], "state.json").read_text())
lr, rank = float(args["learning_rate"]), int(args["{rank}"])
def evaluate():
    print({{"eval_loss": f"{{x:.4g}}", "eval_runtime": "0.01", "epoch": f"{{step * 3 / 64:.4g}}"}}, flush=True)
if {on_start}:
    evaluate()
while step < 64:
    step, x = step + 1, x - 100 * lr * x / rank
    time.sleep(0.06)
    if step % 2 == 0:
        evaluate()
        time.sleep(0.02)
        folder = out / f"checkpoint-{{step}}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "state.json").write_text(json.dumps([step, x]))
        time.sleep(0.2)  # as long as a machine may need between two files
        (folder / "trainer_state.json").write_text("{{}}")
'''


def stand_in(tool: str, folder: Path) -> str:
    """Write a stand-in for a tool, and a config; return the command that trains."""
    is_axolotl = tool == "axolotl"
    module = folder / Path(tool, "cli/train.py" if is_axolotl else "launcher.py")
    module.parent.mkdir(parents=True)
    text = STAND_IN.format(
        name=tool, dashed=is_axolotl, rank="lora_r" if is_axolotl else "lora_rank", on_start=is_axolotl
    )
    module.write_text(text)
    config: dict[str, object] = {"learning_rate": 2e-4, "output_dir": "shared"}
    config |= (
        {"base_model": "m", "adapter": "lora", "val_set_size": 0.1, "num_epochs": 3, "lora_r": 16, "evals_per_epoch": 4}
        if is_axolotl
        else {"model_name_or_path": "m", "stage": "sft", "dataset": "d", "val_size": 0.1, "lora_rank": 16}
    )
    (folder / "cfg.yaml").write_text(yaml.safe_dump(config))
    return "axolotl train cfg.yaml" if is_axolotl else "llamafactory-cli train cfg.yaml"
