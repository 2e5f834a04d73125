"""Plans that were previewed, and requests with an Idempotency-Key, in the store: what need not be done again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

import sqlalchemy as sql

from rubberband.api.settings import Keeping
from rubberband.api.store.records import KeptAnswer, StoredPlan
from rubberband.api.store.schema import KEYS, PLANS
from rubberband.executor.database import Database

SERVED_WITHIN_S = 60.0
"""After that, a request without an answer is taken for one that came to nothing."""
_PLAN = sql.select(PLANS).where(PLANS.c.id == sql.bindparam("id"))


class RequestRows:
    """The part of the store that is about requests sent again."""

    _database: Database
    _keeping: Keeping

    def keep_plans(self, plans: Sequence[StoredPlan]) -> None:
        """See `Store.keep_plans`."""
        names = PLANS.c.keys()
        insert = self._database.if_absent(PLANS)
        insert = insert.on_conflict_do_update(
            index_elements=["id"], set_={name: insert.excluded[name] for name in names}
        )
        with self._database.writing(durable=False) as connection:
            connection.execute(insert, [{name: getattr(plan, name) for name in names} for plan in plans])

    def plan(self, id: str) -> StoredPlan | None:
        """See `Store.plan`."""
        with self._database.reading() as connection:
            row = connection.execute(_PLAN, {"id": id}).first()
        return None if row is None else StoredPlan(**row._mapping)

    def plan_ids(self) -> list[str]:
        """See `Store.plan_ids`."""
        with self._database.reading() as connection:
            return list(connection.scalars(sql.select(PLANS.c.id).order_by(PLANS.c.created_at)))

    def claim_key(self, key: str, *, owner: str, request_hash: str, at: float) -> KeptAnswer | str | None:
        """See `Store.claim_key`."""
        claim = {"owner": owner, "key": key, "request_hash": request_hash, "claimed_at": at}
        with self._database.writing() as connection:
            stale = KEYS.c.claimed_at <= at - self._keeping.answers_s
            connection.execute(sql.delete(KEYS).where(_of(key, owner), stale))
            insert = self._database.if_absent(KEYS).on_conflict_do_nothing(index_elements=["owner", "key"])
            if connection.execute(insert.values(claim).returning(KEYS.c.key)).first() is not None:
                return None
            row = connection.execute(sql.select(KEYS).where(_of(key, owner)).with_for_update()).one()
            if row.request_hash != request_hash:
                return "reused"
            if row.status is not None:
                return KeptAnswer(status=row.status, headers=row.headers, body=row.body)
            if row.claimed_at > at - SERVED_WITHIN_S:
                return "busy"
            connection.execute(sql.update(KEYS).where(_of(key, owner)).values(claimed_at=at))
        return None

    def keep_answer(self, key: str, *, owner: str, answer: KeptAnswer, at: float) -> None:
        """See `Store.keep_answer`."""
        unanswered = sql.update(KEYS).where(_of(key, owner), KEYS.c.status.is_(None))
        with self._database.writing() as connection:
            connection.execute(unanswered.values(claimed_at=at, **asdict(answer)))

    def free_key(self, key: str, *, owner: str) -> None:
        """See `Store.free_key`."""
        with self._database.writing() as connection:
            connection.execute(sql.delete(KEYS).where(_of(key, owner), KEYS.c.status.is_(None)))

    def free_keys(self) -> None:
        """See `Store.free_keys`."""
        with self._database.writing() as connection:
            connection.execute(sql.delete(KEYS).where(KEYS.c.status.is_(None)))

    def _prune_requests(self, connection: sql.Connection, at: float) -> None:
        keeping, made_at = self._keeping, PLANS.c.created_at
        connection.execute(sql.delete(KEYS).where(KEYS.c.claimed_at <= at - keeping.answers_s))
        connection.execute(sql.delete(PLANS).where(made_at <= at - keeping.plans_s))
        beyond = sql.select(PLANS.c.id).order_by(made_at.desc(), PLANS.c.id.desc()).offset(keeping.plans)
        connection.execute(sql.delete(PLANS).where(PLANS.c.id.in_(beyond)))


def _of(key: str, owner: str) -> sql.ColumnElement[bool]:
    return sql.and_(KEYS.c.owner == owner, KEYS.c.key == key)
