"""All planted bugs, by part of the program."""

from __future__ import annotations

from tests.mutation import (
    allowance,
    asynchronous,
    clouds,
    ec2,
    ends,
    environment,
    faults,
    first_hour,
    gangs,
    gpus,
    homes,
    inputs,
    memory,
    money,
    plans,
    predictions,
    profiles,
    programs,
    ray_tune,
    service,
    training,
)
from tests.mutation.mutant import Mutant

MUTANTS: tuple[Mutant, ...] = (
    *money.MUTANTS,
    *allowance.MUTANTS,
    *clouds.MUTANTS,
    *ec2.MUTANTS,
    *plans.MUTANTS,
    *predictions.MUTANTS,
    *training.MUTANTS,
    *gangs.MUTANTS,
    *homes.MUTANTS,
    *environment.MUTANTS,
    *asynchronous.MUTANTS,
    *service.MUTANTS,
    *first_hour.MUTANTS,
    *inputs.MUTANTS,
    *faults.MUTANTS,
    *gpus.MUTANTS,
    *ends.MUTANTS,
    *ray_tune.MUTANTS,
    *profiles.MUTANTS,
    *memory.MUTANTS,
    *programs.MUTANTS,
)
assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS), "names are of one bug each"
