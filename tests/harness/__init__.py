"""Harnesses that take whole runs through faults; each replays one seed or point: `replay_command`."""


def replay_command(module: str, *what: object, **options: object) -> str:
    """The command that tells the story of a run: a call of `tell` of a harness."""
    given = [f"{each!r}" for each in what] + [
        f"{name}={value!r}" for name, value in options.items() if value is not None
    ]
    return f'python -c "from tests.harness.{module} import tell; tell({", ".join(given)})"'
