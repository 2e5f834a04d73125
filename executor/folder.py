"""Where an experiment lives on disk: `HOME/experiments/NAME`, with its journal, checkpoints, logs and instances."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rubberband.errors import InputError, NameTakenError


@dataclass(frozen=True, slots=True, kw_only=True)
class ExperimentFolder:
    """The paths of one experiment below `home`. Making one touches nothing."""

    home: Path
    name: str

    @property
    def path(self) -> Path:
        """The experiment's own folder."""
        return self.home / "experiments" / self.name

    @property
    def journal(self) -> Path:
        """The SQLite file of the journal."""
        return self.path / "journal.db"

    @property
    def checkpoints(self) -> Path:
        """The default checkpoint store."""
        return self.path / "checkpoints"

    @property
    def logs(self) -> Path:
        """What trials print: `trial-NNN.log`."""
        return self.path / "logs"

    @property
    def instances(self) -> Path:
        """Records of local instances."""
        return self.path / "local"

    @property
    def exists(self) -> bool:
        """Whether the experiment was created."""
        return self.journal.exists()

    def require_free(self) -> None:
        """Raise NameTakenError, naming the ways out, if the experiment is here."""
        if self.exists:
            raise NameTakenError(
                f"the name {self.name!r} is taken by another experiment ({self.path}); go on with it by "
                f"`rubberband resume {self.name}`, or run this one under another name: -s name={self.name}-2"
            )

    def make(self) -> None:
        """Make the folder. Raises NameTakenError if the experiment is here, InputError if it cannot be made."""
        self.require_free()
        try:
            self.logs.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(
                f"{self.path} cannot be made ({error.strerror}); set RUBBERBAND_HOME to a folder"
            ) from None

    def require(self) -> None:
        """Raise InputError, naming the experiments that exist, unless this one does."""
        if not self.exists:
            known = ", ".join(folder.name for folder in folders(self.home)) or "none"
            raise InputError(f"there is no experiment {self.name!r} in {self.home}; there are: {known}")

    @property
    def driven(self) -> bool:
        """Whether a living driver is at work on it."""
        if not self.path.is_dir():
            return False
        with self._locked() as free:
            return not free

    @contextmanager
    def driving(self) -> Iterator[None]:
        """Be its one driver. Raises InputError if there is another."""
        with self._locked() as free:
            if not free:
                raise InputError(f"another driver is at work on experiment {self.name!r}; wait for it, or stop it")
            yield

    @contextmanager
    def _locked(self) -> Iterator[bool]:
        with open(self.path / "driver.lock", "a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            yield True


def folders(home: Path) -> list[ExperimentFolder]:
    """The experiments below `home`, by name."""
    found = (home / "experiments").glob("*/journal.db")
    return [ExperimentFolder(home=home, name=journal.parent.name) for journal in sorted(found)]
