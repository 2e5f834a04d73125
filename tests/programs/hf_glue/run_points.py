"""A script of the Hugging Face kind: three dataclasses, do_train and do_eval, resumes from the last checkpoint."""

import os
import time
from dataclasses import dataclass, field

import torch
from torch.utils.data import Dataset
from transformers import HfArgumentParser, PretrainedConfig, PreTrainedModel, Trainer, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint


@dataclass
class ModelArguments:
    hidden_size: int = field(default=16, metadata={"help": "Width of the model"})
    hidden_dropout: float = field(default=0.0, metadata={"help": "Dropout"})


@dataclass
class DataTrainingArguments:
    task_name: str | None = field(default=None, metadata={"help": "The name of the task"})
    max_train_samples: int | None = field(default=None, metadata={"help": "Truncate the training examples"})


class Points(Dataset):
    def __init__(self, number, seed):
        self.x = torch.randn(number, 6, generator=torch.Generator().manual_seed(seed))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return {"x": self.x[index], "labels": (self.x[index, 0] * self.x[index, 1] > 0).long()}


class Model(PreTrainedModel):
    config_class = PretrainedConfig

    def __init__(self, config, width=16, dropout=0.0):
        super().__init__(config)
        self.net = torch.nn.Sequential(
            torch.nn.Linear(6, width), torch.nn.Tanh(), torch.nn.Dropout(dropout), torch.nn.Linear(width, 2)
        )
        self.post_init()

    def forward(self, x, labels=None):
        logits = self.net(x)
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


def compute_metrics(p):
    time.sleep(0.2)
    return {"accuracy": float((p.predictions.argmax(-1) == p.label_ids).mean())}


def main():
    parser = HfArgumentParser((ModelArguments, DataTrainingArguments, TrainingArguments))
    model_args, data_args, training_args = parser.parse_args_into_dataclasses()
    last_checkpoint = None
    if os.path.isdir(training_args.output_dir) and training_args.do_train:
        last_checkpoint = get_last_checkpoint(training_args.output_dir)
    set_seed(training_args.seed)
    model = Model(PretrainedConfig(), model_args.hidden_size, model_args.hidden_dropout)
    train_dataset = Points(data_args.max_train_samples or 320, 0) if training_args.do_train else None
    eval_dataset = Points(160, 1) if training_args.do_eval else None
    trainer = Trainer(model, training_args, train_dataset=train_dataset, eval_dataset=eval_dataset)
    trainer.compute_metrics = compute_metrics
    if training_args.do_train:
        result = trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint or last_checkpoint)
        trainer.save_model()
        trainer.log_metrics("train", result.metrics)
        trainer.save_state()
    if training_args.do_eval:
        trainer.log_metrics("eval", trainer.evaluate())


if __name__ == "__main__":
    main()
