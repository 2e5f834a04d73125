"""Planted bugs of what people bring: data, files and modules that are read past without a word."""

from __future__ import annotations

from tests.mutation.mutant import Mutant

_DATA = ("tests/unit/test_data_seed.py",)
_LIGHTNING = ("tests/unit/test_lightning.py",)

_FILES = ("tests/unit/test_files.py",)

_SAMPLING = ("tests/unit/test_sampling.py",)

_SESSION = ("tests/unit/test_session.py",)

_HOOKS = ("tests/unit/test_lightning_hooks.py",)

_TRAINER = ("tests/unit/test_transformers.py",)

_REMOVED = ("tests/unit/test_removed.py",)

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        name="training-data-by-the-trial",
        harm="trials train on parts that others are evaluated on",
        file="executor/training/loop.py",
        old="reseed_data(segment.seed, segment.data_seed)",
        new='reseed("setup", segment.seed)',
        tests=_DATA,
    ),
    Mutant(
        name="evaluation-data-by-the-trial",
        harm="each trial is evaluated on a part of its own, and some are stopped by luck",
        file="executor/training/metrics.py",
        old="reseed_data(segment.seed, segment.data_seed)",
        new='reseed("setup", segment.seed)',
        tests=_DATA,
    ),
    Mutant(
        name="old-runs-get-new-data",
        harm="a run of an earlier version is resumed with other data: it has seen what it is evaluated on",
        file="executor/training/sampler.py",
        old="    if data_seed is None:\n        reseed",
        new="    if False:\n        reseed",
        tests=_DATA,
    ),
    Mutant(
        name="lightning-data-by-the-trial",
        harm="the parts of a data module's setup differ from trial to trial",
        file="rubberband/integrations/lightning_data.py",
        old="    if data_seed is None:\n        yield",
        new="    if True:\n        yield",
        tests=_LIGHTNING,
    ),
    Mutant(
        name="data-take-the-random-state",
        harm="weights of a module that holds its data depend on how many random numbers the data take",
        file="rubberband/integrations/lightning_data.py",
        old="            random.setstate(python)\n            np.random.set_state(numpy)",
        new="            pass",
        tests=_LIGHTNING,
    ),
    Mutant(
        name="lone-parenthesis-is-a-text",
        harm="a choice of (3, 3) and (5, 5) trains with four texts",
        file="rubberband/spec/loading.py",
        old='r"[^()]*[()][^()]*"',
        new='r"[^()]*[()][()][^()]*"',
        tests=_FILES,
    ),
    Mutant(
        name="yaml-words-are-texts",
        harm="nesterov: no trains with it, as the text is true; 1_000 is a text",
        file="rubberband/spec/loading.py",
        old='_each.add_implicit_resolver("unclear",',
        new='_each.add_implicit_resolver("tag:yaml.org,2002:str",',
        tests=_FILES,
    ),
    Mutant(
        name="fractions-are-cut-off",
        harm="num_samples: 1.5 trains one trial without a word",
        file="rubberband/units.py",
        old="isinstance(value, float) and value.is_integer()",
        new="isinstance(value, float)",
        tests=_FILES,
    ),
    Mutant(
        name="repeats-without-a-word",
        harm="nine trials over two configurations are paid without a word",
        file="rubberband/planning/prices_and_quotas.py",
        old="            *repeat_notes(started),\n",
        new="",
        tests=_SAMPLING,
    ),
    Mutant(
        name="a-value-twice-is-two",
        harm="a grid that names a value twice is paid twice without a word",
        file="rubberband/spec/samplers.py",
        old="return len({canonical(option) for option in named}) + sum(",
        new="return len(named) + sum(",
        tests=_SAMPLING,
    ),
    Mutant(
        name="sampler-draws-all",
        harm="an estimate says that tpe draws trials that are drawn at random",
        file="rubberband/planning/candidates.py",
        old="for at in range(at_once, num_brackets) if",
        new="for at in range(num_brackets) if",
        tests=_SAMPLING,
    ),
    Mutant(
        name="changed-code-without-a-word",
        harm="results of old and of new code are ranked together after a resume",
        file="executor/run/session.py",
        old="if changed := [os.path.relpath(path) for path in changed_files(spec.code or {})]:",
        new="if changed := []:",
        tests=_SESSION,
    ),
    Mutant(
        name="only-the-first-file-is-noted",
        harm="a helper module that changed is not named at a resume",
        file="executor/training/entrypoint.py",
        old="found[name] = files[str(path.absolute())] = hashlib.sha256(source).hexdigest()",
        new="found[name] = files[str(first.absolute())] = hashlib.sha256(source).hexdigest()",
        tests=_SESSION,
    ),
    Mutant(
        name="new-hooks-are-read-past",
        harm="a hook that a new version of Lightning adds is not called, without a word",
        file="rubberband/integrations/lightning_hooks.py",
        old="for hook in sorted({*REFUSED, *(name for each in kinds for name in hooks_of(each))} - CALLED - OWN):",
        new="for hook in sorted(REFUSED):",
        tests=_HOOKS,
    ),
    Mutant(
        name="patience-begins-anew",
        harm="EarlyStopping forgets at every SYNC how long it has waited, and never ends a trial",
        file="rubberband/integrations/lightning.py",
        old='self._early_stops.load_state_dict(state["callbacks"])',
        new="self._early_stops.load_state_dict({})",
        tests=_HOOKS,
    ),
    Mutant(
        name="patience-counts-old-metrics",
        harm="with eval_every a trial is stopped for metrics that were not measured again",
        file="rubberband/integrations/lightning.py",
        old="if self._is_evaluated and self._early_stops",
        new="if self._early_stops",
        tests=_HOOKS,
    ),
    Mutant(
        name="callbacks-are-read-past",
        harm="ModelCheckpoint and callbacks of one's own are left out without a word",
        file="rubberband/integrations/lightning_hooks.py",
        old='if name != "EarlyStopping" or not place',
        new='if name == "EarlyStopping" and not place',
        tests=_HOOKS,
    ),
    Mutant(
        name="reports-count-as-evaluations",
        harm="the patience of an early stopping counts evaluations that the user's Trainer does not make",
        file="rubberband/integrations/transformers.py",
        old="callbacks, handler.callbacks = handler.callbacks, [self]",
        new="callbacks = handler.callbacks",
        tests=_TRAINER,
    ),
    Mutant(
        name="reports-draw-random-numbers",
        harm="dropout and order after each report are not those of the user's own Trainer",
        file="rubberband/integrations/transformers.py",
        old="with torch.random.fork_rng():",
        new="with torch.enable_grad():",
        tests=_TRAINER,
    ),
    Mutant(
        name="patience-of-a-trainer-begins-anew",
        harm="EarlyStoppingCallback forgets at every SYNC how long it has waited",
        file="rubberband/integrations/transformers.py",
        old="trainer.args.restore_callback_states_from_checkpoint = True",
        new="trainer.args.restore_callback_states_from_checkpoint = False",
        tests=_TRAINER,
    ),
    Mutant(
        name="keys-of-schedules-are-read-past",
        harm="a mistyped interval of a Lightning schedule steps it by epochs, without a word",
        file="rubberband/integrations/lightning.py",
        old="if odd := [name for name in given if name not in known]:",
        new="if odd := []:",
        tests=("tests/unit/test_lightning.py",),
    ),
    Mutant(
        name="callbacks-count-anew",
        harm="a callback that freezes layers at an epoch does so again, later, after each SYNC",
        file="rubberband/integrations/transformers.py",
        old="                vars(each).update(found)\n",
        new="                pass\n",
        tests=_TRAINER,
    ),
    Mutant(
        name="frozen-layers-thaw-in-a-trainer",
        harm="layers that a callback froze are trained again after a SYNC",
        file="rubberband/integrations/transformers.py",
        old="                each.requires_grad = name not in frozen\n",
        new="                pass\n",
        tests=_TRAINER,
    ),
    Mutant(
        name="arguments-are-read-past",
        harm="push_to_hub and others are left out without a word",
        file="rubberband/integrations/transformers.py",
        old="if name in defaults and getattr(args, name) != defaults[name]:",
        new="if False:",
        tests=_TRAINER,
    ),
    Mutant(
        name="stopped-trainers-fail",
        harm="a trial that EarlyStoppingCallback ends counts as failed, and leaves the ranking",
        file="rubberband/integrations/transformers.py",
        old="if trainer.state.global_step < trainer.state.max_steps:",
        new="if False:",
        tests=_TRAINER,
    ),
    Mutant(
        name="removed-keys-stop-old-experiments",
        harm="an experiment that was accepted with a key that is gone cannot be resumed",
        file="rubberband/spec/fields.py",
        old='if f"{above}{key}" not in REMOVED',
        new="if above is not None",
        tests=_REMOVED,
    ),
    Mutant(
        name="removed-keys-are-slips",
        harm="who writes a removed key is told of another one, and not what to use",
        file="rubberband/spec/fields.py",
        old="REMOVED.get(dotted(at), reason)",
        new="reason",
        tests=_REMOVED,
    ),
    Mutant(
        name="removed-options-are-slips",
        harm="a script with a removed option is told only that there is none, and not what to use",
        file="rubberband/cli.py",
        old='REMOVED.get(f"{self.name} {option}")',
        new="REMOVED.get(option)",
        tests=_REMOVED,
    ),
    Mutant(
        name="jobs-of-before-are-refused",
        harm="no journal that an earlier version wrote can be read",
        file="executor/journal/journal.py",
        old='    body = _GONE.sub("", body)\n',
        new="",
        tests=_REMOVED,
    ),
)
