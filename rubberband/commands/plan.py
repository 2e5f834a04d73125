"""`rubberband plan`: an estimate with today's prices and the account's quotas. Nothing is started or spent."""

from __future__ import annotations

from rubberband.commands.estimate import (
    Asked,
    CompareOption,
    FileArgument,
    FrontierOption,
    HtmlOption,
    Output,
    OutputOption,
    Overrides,
    PlanOption,
    Policy,
    PolicyOption,
    SeedOption,
    show_estimate,
)


def plan(
    file: FileArgument,
    output: OutputOption = Output.table,
    policy: PolicyOption = Policy.optimal,
    plan: PlanOption = None,
    frontier: FrontierOption = False,
    html: HtmlOption = None,
    compare_to: CompareOption = None,
    seed: SeedOption = 0,
    overrides: Overrides = None,
) -> None:
    """Estimate an experiment with live prices and quotas.

    What `estimate` does, with the prices that AWS asks now and no more instances than the account may hold. Where AWS
    cannot be asked, older prices are taken and that is told. Nothing is started, and nothing is spent.
    """
    asked = Asked(
        file=file,
        output=output,
        policy=policy,
        plan=plan,
        frontier=frontier,
        html=html,
        compare_to=compare_to,
        seed=seed,
        overrides=overrides or [],
    )
    from rubberband.home import default_home
    from rubberband.live_terms import live_terms

    show_estimate(asked, lambda experiment: live_terms(experiment, default_home()))
