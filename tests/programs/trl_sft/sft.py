"""A script of the TRL kind: TrlParser, the Trainer's own log (a dict a line), no evaluation unless it is asked."""

import time
from dataclasses import dataclass, field

import torch
from transformers import PretrainedConfig, PreTrainedModel, Trainer, TrainingArguments
from trl import TrlParser


@dataclass
class ScriptArguments:
    dataset_name: str = field(default="points", metadata={"help": "Dataset name."})
    dataset_train_split: str = field(default="train", metadata={"help": "Dataset split to use for training."})


@dataclass
class ModelConfig:
    lora_r: int = field(default=8, metadata={"help": "Rank of the adapter"})
    lora_dropout: float = field(default=0.05, metadata={"help": "Dropout of the adapter"})


class Adapter(PreTrainedModel):
    config_class = PretrainedConfig

    def __init__(self, config, model_args):
        super().__init__(config)
        self.down, self.up = torch.nn.Linear(8, model_args.lora_r), torch.nn.Linear(model_args.lora_r, 8)
        self.dropout = torch.nn.Dropout(model_args.lora_dropout)
        self.post_init()

    def forward(self, x, labels=None):
        output = x + self.up(self.dropout(self.down(x)))
        time.sleep(0.02)
        return {"loss": torch.nn.functional.mse_loss(output, labels), "logits": output}


def points(number, seed):
    x = torch.randn(number, 8, generator=torch.Generator().manual_seed(seed))
    return [{"x": row, "labels": row.roll(1)} for row in x]


def main(script_args, training_args, model_args):
    torch.manual_seed(training_args.seed)
    evaluates = training_args.eval_strategy != "no"
    trainer = Trainer(
        Adapter(PretrainedConfig(), model_args),
        training_args,
        train_dataset=points(128, 0),
        eval_dataset=points(64, 1) if evaluates else None,
    )
    trainer.train()
    trainer.save_model(training_args.output_dir)


if __name__ == "__main__":
    parser = TrlParser((ScriptArguments, TrainingArguments, ModelConfig))
    main(*parser.parse_args_and_config())
