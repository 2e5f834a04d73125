"""A `Trainer` of Hugging Face with early stopping, searched on one to two workers per trial; it takes two minutes.

    python examples/hf.py

`train` is the script as it was, but for the five lines that are marked. The model and the data are small and made here.
"""

from __future__ import annotations

import torch
from transformers import BertConfig, BertForSequenceClassification, EarlyStoppingCallback, Trainer, TrainingArguments

import rubberband
from rubberband.integrations.transformers import fit  # 1

EPOCHS = 9
tokens = torch.randint(0, 100, (320, 12), generator=torch.Generator().manual_seed(0))
samples = [{"input_ids": each, "labels": int((each > 50).sum() > 6)} for each in tokens]
bert = BertConfig(
    vocab_size=100,
    hidden_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    intermediate_size=64,
    hidden_dropout_prob=0.0,  # so that a trial learns the same on any number of workers, up to rounding
    attention_probs_dropout_prob=0.0,
)


@rubberband.distributed  # 2
def train(config: dict[str, float]) -> None:  # 3: it was `def main():`
    trainer = Trainer(
        model=BertForSequenceClassification(bert),
        args=TrainingArguments(
            output_dir="bert",
            learning_rate=config["lr"],
            weight_decay=config["weight_decay"],
            per_device_train_batch_size=rubberband.per_worker(32),  # 4
            num_train_epochs=EPOCHS,
            eval_strategy="epoch",
            metric_for_best_model="eval_loss",
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=samples[:256],
        eval_dataset=samples[256:],
        compute_metrics=lambda found: {"accuracy": float((found.predictions.argmax(1) == found.label_ids).mean())},
        callbacks=[EarlyStoppingCallback(early_stopping_patience=3)],
    )
    fit(trainer)  # 5: it was trainer.train()


def search() -> rubberband.Result:
    """Search for a learning rate and a weight decay, with all that a trial may get on this machine."""
    return rubberband.tune(
        train,
        search={
            "space": {"lr": rubberband.loguniform(1e-4, 1e-1), "weight_decay": rubberband.choice([0.0, 0.01])},
            "scheduler": {"type": "sha", "num_samples": 4, "grace_period": 1, "max_t": EPOCHS, "reduction_factor": 3},
            "metric": "eval_loss",
            "mode": "min",
        },
        constraints={"deadline": "15m"},
        resources={
            "provider": "local",
            "gpus_per_instance": 2,
            "max_instances": 1,
            "gpus_per_trial": {"min": 1, "max": 2},
            "price_per_hour": 3.06,
        },
    )


if __name__ == "__main__":
    result = search()
    print(result.best_config)
