"""The folder of a model that a search found: its card, its configuration, and an adapter merged into its base."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from rubberband.errors import InputError
from rubberband.executor.result.adapters import merge
from rubberband.executor.result.model_card import CARD, CONFIGURATION, write_card
from rubberband.executor.result.result import Result
from tests.builders.results import a_result

TEMPLATE = "---\nbase_model: base\ntags:\n- lora\n---\n\n# Model Card for Model ID\n\n[More Information Needed]\n"


FETCHED = {"datasets/own/stories@main": "4e20de362430cd3b72f300e6b0f18e50e7166e08"}


def card_in(folder: Path) -> str:
    result = replace(a_result(), fetched=FETCHED)
    write_card(result, replace(result.trials[3], configuration={"lr": 3e-4, "use": "a|b"}), folder)
    return (folder / CARD).read_text()


def test_a_model_has_a_card_with_its_search_and_keeps_its_front_matter(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / CARD).write_text(TEMPLATE)
    text = card_in(tmp_path)
    result = a_result()
    assert text.startswith("---\nbase_model: base\ntags:\n- lora\n---\n\n# digits, trial 3\n")
    assert "More Information Needed" not in text
    assert f"The best of {len(result.trials)} trials" in text
    assert "| lr | 0.0003 |" in text
    assert "| use | a\\|b |" in text, "a bar ends no cell"
    assert "(higher is better)" in text
    ((name, commit),) = FETCHED.items()
    assert f"\n* **From the hub**: {name}, commit `{commit}`.\n" in text
    assert f"score {result.trials[3].metrics['score']:.6g}" in text
    assert yaml.safe_load((tmp_path / CONFIGURATION).read_text()) == {"lr": 3e-4, "use": "a|b"}
    assert card_in(tmp_path) == text, "written twice, it is the same"


@pytest.mark.parametrize("is_charged", [True, False])
def test_a_card_has_the_whole_cost_and_whether_it_was_charged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_charged: bool
) -> None:
    monkeypatch.setattr(Result, "is_charged", is_charged)
    (tmp_path / "config.json").write_text("{}")
    result = replace(a_result(), actual_cost_usd=30.0, profiling_cost_usd=4.0)
    write_card(result, result.trials[0], tmp_path)
    text = (tmp_path / CARD).read_text()
    assert "34.00" in text
    assert ("nothing was charged" in text) != is_charged


def test_a_folder_without_a_model_gets_no_card(tmp_path: Path) -> None:
    write_card(a_result(), a_result().trials[0], tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def adapter(tmp_path: Path) -> tuple[Path, Any]:
    """A folder with an adapter of a base model in another folder, and the outputs of both together."""
    peft = pytest.importorskip("peft", reason="pip install 'rubberband-tune[finetune]'")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    base = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=20, **shape))
    base.save_pretrained(tmp_path / "base")
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    words = {"r": 4, "target_modules": "all-linear", "init_lora_weights": False, "task_type": "CAUSAL_LM"}
    model = peft.get_peft_model(base, peft.LoraConfig(**words)).eval()
    model.save_pretrained(tmp_path / "adapter")
    with torch.no_grad():
        return tmp_path / "adapter", model(torch.arange(8)[None]).logits


def test_an_adapter_is_merged_into_its_base(adapter: tuple[Path, Any]) -> None:
    folder, expected = adapter
    (folder / CARD).write_text("kept")
    merge(folder)
    import transformers

    files = {file.name for file in folder.iterdir()}
    assert {"config.json", "model.safetensors", CARD} <= files
    assert not [name for name in files if name.startswith("adapter_")]
    merged = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        torch.testing.assert_close(merged(torch.arange(8)[None]).logits, expected)


@pytest.mark.parametrize(
    ("base", "line"),
    [("", "was made in code and has no name; merge it there"), ("/nowhere/base", "cannot be merged: ")],
)
def test_an_adapter_without_its_base_is_kept_and_the_error_is_one_line(
    adapter: tuple[Path, Any], base: str, line: str
) -> None:
    folder, _ = adapter
    config = folder / "adapter_config.json"
    words = yaml.safe_load(config.read_text()) | {"base_model_name_or_path": base}
    config.write_text(json.dumps(words))
    with pytest.raises(InputError, match=line) as refused:
        merge(folder)
    assert "\n" not in str(refused.value)
    assert (folder / "adapter_model.safetensors").exists()


def test_an_adapter_of_other_embeddings_than_its_base_is_kept_and_the_error_is_one_line(
    adapter: tuple[Path, Any],
) -> None:
    folder, _ = adapter
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(folder.parent / "base")
    base.resize_token_embeddings(24)
    base.save_pretrained(folder.parent / "base")
    file = folder / "adapter_model.safetensors"
    from safetensors.torch import load_file, save_file

    key = "base_model.model.model.embed_tokens.weight"
    save_file({**load_file(file), key: torch.zeros(22, 16)}, file)
    with pytest.raises(InputError, match=r"the adapter has 22 rows where .*base has 24, as after resize") as refused:
        merge(folder)
    assert "\n" not in str(refused.value)
    assert file.exists()


@pytest.mark.parametrize("step", ["merge_and_unload", "save_pretrained"])
def test_an_adapter_is_kept_until_the_merged_model_is_written(
    adapter: tuple[Path, Any], step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import peft
    import transformers

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    owner = peft.PeftModel if step == "merge_and_unload" else transformers.LlamaForCausalLM
    monkeypatch.setattr(owner, step, fail, raising=False)
    with pytest.raises((InputError, OSError), match="No space left"):
        merge(adapter[0])
    assert (adapter[0] / "adapter_model.safetensors").exists()
    assert (adapter[0] / "adapter_config.json").exists()


def test_a_tokenizer_beside_the_adapter_stays_and_else_that_of_the_base_is_added(adapter: tuple[Path, Any]) -> None:
    import tokenizers
    import transformers

    folder, _ = adapter
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "?": 1}, unk_token="?"))
    for where, end in ((folder.parent / "base", "a"), (folder, "?")):
        transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token=end).save_pretrained(where)
    merge(folder)
    assert json.loads((folder / "tokenizer_config.json").read_text())["eos_token"] == "?"


def test_a_folder_without_an_adapter_is_not_merged(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="only an adapter of PEFT is merged"):
        merge(tmp_path)
