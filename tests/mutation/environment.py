"""Planted bugs of the variables and secrets that trials' processes get."""

from __future__ import annotations

from tests.mutation.mutant import Mutant

_UNIT = ("tests/unit/test_environment.py",)
_HANDOVER = ("tests/unit/test_aws_handover.py",)
_RUN = ("tests/integration/test_environment_run.py",)

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        name="driver-imports-without-variables",
        harm="a module that needs a variable at its import is refused, and what it prints shows secrets",
        file="executor/training/entrypoint.py",
        old="with self.environment.within():",
        new="if True:",
        tests=_UNIT,
    ),
    Mutant(
        name="no-variables-before-the-import",
        harm="a module that reads a variable at its import finds none",
        file="executor/ray/fork_server.py",
        old="entrypoint.environment.put()",
        new="pass",
        tests=_RUN,
    ),
    Mutant(
        name="secret-printed-in-parts",
        harm="a log keeps a secret that two writes printed",
        file="executor/logs/trial_log.py",
        old="default=0) if content else 0",
        new="default=0) if False else 0",
        tests=_UNIT,
    ),
    Mutant(
        name="secret-in-the-message-of-an-error",
        harm="the journal and the report keep a secret that an exception's message has",
        file="executor/ray/slot_worker.py",
        old="message=environment.masked(item.message)",
        new="message=item.message",
        tests=_RUN,
    ),
    Mutant(
        name="secret-in-a-url-unmasked",
        harm="a password in a URL is kept as it is quoted there",
        file="rubberband/values/environment.py",
        old='quote(value, safe="")',
        new="value",
        tests=_UNIT,
    ),
    Mutant(
        name="service-hands-out-every-secret",
        harm="a token of a service reads any variable of its operator",
        file="api/body.py",
        old='("secrets", "--secret", resources.secrets, settings.secrets)',
        new='("secrets", "--secret", (), settings.secrets)',
        tests=_UNIT,
    ),
    Mutant(
        name="profile-of-other-variables",
        harm="a plan is made of times that another data set took",
        file="rubberband/running/profile_cache.py",
        old="settings.append(experiment.resources.env)",
        new="pass",
        tests=_UNIT,
    ),
    Mutant(
        name="empty-secret-taken",
        harm="a run is paid for whose trials all fail for want of a token",
        file="rubberband/spec/resources.py",
        old='            if not value:\n                raise InputError(f"resources.secrets',
        new='            if False:\n                raise InputError(f"resources.secrets',
        tests=_UNIT,
    ),
    Mutant(
        name="secret-stays-in-ssm",
        harm="the account keeps a secret that a head has read",
        file="cloud/aws/handover.py",
        old="                delete_secrets(session, name)\n",
        new="",
        tests=_HANDOVER,
    ),
    Mutant(
        name="secret-of-no-run-stays-in-ssm",
        harm="the account keeps a secret of a run that the head refused",
        file="cloud/aws/head.py",
        old="                delete_secrets(self.session, parameter)\n",
        new="                pass\n",
        tests=_HANDOVER,
    ),
    Mutant(
        name="resume-on-the-head-without-secrets",
        harm="a resume on the head rents instances, although its trials have no token",
        file="rubberband/commands/on_head.py",
        old='["resume", *words], None, made_of, secrets)',
        new='["resume", *words], None, made_of, "")',
        tests=_HANDOVER,
    ),
    Mutant(
        name="instances-read-what-is-sent-to-the-head",
        harm="any instance of an owner may read the secrets of all of the owner's runs",
        file="cloud/aws/policies/worker.json",
        old="parameter/rubberband/OWNER/ray-token",
        new="parameter/rubberband/OWNER/*",
        tests=_HANDOVER,
    ),
)
