"""Entry points: found, sent to workers, and refused in one clear line."""

import os
import pickle
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from rubberband.errors import EntrypointError
from rubberband.executor import Entrypoint
from rubberband.executor.training.trial import Trial

ROOT = Path(__file__).parents[2]

MODULE = """
import rubberband

class Fine(rubberband.Trial):
    def iterate(self): return {"loss": 1.0}
    def save(self): return None
    def load(self, state): pass

class Half(rubberband.TorchTrial):
    def build_model(self, config): pass

class Whole(rubberband.TorchTrial):
    def build_model(self, config): pass
    def build_optimizer(self, config, model): pass
    def train_dataset(self, config): pass
    def loss(self, model, batch): pass

class Picky(Fine):
    def __init__(self, lr): pass

class Other: pass

class Space:
    Inner = Fine

def train(config): pass
def no_config(): pass
number = 3
"""


@pytest.fixture
def parse(tmp_path, monkeypatch):
    name = f"trials_{os.getpid()}_{abs(hash(tmp_path))}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return lambda attribute: Entrypoint.parse(f"{name}:{attribute}", [tmp_path])


@pytest.mark.parametrize("attribute", ["Fine", "train", "Space.Inner"])
def test_a_trial_loads_by_name(parse, attribute):
    entrypoint = parse(attribute)
    entrypoint.check(1)
    assert pickle.loads(pickle.dumps(entrypoint)).load().__name__ == attribute.rpartition(".")[2].replace(
        "Inner", "Fine"
    )


@pytest.mark.parametrize("text", ["examples.digits", "a:", ":b", "a-b:c", "a:b:c", "examples/digits.py:Trial", ""])
def test_an_entry_point_without_module_and_attribute_is_refused(text):
    with pytest.raises(EntrypointError, match="is not module:attribute"):
        Entrypoint.parse(text)


@pytest.mark.parametrize(
    ("attribute", "message"),
    [
        ("Fina", "has no 'Fina'; did you mean 'Fine'"),
        ("number", "of type int; a trial is a subclass of rubberband.TorchTrial"),
        ("Other", "a class of another kind; a trial is"),
        ("Half", r"lacks build_optimizer\(\), loss\(\), train_dataset\(\)"),
        ("Picky", "must be made without arguments"),
        ("no_config", "is not a function of one argument"),
    ],
)
def test_an_invalid_trial_is_refused_in_one_line(parse, attribute, message):
    with pytest.raises(EntrypointError, match=message) as caught:
        parse(attribute).check(1)
    assert "\n" not in str(caught.value)


def test_a_function_trains_on_one_gpu_only(parse):
    with pytest.raises(EntrypointError, match=r"gpus_per_trial\.max is 2; set it to 1"):
        parse("train").check(2)


@pytest.mark.parametrize(
    ("word", "key"), [("adaptive", "batch.policy: goodput"), ("asynchronous", "training.mode: async")]
)
@pytest.mark.parametrize(("attribute", "kind"), [("train", "function"), ("Fine", "Trial")])
def test_only_the_loop_of_a_torch_trial_can_be_changed(parse, attribute, kind, word, key):
    with pytest.raises(EntrypointError, match=f"is a {kind}, .*leave out {key}, or write a rubberband.TorchTrial"):
        parse(attribute).check(1, **{word: True})
    parse("Whole").check(8, **{word: True})


@pytest.mark.parametrize(("name", "method"), [("Quasi", "step"), ("Weighed", "on_step")])
def test_a_trial_with_a_step_of_its_own_is_not_trained_asynchronously(name, method):
    entrypoint = Entrypoint.parse(f"tests.builders.trials.segment_trials:{name}", (os.getcwd(),))
    with pytest.raises(EntrypointError, match=rf"overrides {method}\(\), .*, or set training.mode to sync"):
        entrypoint.check(1, asynchronous=True)


@pytest.mark.parametrize(
    ("word", "fix"), [("adaptive", "set batch.policy to fixed"), ("asynchronous", "set training.mode to sync")]
)
def test_a_divided_model_has_fixed_batches_and_no_servers(word: str, fix: str) -> None:
    entrypoint = Entrypoint.parse("tests.builders.trials.sharded_trials:Divided", (os.getcwd(),))
    with pytest.raises(EntrypointError, match=rf'has sharding = "fsdp", which does not go with .*; {fix}'):
        entrypoint.check(8, **{word: True})
    entrypoint.check(8)


def test_a_missing_module_names_the_folders(tmp_path):
    with pytest.raises(EntrypointError, match=f"no module 'nowhere_at_all' in {tmp_path}"):
        Entrypoint.parse("nowhere_at_all.digits:Trial", [tmp_path]).load()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("import nowhere_at_all", "ModuleNotFoundError: No module named 'nowhere_at_all'"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("def f(:", "SyntaxError"),
        ("raise SystemExit(2)", "SystemExit: 2"),
    ],
)
def test_a_module_that_does_not_import_shows_its_error(tmp_path, monkeypatch, body, message):
    monkeypatch.setattr(sys, "path", list(sys.path))
    name = f"broken_{abs(hash(tmp_path))}"
    (tmp_path / f"{name}.py").write_text(body)
    with pytest.raises(EntrypointError, match=f"cannot be imported: {message}") as caught:
        Entrypoint.parse(f"{name}:Trial", [tmp_path]).load()
    assert "\n" not in str(caught.value)


def test_a_local_class_goes_by_value():
    class Local(Trial):
        def iterate(self):
            return {"answer": 42.0}

        def save(self):
            return None

        def load(self, state):
            pass

    loaded = pickle.loads(pickle.dumps(Entrypoint.from_object(Local))).load()
    assert loaded().iterate() == {"answer": 42.0}


def test_a_function_that_goes_by_value_takes_the_folder_of_its_module_along():
    """What it refers to by name is imported from there."""

    def train(config):
        Trial()

    root = str(Path(__file__).resolve().parents[2])
    assert Entrypoint.from_object(train).search_path[0] == root


def test_data_that_is_too_large_to_be_sent_by_value_is_refused():
    data = os.urandom(51_000_000)
    with pytest.raises(EntrypointError, match=r"takes 51 MB of data with it to the workers, more than 50; load the da"):
        Entrypoint.from_object(lambda config: data)


@pytest.mark.parametrize("where", ["script", "module"])
def test_objects_of_a_script_and_of_its_modules_reach_another_process(tmp_path, where):
    (tmp_path / "mine.py").write_text("def train(config): return config['x'] + 1\n")
    define = (
        "from mine import train" if where == "module" else "import mine\ndef train(config): return mine.train(config)"
    )
    script = f"""
        import pickle, sys
        from rubberband.executor.training.entrypoint import Entrypoint
        {define.replace(chr(10), chr(10) + "        ")}
        sys.stdout.buffer.write(pickle.dumps(Entrypoint.from_object(train)))
    """
    (tmp_path / "script.py").write_text(textwrap.dedent(script))
    worker = "import pickle, sys; print(pickle.load(sys.stdin.buffer).load()({'x': 1}))"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    sent = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, env=environment, capture_output=True, check=True)
    got = subprocess.run(
        [sys.executable, "-c", worker], input=sent.stdout, env=environment, capture_output=True, check=True
    )
    assert got.stdout.strip() == b"2"


def test_modules_beside_the_script_are_found_after_others_have_changed_the_path(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import sys\n"
        "from rubberband.executor.training.entrypoint import Entrypoint\n"
        "def train(config): pass\n"
        "sys.path.insert(0, '/elsewhere')  # as Ray does when it is imported\n"
        "print(*Entrypoint.from_object(train).search_path)\n",
        encoding="utf-8",
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True, cwd="/")
    assert done.stdout.split() == [str(tmp_path)]
