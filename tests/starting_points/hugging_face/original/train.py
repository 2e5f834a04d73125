"""Fine-tune a small classifier: torchrun --standalone --nproc-per-node 2 train.py --learning_rate 1e-3."""

import argparse

import numpy as np
import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    EarlyStoppingCallback,
    Trainer,
    TrainingArguments,
    set_seed,
)


def load_data():
    tokens = torch.randint(0, 100, (320, 12), generator=torch.Generator().manual_seed(0))
    samples = [{"input_ids": each, "labels": int((each > 50).sum() > 6)} for each in tokens]
    return samples[:256], samples[256:]


def compute_metrics(eval_pred):
    logits, labels = eval_pred
    return {"accuracy": float((np.argmax(logits, axis=-1) == labels).mean())}


def train(config):
    set_seed(42)
    train_dataset, eval_dataset = load_data()
    model = BertForSequenceClassification(
        BertConfig(
            vocab_size=100,
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=32,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )
    args = TrainingArguments(
        output_dir="out",
        learning_rate=config["learning_rate"],
        weight_decay=config["weight_decay"],
        per_device_train_batch_size=config["batch_size"],
        per_device_eval_batch_size=32,
        num_train_epochs=7,
        eval_strategy="epoch",
        save_strategy="epoch",
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
        greater_is_better=False,
        report_to="none",
    )
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        compute_metrics=compute_metrics,
        callbacks=[EarlyStoppingCallback(early_stopping_patience=3)],
    )
    trainer.train()
    if trainer.is_world_process_zero():
        print("eval_losses", [log["eval_loss"] for log in trainer.state.log_history if "eval_loss" in log])


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--learning_rate", type=float, default=1e-3)
    parser.add_argument("--weight_decay", type=float, default=0.01)
    parser.add_argument("--batch_size", type=int, default=16, help="of each device")
    train(vars(parser.parse_args()))
