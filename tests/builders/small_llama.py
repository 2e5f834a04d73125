"""A small Llama, its tokenizer and a dataset of sentences, made on the spot: nothing is downloaded."""

from __future__ import annotations

import json
import random
from pathlib import Path


def make_model(folder: Path) -> None:
    """Write `model` and `data` (train and test) into a folder.

    An epoch takes about two seconds: a part of 32 of a training is far longer than the tenth of a second below which
    it is not known to which iteration a save belongs.
    """
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    drawn = random.Random(0)
    parts = ("Ann", "Bob", "Cy", "Di"), ("sees", "likes", "meets", "finds"), ("a cat", "a dog", "the sea", "a tree")
    rows = [" ".join(map(drawn.choice, parts)) + "." for _ in range(1056)]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    tokenizer.train_from_iterator(rows, trainers.BpeTrainer(vocab_size=300, special_tokens=["<pad>", "<eos>"]))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
    fast.save_pretrained(folder / "model")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(fast),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=1,
    )
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    (folder / "data").mkdir()
    for name, part in (("train", rows[:1024]), ("test", rows[1024:])):
        lines = "".join(json.dumps({"text": row}) + "\n" for row in part)
        (folder / "data" / f"{name}.jsonl").write_text(lines)
